"""litellm in front of a real server, by three of its providers: each refusal is the exception that its users catch."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.foreign_envs import env_python
from tests.doubles.server_under_test import ServerUnderTest

pytestmark = [pytest.mark.clients, pytest.mark.slow]

TOY_MODEL = Path(__file__).parents[2] / "examples" / "toy_model"
KEY = "a key"
ENDED = {
    "overflow": "ContextWindowExceededError",
    "overflow by max_tokens": "ContextWindowExceededError",
    "bad number": "BadRequestError",
    "wrong key": "AuthenticationError",
    "unknown model": "NotFoundError",
    "no time": "Timeout",
    "queue is full": "RateLimitError",
}


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    """How each call ended, by its name."""
    python = env_python("litellm")
    flags = [
        "--served-model-name",
        "toy",
        "--api-key",
        KEY,
        "--max-queued-requests",
        "1",
        "--device",
        "cpu",
        "--dtype",
        "float32",
    ]
    with ServerUnderTest(TOY_MODEL, tmp_path_factory.mktemp("server"), *flags, behaviour=None) as server:
        server.wait_ready()
        env = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
        script = Path(__file__).parent / "litellm_calls.py"
        ran = subprocess.run([python, str(script), server.url, KEY], capture_output=True, text=True, env=env)
        assert ran.returncode == 0, ran.stderr[-3000:]
        ended = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
        yield {call.pop("name"): call for call in ended}


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
@pytest.mark.parametrize("stream", ["", " streamed"])
def test_litellm_raises_the_expected_exceptions(calls: dict[str, dict[str, Any]], provider: str, stream: str) -> None:
    text = calls[f"{provider} answers{stream}"].get("text")
    assert text and calls[f"{provider} dropped{stream}"].get("text"), calls
    found = {name: calls[f"{provider} {name}{stream}"] for name in ENDED}
    assert {name: call.get("error") for name, call in found.items()} == ENDED, found


def test_litellm_text_and_responses_calls(calls: dict[str, dict[str, Any]]) -> None:
    assert calls["text answers"].get("text") and calls["responses answers"].get("text") == "message", calls
    for name in ("text overflow", "responses overflow"):
        assert calls[name].get("error") == "ContextWindowExceededError", calls[name]
