"""Agents of others, unchanged: each later turn of theirs computes its own new tokens, by the usage that they are told.

The clients name no job and mark nothing for caching. The model's words are scripted, all else is a server of the toy
model.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import anthropic
import openai
import pydantic_ai
import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from pydantic import SecretStr
from pydantic_ai.models import openai as pydantic_openai
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

from tests.doubles.server_under_test import ServerUnderTest
from tests.doubles.tool_loops import (
    ANSWERS,
    QUESTIONS,
    REQUESTS,
    SCRIPT,
    TOOLS,
    TurnUsage,
    assert_computes_only_new_tokens,
    function_schema,
)  # fmt: skip

pytestmark = pytest.mark.process

TOY_MODEL = Path(__file__).parents[2] / "examples" / "toy_model"
FLAGS = ("--max-total-tokens", "65536", "--page-size", "16", "--dtype", "float32", "--device", "cpu")
SYSTEM = "Be brief."


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    flags = [*FLAGS, "--linear-backend", "torch", "--served-model-name", "toy", "--tool-call-parser", "hermes"]
    launcher, environment = "scripted_server.py", {"BATON_SCRIPT": json.dumps(SCRIPT)}
    with ServerUnderTest(
        TOY_MODEL,
        tmp_path_factory.mktemp("server"),
        *flags,
        behaviour={},
        launcher=launcher,
        environment=environment,
    ) as running:
        yield running.wait_ready()


both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


def ways(*always: tuple[str, bool]) -> pytest.MarkDecorator:
    """Parametrizes (api, stream), both ways with each API; all but ``always`` are slow."""
    apis = dict.fromkeys(api for api, _ in always)
    return pytest.mark.parametrize(
        ("api", "stream"),
        [
            pytest.param(
                api,
                stream,
                id=f"{api} {'streamed' if stream else 'whole'}",
                marks=() if (api, stream) in always else pytest.mark.slow,
            )
            for api in apis
            for stream in (False, True)
        ],
    )


def run_tool(name: str, arguments: Mapping[str, Any]) -> str:
    return TOOLS[name](**arguments)


# -- openai ------------------------------------------------------------------------------------------------------------


def openai_usage(usage: Any) -> TurnUsage:
    return TurnUsage(usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens, usage.completion_tokens)


@both_ways
def test_openai_chat_loop(server: ServerUnderTest, stream: bool) -> None:
    tools: list[Any] = [
        {
            "type": "function",
            "function": {"name": name, "description": tool.__doc__, "parameters": function_schema(name)},
        }
        for name, tool in TOOLS.items()
    ]
    messages: list[Any] = [{"role": "system", "content": f"{SYSTEM} {stream}"}]
    turns: list[TurnUsage] = []
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        for question, answer in zip(QUESTIONS, ANSWERS):
            messages.append({"role": "user", "content": question})
            while messages[-1]["role"] != "assistant":
                asked: dict[str, Any] = {"model": "toy", "messages": messages, "tools": tools}
                if stream:
                    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as events:
                        completion = events.get_final_completion()
                else:
                    completion = client.chat.completions.create(**asked)
                message = completion.choices[0].message
                turns.append(openai_usage(completion.usage))
                messages.append(message.to_dict())
                for call in message.tool_calls or ():
                    assert call.type == "function"
                    found = run_tool(call.function.name, json.loads(call.function.arguments))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
            assert messages[-1]["content"] == answer
    assert len(turns) == REQUESTS
    assert_computes_only_new_tokens(turns)


@ways(("resent", True), ("stored", False))
def test_openai_responses_loop(server: ServerUnderTest, api: str, stream: bool) -> None:
    """stored: the server keeps the conversation, and only what is new is sent."""
    stored = api == "stored"
    tools: list[Any] = [
        {
            "type": "function",
            "name": name,
            "description": tool.__doc__,
            "parameters": function_schema(name),
            "strict": False,
        }
        for name, tool in TOOLS.items()
    ]
    said: list[Any] = []
    turns: list[TurnUsage] = []
    asked: dict[str, Any] = {"model": "toy", "tools": tools, "instructions": f"{SYSTEM} {stream} {stored}"}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        for question, answer in zip(QUESTIONS, ANSWERS):
            said.append({"role": "user", "content": question})
            while True:
                if stream:
                    with client.responses.stream(**asked, store=stored, input=said) as events:
                        response = events.get_final_response()
                else:
                    response = client.responses.create(**asked, store=stored, input=said)
                assert response.usage is not None
                details = response.usage.input_tokens_details
                turns.append(
                    TurnUsage(response.usage.input_tokens, details.cached_tokens, response.usage.output_tokens)
                )
                if stored:
                    asked["previous_response_id"], said = response.id, []
                else:
                    said += [item.to_dict() for item in response.output]
                calls = [item for item in response.output if item.type == "function_call"]
                for call in calls:
                    found = run_tool(call.name, json.loads(call.arguments))
                    said.append({"type": "function_call_output", "call_id": call.call_id, "output": found})
                if not calls:
                    break
            assert response.output_text == answer
    assert len(turns) == REQUESTS
    assert_computes_only_new_tokens(turns)


# -- anthropic ---------------------------------------------------------------------------------------------------------


@both_ways
def test_anthropic_loop(server: ServerUnderTest, stream: bool) -> None:
    tools: list[Any] = [
        {"name": name, "description": tool.__doc__, "input_schema": function_schema(name)}
        for name, tool in TOOLS.items()
    ]
    messages: list[Any] = []
    turns: list[TurnUsage] = []
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        for question, answer in zip(QUESTIONS, ANSWERS):
            messages.append({"role": "user", "content": question})
            while messages[-1]["role"] == "user":
                asked: dict[str, Any] = {"model": "toy", "max_tokens": 200, "messages": messages, "tools": tools}
                asked["system"] = f"{SYSTEM} {stream}"
                if stream:
                    with client.messages.stream(**asked) as events:
                        message = events.get_final_message()
                else:
                    message = client.messages.create(**asked)
                usage = message.usage
                cached = usage.cache_read_input_tokens or 0
                prompt = usage.input_tokens + cached + (usage.cache_creation_input_tokens or 0)
                turns.append(TurnUsage(prompt, cached, usage.output_tokens))
                messages.append({"role": "assistant", "content": message.content})
                results = [
                    {"type": "tool_result", "tool_use_id": block.id, "content": run_tool(block.name, block.input)}
                    for block in message.content
                    if block.type == "tool_use"
                ]
                if results:
                    messages.append({"role": "user", "content": results})
            (block,) = messages[-1]["content"]
            assert block.type == "text" and block.text == answer
    assert len(turns) == REQUESTS
    assert_computes_only_new_tokens(turns)


# -- openai-agents -----------------------------------------------------------------------------------------------------


@ways(("chat", False), ("responses", True))
def test_openai_agents_loop(server: ServerUnderTest, api: str, stream: bool) -> None:
    make_model = OpenAIChatCompletionsModel if api == "chat" else OpenAIResponsesModel
    set_tracing_disabled(True)

    async def run() -> list[TurnUsage]:
        turns: list[TurnUsage] = []
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            agent = Agent(
                name="helper",
                instructions=f"{SYSTEM} {stream}",
                tools=[function_tool(tool) for tool in TOOLS.values()],
                model=make_model(model="toy", openai_client=client),
                model_settings=ModelSettings(include_usage=True),
            )
            said: list[Any] = []
            for question, answer in zip(QUESTIONS, ANSWERS):
                said.append({"role": "user", "content": question})
                if stream:
                    result = Runner.run_streamed(agent, said)
                    async for _ in result.stream_events():
                        pass
                else:
                    result = await Runner.run(agent, said)
                assert result.final_output == answer
                said = result.to_input_list()
                for response in result.raw_responses:
                    usage = response.usage
                    cached = usage.input_tokens_details.cached_tokens
                    turns.append(TurnUsage(usage.input_tokens, cached, usage.output_tokens))
        return turns

    turns = asyncio.run(run())
    assert len(turns) == REQUESTS
    assert_computes_only_new_tokens(turns)


# -- pydantic-ai -------------------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def pydantic_model(url: str, api: str) -> AsyncIterator[Any]:
    if api == "anthropic":
        async with anthropic.AsyncAnthropic(base_url=url, api_key="none", max_retries=0) as client:
            settings = pydantic_ai.ModelSettings(max_tokens=200)  # the default, 4096, is more than the context
            yield AnthropicModel("toy", provider=AnthropicProvider(anthropic_client=client), settings=settings)
    else:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            model = pydantic_openai.OpenAIChatModel if api == "chat" else pydantic_openai.OpenAIResponsesModel
            yield model("toy", provider=OpenAIProvider(openai_client=client))


async def read_events(context: Any, events: Any) -> None:
    """A handler of events, which makes pydantic-ai stream."""
    async for _ in events:
        pass


@ways(("chat", False), ("responses", True), ("anthropic", True))
def test_pydantic_ai_loop(server: ServerUnderTest, api: str, stream: bool) -> None:
    async def run() -> list[TurnUsage]:
        said: list[Any] = []
        async with pydantic_model(server.url, api) as model:
            agent = pydantic_ai.Agent(model, instructions=f"{SYSTEM} {stream}", tools=list(TOOLS.values()))
            for question, answer in zip(QUESTIONS, ANSWERS):
                handler = read_events if stream else None
                result = await agent.run(question, message_history=said, event_stream_handler=handler)
                assert result.output == answer
                said = result.all_messages()
        usages = [message.usage for message in said if message.kind == "response"]
        return [TurnUsage(usage.input_tokens, usage.cache_read_tokens, usage.output_tokens) for usage in usages]

    turns = asyncio.run(run())
    assert len(turns) == REQUESTS
    assert_computes_only_new_tokens(turns)


# -- langchain ---------------------------------------------------------------------------------------------------------


@ways(("chat", True), ("responses", False))
def test_langchain_loop(server: ServerUnderTest, api: str, stream: bool) -> None:
    model = ChatOpenAI(
        model="toy",
        base_url=f"{server.url}/v1",
        api_key=SecretStr("none"),
        max_retries=0,
        streaming=stream,
        stream_usage=True,
        use_responses_api=api == "responses",
    )
    agent: Any = create_agent(model, tools=list(TOOLS.values()), system_prompt=f"{SYSTEM} {stream}")
    said: list[Any] = []
    for question, answer in zip(QUESTIONS, ANSWERS):
        said.append({"role": "user", "content": question})
        said = agent.invoke({"messages": said})["messages"]
        assert said[-1].text == answer
    usages = [message.usage_metadata for message in said if message.type == "ai"]
    turns = [
        TurnUsage(usage["input_tokens"], usage["input_token_details"]["cache_read"], usage["output_tokens"])
        for usage in usages
    ]
    assert len(turns) == REQUESTS
    assert_computes_only_new_tokens(turns)
