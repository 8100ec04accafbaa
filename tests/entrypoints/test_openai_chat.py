"""OpenAI's own client against ``/v1/chat/completions``: the answers are scripted, all else is a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionChunk, ChatCompletionMessage

from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": [1, 2]}}\n</tool_call>'
SAYS = [
    ["Hello", "Good day, 漢字 ü!"],
    ["Weather?", f"<think>\nI need to look.\n</think>\n\nLet me see.\n{CALL}"],
    ["Both?", f"{CALL}\n{CALL.replace('Bern', 'Rome')}"],
    ["[tool]sunny", "It is sunny."],
    ["Broken?", CALL[:60]],
    ["Markup?", "a < b <tool_box> </think> </tool_call>"],
    ['[assistant]<tool_call>\n{"name": "', 'weather", "arguments": {"city": "Rome"}}\n</tool_call>'],
    ['"weather", "arguments":', ' {"city": "Oslo"}}\n</tool_call>'],
]
WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    flags = ["--api-key", "secret", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"]
    with ServerUnderTest(model, tmp_path_factory.mktemp("server"), *flags, behaviour={"says": SAYS}) as running:
        yield running.wait_ready()


@pytest.fixture
def client(server: ServerUnderTest) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
        yield client


def user(words: str) -> Any:
    return {"role": "user", "content": words}


def test_simple_question_is_answered(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="any", messages=[user("Hello")])
    (choice,) = answer.choices
    assert choice.message.content == "Good day, 漢字 ü!" and choice.finish_reason == "stop"
    assert choice.message.tool_calls is None and choice.message.role == "assistant"
    assert answer.usage is not None and answer.usage.completion_tokens == len(choice.message.content.encode()) + 1
    assert answer.usage.prompt_tokens == len("[user]Hello<eos>\n[assistant]") - len("<eos>") + 1
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")


def test_stream_delivers_the_answer_in_chunks(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True}
    stream = client.chat.completions.create(
        model="any", messages=[user("Hello")], stream=True, n=2, stream_options=options
    )
    chunks = list(stream)
    texts = {0: "", 1: ""}
    for chunk in chunks[:-1]:
        assert chunk.object == "chat.completion.chunk" and chunk.usage is None
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    # Sample i of the double begins at the i-th byte, and goes round.
    assert texts == {0: "Good day, 漢字 ü!", 1: "ood day, 漢字 ü!"}
    assert [c.choices[0].finish_reason for c in chunks[:-1] if c.choices[0].finish_reason] == ["stop", "stop"]
    roles = [chunk.choices[0].index for chunk in chunks[:-1] if chunk.choices[0].delta.role == "assistant"]
    assert sorted(roles) == [0, 1]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and chunks[-1].usage.completion_tokens > 40


def called(chunks: list[ChatCompletionChunk]) -> tuple[str, str, list[dict[str, str]]]:
    words, thoughts, calls = "", "", []
    for chunk in chunks:
        delta = chunk.choices[0].delta
        words += delta.content or ""
        thoughts += getattr(delta, "reasoning_content", None) or ""
        for call in delta.tool_calls or []:
            assert call.function is not None
            if call.id:
                assert call.index == len(calls) and call.type == "function" and call.function.name
                calls.append({"id": call.id, "name": call.function.name, "arguments": ""})
            calls[call.index]["arguments"] += call.function.arguments or ""
    return words, thoughts, calls


def calls_of(message: ChatCompletionMessage) -> list[dict[str, str]]:
    calls = [call for call in message.tool_calls or [] if call.type == "function"]
    return [{"id": call.id, "name": call.function.name, "arguments": call.function.arguments} for call in calls]


@pytest.mark.parametrize("stream", [False, True])
def test_tool_call_round_trip(client: openai.OpenAI, stream: bool) -> None:
    messages: list[Any] = [user("Weather?")]
    if stream:
        chunks = list(client.chat.completions.create(model="x", messages=messages, tools=[WEATHER], stream=True))
        words, thoughts, calls = called(chunks)
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
    else:
        (choice,) = client.chat.completions.create(model="x", messages=messages, tools=[WEATHER]).choices
        assert choice.finish_reason == "tool_calls"
        words, thoughts = choice.message.content or "", getattr(choice.message, "reasoning_content", "")
        calls = [
            {"id": c.id, **c.function.model_dump()} for c in choice.message.tool_calls or [] if c.type == "function"
        ]
    assert (words.strip(), thoughts) == ("Let me see.", "I need to look.")
    (call,) = calls
    assert call["name"] == "weather" and json.loads(call["arguments"]) == {"city": "Bern", "days": [1, 2]}
    function = {"name": call["name"], "arguments": call["arguments"]}
    messages += [
        {
            "role": "assistant",
            "content": words,
            "tool_calls": [{"id": call["id"], "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call["id"], "content": "sunny"},
    ]
    (choice,) = client.chat.completions.create(model="x", messages=messages, tools=[WEATHER]).choices
    assert choice.message.content == "It is sunny." and choice.finish_reason == "stop"


def test_parallel_tool_calls(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.create(model="x", messages=[user("Both?")], tools=[WEATHER]).choices
    first, second = calls_of(choice.message)
    assert first["id"] != second["id"] and choice.message.content is None
    assert [json.loads(call["arguments"])["city"] for call in (first, second)] == ["Bern", "Rome"]
    (cut,) = client.chat.completions.create(
        model="x", messages=[user("Both?")], tools=[WEATHER], max_tokens=110
    ).choices
    assert cut.finish_reason == "length" and len(calls_of(cut.message)) == 1
    only = client.chat.completions.create(
        model="x", messages=[user("Both?")], tools=[WEATHER], parallel_tool_calls=False
    )
    assert len(only.choices[0].message.tool_calls or []) == 1


@pytest.mark.parametrize(
    ("choice", "city"), [("required", "Rome"), ({"type": "function", "function": {"name": "weather"}}, "Oslo")]
)
@pytest.mark.parametrize("stream", [False, True])
def test_required_tool_call_is_forced(client: openai.OpenAI, choice: Any, city: str, stream: bool) -> None:
    """The answer is made to begin with it."""
    tools: Any = [WEATHER, {"type": "function", "function": {"name": "other"}}]
    asked: dict[str, Any] = {"model": "x", "messages": [user("Now")], "tools": tools, "tool_choice": choice}
    if stream:
        chunks = list(client.chat.completions.create(**asked, stream=True))
        _, _, calls = called(chunks)
        assert chunks[-1].choices[0].finish_reason == "tool_calls"
    else:
        (answer,) = client.chat.completions.create(**asked).choices
        calls = calls_of(answer.message)
        assert answer.finish_reason == "tool_calls"
    assert [(call["name"], json.loads(call["arguments"])) for call in calls] == [("weather", {"city": city})]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_forced_call_with_zero_max_tokens_is_empty(client: openai.OpenAI, choice: Any) -> None:
    """What the answer would have been made to begin with is no answer."""
    asked: dict[str, Any] = {"model": "x", "messages": [user("Now")], "tools": [WEATHER], "tool_choice": choice}
    (answer,) = client.chat.completions.create(**asked, max_tokens=0).choices
    assert answer.message.content == "" and answer.message.tool_calls is None and answer.finish_reason == "length"
    chunks = list(client.chat.completions.create(**asked, max_tokens=0, stream=True))
    assert called(chunks) == ("", "", []) and chunks[-1].choices[0].finish_reason == "length"


def test_tool_choice_none_disables_call_parsing(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "x", "messages": [user("Both?")]}
    for more in ({}, {"tools": [WEATHER], "tool_choice": "none"}):
        (choice,) = client.chat.completions.create(**asked, **more).choices
        assert choice.message.tool_calls is None and choice.message.content == SAYS[2][1]
        assert choice.finish_reason == "stop"


def test_unfinished_call_arguments_are_returned_as_generated(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.create(model="x", messages=[user("Broken?")], tools=[WEATHER]).choices
    (call,) = calls_of(choice.message)
    assert call["arguments"] == '{"city": "Bern"'


def test_text_resembling_markup_is_not_a_call(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.create(model="x", messages=[user("Markup?")], tools=[WEATHER]).choices
    assert choice.message.content == SAYS[5][1] and choice.message.tool_calls is None


def test_chat_logprobs_have_tokens_and_bytes(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "x", "messages": [user("Hello")], "logprobs": True, "top_logprobs": 2}
    (choice,) = client.chat.completions.create(**asked).choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    first = choice.logprobs.content[0]
    assert (first.token, first.bytes, round(first.logprob, 3)) == ("G", [71], -0.071)
    assert [top.token for top in first.top_logprobs] == ["G", "H"]
    streamed = [
        entry
        for chunk in client.chat.completions.create(**asked, stream=True)
        if (logprobs := chunk.choices[0].logprobs) is not None
        for entry in logprobs.content or []
    ]
    assert streamed == choice.logprobs.content


def test_errors_raise_client_exceptions(server: ServerUnderTest, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="unknown field"):
        client.chat.completions.create(model="x", messages=[user("Hello")], extra_body={"colour": "red"})
    with pytest.raises(openai.BadRequestError, match=r"content\[0\] is of type image_url; .* text only \(model \S+\)"):
        picture: Any = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}
        client.chat.completions.create(model="x", messages=[picture])
    with pytest.raises(
        openai.BadRequestError,
        match=r"is 4096 tokens\. However, your messages resulted in 5019 tokens",
    ) as error:
        client.chat.completions.create(model="x", messages=[user("x" * 5000)])
    assert error.value.param == "messages" and error.value.code == "context_length_exceeded"
    stranger = openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        stranger.chat.completions.create(model="x", messages=[user("Hello")])


def test_async_client_is_served(server: ServerUnderTest) -> None:
    async def ask() -> list[str | None]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="secret") as client:
            asked = [client.chat.completions.create(model="x", messages=[user("Hello")]) for _ in range(8)]
            words = [answer.choices[0].message.content for answer in await asyncio.gather(*asked)]
            async with client.chat.completions.stream(
                model="x", messages=[user("Weather?")], tools=[WEATHER]
            ) as stream:
                async for _ in stream:
                    pass
                final = await stream.get_final_completion()
            assert final.choices[0].message.tool_calls
            return words

    assert asyncio.run(ask()) == ["Good day, 漢字 ü!"] * 8


def test_server_without_chat_template_refuses_chats(tmp_path: Path, model: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    with ServerUnderTest(folder, tmp_path, behaviour={}) as running:
        server = running.wait_ready()
        answer = server.client.post("/v1/chat/completions", json={"messages": [user("Hi")]})
        assert answer.status_code == 400 and answer.json()["error"]["code"] == "no_chat_template"
        assert "no chat template: chats are refused" in server.log


def test_chat_template_flag_replaces_the_model_template(tmp_path: Path, model: Path) -> None:
    """Chats are rendered by it, and programs that write roles piece by piece learn of it."""
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<answer>")
    with ServerUnderTest(model, tmp_path, "--chat-template", str(file), behaviour={}) as running:
        server = running.wait_ready()
        assert server.client.get("/model_info").json()["chat_template"] == file.read_text()
        asked = {"messages": [user("Hi")], "max_tokens": 16}
        answer = server.client.post("/v1/chat/completions", json=asked).json()
        assert answer["choices"][0]["message"]["content"] == "<user>Hi<answer>"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--chat-template", "/nowhere.jinja"], "--chat-template /nowhere.jinja"),
        (["--tool-call-parser", "morse"], "no tool call parser 'morse'"),
        (["--reasoning-parser", "dream"], "no reasoning parser 'dream'"),
    ],
)
def test_unusable_chat_settings_abort_startup(tmp_path: Path, model: Path, flags: list[str], says: str) -> None:
    with ServerUnderTest(model, tmp_path, *flags, behaviour={}) as running:
        assert running.process.wait(30) == 1 and says in running.log


def test_oversized_chats_are_refused_before_rendering(client: openai.OpenAI) -> None:
    for messages in ([user("x")] * 5000, [user("x" * 3_000_000)]):
        with pytest.raises(openai.BadRequestError, match=r"maximum context length is 4096 tokens") as error:
            client.chat.completions.create(model="x", messages=messages)
        assert error.value.code == "context_length_exceeded"
