"""Agents of others, unchanged: each later turn of theirs computes its own new tokens, by the usage that they are told.

The model's words are scripted, all else is a server of the toy model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.doubles.agent_loops import LOOPS
from tests.doubles.server_under_test import ServerUnderTest
from tests.doubles.tool_loops import REQUESTS, SCRIPT, TOOLS, recomputed

pytestmark = pytest.mark.process

TOY_MODEL = Path(__file__).parents[2] / "examples" / "toy_model"
FLAGS = ("--max-total-tokens", "65536", "--page-size", "16", "--dtype", "float32", "--device", "cpu")
WAYS = {
    "openai chat": (False, True),
    "openai responses": (True,),
    "openai stored responses": (False,),
    "anthropic": (False, True),
    "openai-agents chat": (False,),
    "openai-agents responses": (True,),
    "pydantic-ai chat": (False,),
    "pydantic-ai responses": (True,),
    "pydantic-ai messages": (True,),
    "langchain chat": (True,),
    "langchain responses": (False,),
}
"""Whether it streams, in `make test`; `make test-slow` runs the other way, too."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    flags = [*FLAGS, "--linear-backend", "torch", "--served-model-name", "toy", "--tool-call-parser", "hermes"]
    folder, launcher = tmp_path_factory.mktemp("server"), "scripted_server.py"
    environment = {"BATON_SCRIPT": json.dumps(SCRIPT)}
    with ServerUnderTest(
        TOY_MODEL, folder, *flags, behaviour={}, launcher=launcher, environment=environment
    ) as running:
        yield running.wait_ready()


CASES = [
    pytest.param(
        name,
        stream,
        id=f"{name}{' streamed' if stream else ''}",
        marks=() if stream in WAYS[name] else pytest.mark.slow,
    )
    for name in LOOPS
    for stream in (False, True)
]


@pytest.mark.parametrize(("name", "stream"), CASES)
def test_each_later_turn_computes_only_its_new_tokens(server: ServerUnderTest, name: str, stream: bool) -> None:
    turns = LOOPS[name](server.url, TOOLS, f"Be brief. {name} {stream}", stream)
    assert len(turns) == REQUESTS and not any(recomputed(turns)), turns
