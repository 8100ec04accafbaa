"""mini-swe-agent, unchanged, with its LiteLLM models and its own prompts, on an environment that runs nothing: each
later request computes its own new tokens only, calm or while other clients' prompts take all memory that nothing keeps,
and commands a share of the break-even time (test_agent_turns_under_pressure.py)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles.foreign_envs import ROOT, env_python
from tests.doubles.page_flood import PageFlood
from tests.doubles.pressed_tools import behind_short_tools, job_of, measure_fill_time
from tests.doubles.server_under_test import ServerUnderTest
from tests.doubles.small_model import write_small_model
from tests.doubles.swe_commands import COMMANDS, swe_script
from tests.doubles.tool_loops import TurnUsage, recomputed

pytestmark = [pytest.mark.clients, pytest.mark.slow]

PAGE, PAGES = 512, 32
DEVICE = {"prompt_token_s": 0.0001}
RUNS = 5
SHARE = 0.9
"""Share of the requests after commands that take less than the break-even time, while the pool is filled."""


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace") / "jobs.jsonl"


@pytest.fixture(scope="module")
def server(trace: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    """Its prompts are longer than the toy model's context."""
    env_python("litellm")
    flags = [
        *("--load-format", "dummy", "--device", "cpu", "--dtype", "float32", "--served-model-name", "any"),
        *("--max-total-tokens", str(PAGES * PAGE), "--page-size", str(PAGE)),
        *("--schedule-policy", "auto", "--scheduler-trace", str(trace)),
    ]
    model, folder = write_small_model(tmp_path_factory.mktemp("model")), tmp_path_factory.mktemp("server")
    environment = {"BATON_SCRIPT": json.dumps(swe_script()), "BATON_DEVICE": json.dumps(DEVICE)}
    with ServerUnderTest(
        model, folder, *flags, behaviour={}, launcher="scripted_server.py", environment=environment
    ) as running:
        running.wait_ready()
        measure_fill_time(running.url, PageFlood(running.url, "first", PAGES))
        yield running


def run_agent(server: ServerUnderTest, home: Path, *arguments: str) -> list[tuple[list[TurnUsage], list[float]]]:
    """Returns each run's turns, and the fill time at each command."""
    env = os.environ | {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_SILENT_STARTUP": "1",
        "MSWEA_GLOBAL_CONFIG_DIR": str(home),
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
        "PYTHONPATH": str(ROOT),
    }
    script = Path(__file__).parent / "mini_swe_agent_runs.py"
    command = [env_python("litellm"), str(script), server.url, *arguments]
    ran = subprocess.run(command, capture_output=True, text=True, env=env)
    assert ran.returncode == 0, ran.stderr[-3000:]
    lines = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith('{"turns"')]
    runs = [([TurnUsage(*usage) for usage in line["turns"]], line["fill_times_s"]) for line in lines]
    print(runs)
    assert [len(turns) for turns, _ in runs] == [len(COMMANDS)] * RUNS
    return runs


def test_later_requests_of_a_calm_agent_compute_only_their_new_tokens(server: ServerUnderTest, tmp_path: Path) -> None:
    more = [recomputed(turns) for turns, _ in run_agent(server, tmp_path)]
    assert not any(any(found) for found in more), more


@pytest.mark.timeout(600)
def test_requests_behind_short_commands_outlast_a_flood(server: ServerUnderTest, trace: Path, tmp_path: Path) -> None:
    runs = run_agent(server, tmp_path, str(PAGES))
    server.wait_until(lambda: all(job_of(turns, trace) for turns, _ in runs), "the trace of all requests")
    more: list[int] = []
    for turns, fill_times_s in runs:
        more += behind_short_tools(turns, dict(enumerate(fill_times_s, 1)), recomputed(turns), trace)
    assert len(more) >= RUNS * (len(COMMANDS) - 1) / 2, "this machine is too busy for commands shorter than that"
    assert sum(not tokens for tokens in more) >= SHARE * len(more), more
