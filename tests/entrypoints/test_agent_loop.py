"""A real agent loop, that of openai-agents: two tool calls, one after the other, then the answer. The words are
scripted, all else is a real server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


SAYS = [
    ["How warm is it where Ada lives?", call("city_of", '{"person": "Ada"}')],
    ["[tool]Zürich", "Let me see.\n" + call("temperature", '{"city": "Zürich", "unit": "celsius"}')],
    ["[tool]21 °celsius in Zürich", "It is 21 °C in Zürich."],
]
asked: list[str] = []


@function_tool
def city_of(person: str) -> str:
    """Where somebody lives."""
    asked.append(person)
    return "Zürich"


@function_tool
def temperature(city: str, unit: str) -> str:
    """How warm it is."""
    asked.append(city)
    return f"21 °{unit} in {city}"


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    folder = tmp_path_factory.mktemp("server")
    with ServerUnderTest(model, folder, "--tool-call-parser", "hermes", behaviour={"says": SAYS}) as running:
        yield running.wait_ready()


@pytest.mark.parametrize("stream", [False, True])
def test_openai_agents_loop_calls_two_tools_and_answers(server: ServerUnderTest, stream: bool) -> None:
    set_tracing_disabled(True)
    asked.clear()

    async def run() -> str:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            model = OpenAIChatCompletionsModel(model="any", openai_client=client)
            agent = Agent(name="helper", instructions="Be brief.", tools=[city_of, temperature], model=model)
            question = "How warm is it where Ada lives?"
            if not stream:
                return (await Runner.run(agent, question)).final_output
            running = Runner.run_streamed(agent, question)
            async for _ in running.stream_events():
                pass
            return running.final_output

    assert asyncio.run(run()) == "It is 21 °C in Zürich."
    assert asked == ["Ada", "Zürich"]
