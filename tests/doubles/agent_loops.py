"""Agents as users of others' SDKs and frameworks write them: each plays the two questions of `tool_loops` on a server,
and returns what the client was told about each request. They name no job, and mark nothing for caching.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import anthropic
import openai
import pydantic_ai
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

from .tool_loops import ANSWERS, QUESTIONS, Tools, TurnUsage, arguments_schema

Loop = Callable[[str, Tools, str, bool], list[TurnUsage]]
"""(the server's URL, the tools, what the system message says, whether to stream) -> the usage of each request."""


# -- openai ------------------------------------------------------------------------------------------------------------


def play_openai_chat(url: str, tools: Tools, system: str, stream: bool) -> list[TurnUsage]:
    described = [
        {
            "type": "function",
            "function": {"name": name, "description": tool.__doc__, "parameters": arguments_schema(tool)},
        }
        for name, tool in tools.items()
    ]
    messages: list[Any] = [{"role": "system", "content": system}]
    turns: list[TurnUsage] = []
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        for question, answer in zip(QUESTIONS, ANSWERS):
            messages.append({"role": "user", "content": question})
            while messages[-1]["role"] != "assistant":
                asked: dict[str, Any] = {"model": "toy", "messages": messages, "tools": described}
                if stream:
                    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as events:
                        completion = events.get_final_completion()
                else:
                    completion = client.chat.completions.create(**asked)
                message = completion.choices[0].message
                usage: Any = completion.usage
                cached = usage.prompt_tokens_details.cached_tokens
                turns.append(TurnUsage(usage.prompt_tokens, cached, usage.completion_tokens))
                messages.append(message.to_dict())
                for call in message.tool_calls or ():
                    assert call.type == "function"
                    found = tools[call.function.name](**json.loads(call.function.arguments))
                    messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
            assert messages[-1]["content"] == answer
    return turns


def play_openai_responses(
    url: str, tools: Tools, system: str, stream: bool, *, stored: bool = False
) -> list[TurnUsage]:
    """stored: the server keeps the conversation, and only what is new is sent."""
    described = [
        {
            "type": "function",
            "name": name,
            "description": tool.__doc__,
            "parameters": arguments_schema(tool),
            "strict": False,
        }
        for name, tool in tools.items()
    ]
    said: list[Any] = []
    turns: list[TurnUsage] = []
    asked: dict[str, Any] = {"model": "toy", "tools": described, "instructions": system}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
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
                    found = tools[call.name](**json.loads(call.arguments))
                    said.append({"type": "function_call_output", "call_id": call.call_id, "output": found})
                if not calls:
                    break
            assert response.output_text == answer
    return turns


# -- anthropic ---------------------------------------------------------------------------------------------------------


def play_anthropic(url: str, tools: Tools, system: str, stream: bool) -> list[TurnUsage]:
    described = [
        {"name": name, "description": tool.__doc__, "input_schema": arguments_schema(tool)}
        for name, tool in tools.items()
    ]
    messages: list[Any] = []
    turns: list[TurnUsage] = []
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        for question, answer in zip(QUESTIONS, ANSWERS):
            messages.append({"role": "user", "content": question})
            while messages[-1]["role"] == "user":
                asked: dict[str, Any] = {"model": "toy", "max_tokens": 200, "messages": messages, "tools": described}
                asked["system"] = system
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
                    {"type": "tool_result", "tool_use_id": block.id, "content": tools[block.name](**block.input)}
                    for block in message.content
                    if block.type == "tool_use"
                ]
                if results:
                    messages.append({"role": "user", "content": results})
            (block,) = messages[-1]["content"]
            assert block.type == "text" and block.text == answer
    return turns


# -- openai-agents -----------------------------------------------------------------------------------------------------


def play_openai_agents(url: str, tools: Tools, system: str, stream: bool, *, api: str = "chat") -> list[TurnUsage]:
    make_model = OpenAIChatCompletionsModel if api == "chat" else OpenAIResponsesModel
    set_tracing_disabled(True)

    async def run() -> list[TurnUsage]:
        turns: list[TurnUsage] = []
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
            agent = Agent(
                name="helper",
                instructions=system,
                tools=[function_tool(tool) for tool in tools.values()],
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

    return asyncio.run(run())


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


def play_pydantic_ai(url: str, tools: Tools, system: str, stream: bool, *, api: str = "chat") -> list[TurnUsage]:
    async def run() -> list[TurnUsage]:
        said: list[Any] = []
        async with pydantic_model(url, api) as model:
            agent = pydantic_ai.Agent(model, instructions=system, tools=list(tools.values()))
            for question, answer in zip(QUESTIONS, ANSWERS):
                handler = read_events if stream else None
                result = await agent.run(question, message_history=said, event_stream_handler=handler)
                assert result.output == answer
                said = result.all_messages()
        usages = [message.usage for message in said if message.kind == "response"]
        return [TurnUsage(usage.input_tokens, usage.cache_read_tokens, usage.output_tokens) for usage in usages]

    return asyncio.run(run())


# -- langchain ---------------------------------------------------------------------------------------------------------


def play_langchain(url: str, tools: Tools, system: str, stream: bool, *, api: str = "chat") -> list[TurnUsage]:
    model = ChatOpenAI(
        model="toy",
        base_url=f"{url}/v1",
        api_key=SecretStr("none"),
        max_retries=0,
        streaming=stream,
        stream_usage=True,
        use_responses_api=api == "responses",
    )
    agent: Any = create_agent(model, tools=list(tools.values()), system_prompt=system)
    said: list[Any] = []
    for question, answer in zip(QUESTIONS, ANSWERS):
        said.append({"role": "user", "content": question})
        said = agent.invoke({"messages": said})["messages"]
        assert said[-1].text == answer
    usages = [message.usage_metadata for message in said if message.type == "ai"]
    return [
        TurnUsage(usage["input_tokens"], usage["input_token_details"]["cache_read"], usage["output_tokens"])
        for usage in usages
    ]


LOOPS: dict[str, Loop] = {
    "openai chat": play_openai_chat,
    "openai responses": play_openai_responses,
    "openai stored responses": partial(play_openai_responses, stored=True),
    "anthropic": play_anthropic,
    "openai-agents chat": play_openai_agents,
    "openai-agents responses": partial(play_openai_agents, api="responses"),
    "pydantic-ai chat": play_pydantic_ai,
    "pydantic-ai responses": partial(play_pydantic_ai, api="responses"),
    "pydantic-ai messages": partial(play_pydantic_ai, api="anthropic"),
    "langchain chat": play_langchain,
    "langchain responses": partial(play_langchain, api="responses"),
}
