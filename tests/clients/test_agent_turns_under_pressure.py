"""Agents of others, unchanged, on a server with memory for a few of them. While a tool runs, other clients' prompts
take all memory that nothing keeps, and wait for more. Turns behind a tool call that takes less than the break-even time
still compute their own new tokens.

The break-even time is the fill time that the server measures and reports; nothing sets it, or how long KV is kept. On
the toy model it would be shorter than a busy machine takes to answer, so the device is emulated: a slower one, which
sleeps for each prompt token (`tests/doubles/scripted_worker.py`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.doubles.agent_loops import LOOPS
from tests.doubles.page_flood import PageFlood
from tests.doubles.pressed_tools import PressedTool, behind_short_tools, job_of, measure_fill_time
from tests.doubles.server_under_test import ServerUnderTest
from tests.doubles.tool_loops import BEHIND_TOOLS, REQUESTS, SCRIPT, TOOLS, Tools, TurnUsage, recomputed

pytestmark = pytest.mark.process

TOY_MODEL = Path(__file__).parents[2] / "examples" / "toy_model"
PAGE, PAGES = 512, 32
DEVICE = {"prompt_token_s": 0.0001}
"""The fill time is more than 1.6 s: the pool × this."""
NAMES = ["openai chat", "anthropic", "pydantic-ai messages", "langchain chat"]
SHARE = 0.9


def policy(*flags: str, slow: bool = True) -> Any:
    return pytest.param(flags, id=flags[0], marks=pytest.mark.slow if slow else ())


@pytest.fixture(scope="module", params=[policy("auto", slow=False)])
def flags(request: pytest.FixtureRequest) -> tuple[str, ...]:
    return request.param


@pytest.fixture(scope="module")
def trace(flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trace") / "jobs.jsonl"


@pytest.fixture(scope="module")
def server(flags: tuple[str, ...], trace: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    arguments = [
        *("--max-total-tokens", str(PAGES * PAGE), "--page-size", str(PAGE), "--dtype", "float32", "--device", "cpu"),
        *("--linear-backend", "torch", "--served-model-name", "toy", "--tool-call-parser", "hermes"),
        *("--scheduler-trace", str(trace), "--schedule-policy", *flags),
    ]
    folder, launcher = tmp_path_factory.mktemp("server"), "scripted_server.py"
    environment = {"BATON_SCRIPT": json.dumps(SCRIPT), "BATON_DEVICE": json.dumps(DEVICE)}
    with ServerUnderTest(
        TOY_MODEL, folder, *arguments, behaviour={}, launcher=launcher, environment=environment
    ) as running:
        running.wait_ready()
        measure_fill_time(running.url, PageFlood(running.url, "first", PAGES))
        yield running


def pressed(tool: PressedTool) -> Tools:
    """The tools; each waits. (The wind's only ever runs beside another.)"""

    def wait_before(each: Callable[..., str]) -> Callable[..., str]:
        @functools.wraps(each)
        def run(*args: Any, **kwargs: Any) -> str:
            tool.wait()
            return each(*args, **kwargs)

        return run

    return {name: each if name == "wind" else wait_before(each) for name, each in TOOLS.items()}


def test_flood_evicts_all_that_nothing_keeps(server: ServerUnderTest) -> None:
    """All but a page, which admission leaves for the next tokens of running requests."""

    def cached(first: int) -> int:
        ids = list(range(first, first + PAGE + 100))
        asked = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1}, "retain_ttl": 0}
        return server.generate(**asked).json()["meta_info"]["cached_tokens"]

    assert [cached(100), cached(100), cached(800)] == [0, PAGE, 0]
    PageFlood(server.url, "control", PAGES).fill_pool()
    assert cached(100) == 0


def play_all(server: ServerUnderTest) -> list[tuple[list[TurnUsage], list[float]]]:
    """Several agents at a time: the turns of each, and the fill time at each of its tool calls."""

    def play(name: str) -> tuple[list[TurnUsage], list[float]]:
        tool = PressedTool(server.url, PageFlood(server.url, name, PAGES))
        return LOOPS[name](server.url, pressed(tool), f"Be brief. {name}", False), tool.fill_times_s

    with ThreadPoolExecutor(2) as threads:
        played = list(threads.map(play, NAMES))
    assert all(len(turns) == REQUESTS for turns, _ in played)
    return played


@pytest.mark.parametrize("flags", [policy("auto", slow=False), policy("handoff")], indirect=True)
def test_turns_behind_short_tools_outlast_a_flood(server: ServerUnderTest, trace: Path) -> None:
    played = play_all(server)
    server.wait_until(lambda: all(job_of(turns, trace) for turns, _ in played), "the trace of all turns")
    more: list[int] = []
    for turns, fill_times_s in played:
        more += behind_short_tools(turns, dict(zip(BEHIND_TOOLS, fill_times_s)), recomputed(turns), trace)
    assert len(more) >= len(NAMES) * len(BEHIND_TOOLS) / 2, "this machine is too busy for tools shorter than that"
    assert sum(not tokens for tokens in more) >= SHARE * len(more), more


@pytest.mark.parametrize("flags", [policy("fcfs", "--conversation-ttl", "0")], indirect=True)
def test_turns_are_lost_in_a_flood_where_nothing_keeps_them(server: ServerUnderTest) -> None:
    """The control of the test above."""
    more = [recomputed(turns)[number] for turns, _ in play_all(server) for number in BEHIND_TOOLS]
    assert sum(tokens > 0 for tokens in more) >= SHARE * len(more), more
