"""mini-swe-agent, unchanged, with its LiteLLM models and its own prompts, on an environment that runs nothing: each
later request computes its own new tokens only, calm or while other clients' chats fill the pool."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles.chat_flood import FLOOD
from tests.doubles.foreign_envs import ROOT, env_python
from tests.doubles.server_under_test import ServerUnderTest
from tests.doubles.small_model import write_small_model
from tests.doubles.swe_commands import COMMANDS, swe_script
from tests.doubles.tool_loops import TurnUsage, recomputed

pytestmark = [pytest.mark.clients, pytest.mark.slow]

POOL = 8192
BREAK_EVEN_S = 600.0
RUNS = 5
SHARE = 0.9
"""Of the requests behind a command, while the pool is filled."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    """Its prompts are longer than the toy model's context."""
    env_python("litellm")
    flags = [
        *("--load-format", "dummy", "--device", "cpu", "--dtype", "float32", "--max-total-tokens", str(POOL)),
        *("--served-model-name", "any", "--schedule-policy", "handoff"),
        *("--lease-protection", str(BREAK_EVEN_S), "--pin-seconds", str(BREAK_EVEN_S)),
    ]
    model, folder = write_small_model(tmp_path_factory.mktemp("model")), tmp_path_factory.mktemp("server")
    environment = {"BATON_SCRIPT": json.dumps([[FLOOD, "Yes."], *swe_script()])}
    with ServerUnderTest(
        model, folder, *flags, behaviour={}, launcher="scripted_server.py", environment=environment
    ) as running:
        yield running.wait_ready()


@pytest.mark.parametrize("pool", [0, POOL], ids=["calm", "flood"])
def test_later_requests_compute_only_their_new_tokens(server: ServerUnderTest, tmp_path: Path, pool: int) -> None:
    env = os.environ | {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_GLOBAL_CONFIG_DIR": str(tmp_path),
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
        "PYTHONPATH": str(ROOT),
    }
    script = Path(__file__).parent / "mini_swe_agent_runs.py"
    command = [env_python("litellm"), str(script), server.url, *([str(pool)] if pool else [])]
    ran = subprocess.run(command, capture_output=True, text=True, env=env)
    assert ran.returncode == 0, ran.stderr[-3000:]
    runs = [[TurnUsage(*usage) for usage in json.loads(line)] for line in ran.stdout.splitlines() if line[:2] == "[["]
    print(runs)
    assert [len(turns) for turns in runs] == [len(COMMANDS)] * RUNS
    more = [tokens for turns in runs for tokens in recomputed(turns)[1:]]
    share = 1.0 if not pool else SHARE
    assert sum(not tokens for tokens in more) >= share * len(more), more
