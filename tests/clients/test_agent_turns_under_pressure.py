"""Agents of others, unchanged, on a server with memory for a few of them. While a tool runs, other clients send more
chats than the pool holds, none of which is continued. Turns behind a tool call still compute their own new tokens."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.agent_loops import LOOPS
from tests.doubles.chat_flood import FLOOD, ChatFlood
from tests.doubles.server_under_test import ServerUnderTest
from tests.doubles.tool_loops import BEHIND_TOOLS, REQUESTS, SCRIPT, TOOLS, Tools, TurnUsage, recomputed

pytestmark = pytest.mark.process

TOY_MODEL = Path(__file__).parents[2] / "examples" / "toy_model"
POOL = 6144
BREAK_EVEN_S = 600.0
"""The time after which keeping KV costs more than computing it again, so that every tool of a slow machine, too, takes
less."""
TOOL_S = 0.1
LOOPS_HERE = [
    ("openai chat", "anthropic"),
    ("pydantic-ai messages", "langchain chat"),
]
SHARE = 0.9


@pytest.fixture(scope="module", params=["auto", pytest.param("handoff", marks=pytest.mark.slow)])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    flags = [
        *("--max-total-tokens", str(POOL), "--schedule-policy", request.param, "--lease-protection", str(BREAK_EVEN_S)),
        *("--pin-seconds", str(BREAK_EVEN_S), "--dtype", "float32", "--device", "cpu", "--linear-backend", "torch"),
        *("--served-model-name", "toy", "--serve-any-model-name", "--tool-call-parser", "hermes"),
    ]
    folder, launcher = tmp_path_factory.mktemp("server"), "scripted_server.py"
    environment = {"BATON_SCRIPT": json.dumps([[FLOOD, "Yes."], *SCRIPT])}
    with ServerUnderTest(
        TOY_MODEL, folder, *flags, behaviour={}, launcher=launcher, environment=environment
    ) as running:
        yield running.wait_ready()


def slow_tools(flood: ChatFlood) -> Tools:
    """The tools; the pool is filled while one runs. (The wind's only ever runs beside another.)"""

    def slowed(tool: Callable[..., str]) -> Callable[..., str]:
        @functools.wraps(tool)
        def run(*args: Any, **kwargs: Any) -> str:
            flood.fill_pool()
            time.sleep(TOOL_S)
            return tool(*args, **kwargs)

        return run

    return {name: tool if name == "wind" else slowed(tool) for name, tool in TOOLS.items()}


def test_flood_evicts_all_that_nothing_keeps(server: ServerUnderTest) -> None:
    """The control of the test below: its own turns would be lost as these tokens are."""
    asked = {"input_ids": list(range(100, 500)), "sampling_params": {"max_new_tokens": 1}}
    assert server.generate(**asked).json()["meta_info"]["cached_tokens"] == 0
    assert server.generate(**asked).json()["meta_info"]["cached_tokens"] > 300
    ChatFlood(server.url, "control", POOL).fill_pool()
    assert server.generate(**asked).json()["meta_info"]["cached_tokens"] == 0


@pytest.mark.parametrize("names", LOOPS_HERE, ids=" and ".join)
def test_turns_behind_tool_calls_outlast_a_flood(server: ServerUnderTest, names: tuple[str, ...]) -> None:
    """Two agents at a time."""

    def play(name: str) -> list[TurnUsage]:
        return LOOPS[name](server.url, slow_tools(ChatFlood(server.url, name, POOL)), f"Be brief. {name}", False)

    with ThreadPoolExecutor(len(names)) as threads:
        played = list(threads.map(play, names))
    more = [recomputed(turns) for turns in played]
    print(more)
    assert all(len(turns) == REQUESTS for turns in played)
    behind = [found[number] for found in more for number in BEHIND_TOOLS]
    assert sum(not tokens for tokens in behind) >= SHARE * len(behind), more
