"""instructor, unchanged: each of its modes gets an object of its type from the toy model, by way of OpenAI's and
Anthropic's clients.

MD_JSON is left out: it asks for JSON in words alone, which the toy model cannot read. So are iterables, whose list has
no limit.
"""

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
ENDED = {
    "TOOLS": "tool_calls",
    "TOOLS_STRICT": "tool_calls",
    "JSON": "stop",
    "JSON_SCHEMA": "stop",
    "RESPONSES_TOOLS": "completed",
    "ANTHROPIC_TOOLS": "tool_use",
}
STREAMED = ("TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "ANTHROPIC_TOOLS")


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, dict[str, Any]]]:
    """What came of each call, by its name."""
    python = env_python("instructor")
    flags = ["--served-model-name", "toy", "--max-total-tokens", "8192", "--device", "cpu", "--dtype", "float32"]
    with ServerUnderTest(TOY_MODEL, tmp_path_factory.mktemp("server"), *flags, behaviour=None) as server:
        server.wait_ready()
        command = [python, "-W", "ignore", str(Path(__file__).parent / "instructor_calls.py"), server.url]
        ran = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ""})
        assert ran.returncode == 0, ran.stderr[-3000:]
        found = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
        yield {call.pop("name"): call for call in found}


@pytest.mark.parametrize("mode", ENDED)
def test_instructor_mode_gets_its_model(calls: dict[str, dict[str, Any]], mode: str) -> None:
    assert calls[mode].get("is_valid") and calls[mode]["ended"] == ENDED[mode], calls[mode]


@pytest.mark.parametrize("mode", STREAMED)
def test_instructor_streams_a_growing_model(calls: dict[str, dict[str, Any]], mode: str) -> None:
    streamed = calls[f"{mode} streamed"]
    assert streamed.get("is_valid") and streamed["num_objects"] > 3, streamed
