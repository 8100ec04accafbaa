"""Anthropic's own client against ``/v1/messages``: the answers are scripted, all else is a real server. The last tests
ask the trained toy model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic.types import Message

from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process

TOY_MODEL = Path(__file__).parents[2] / "examples" / "toy_model"

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern", "days": [1, 2]}}\n</tool_call>'
SAYS = [
    ["Hello", "Good day, 漢字 ü!"],
    ["Weather?", f"<think>\nI need to look.\n</think>\n\nLet me see.\n{CALL}"],
    ["Both?", f"{CALL}\n{CALL.replace('Bern', 'Rome')}"],
    ["[tool]sunny", "It is sunny."],
    ["[tool]Error: ", "It failed."],
    ["Broken?", CALL[:60]],
    ['[assistant]<tool_call>\n{"name": "', 'weather", "arguments": {"city": "Rome"}}\n</tool_call>'],
    ['"weather", "arguments":', ' {"city": "Oslo"}}\n</tool_call>'],
    ["The best is (", "B) Sol"],
    ["[assistant]<think>", "Hm.\n</think>\n\nYes."],
]
WEATHER: Any = {
    "name": "weather",
    "description": "Weather of a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    flags = ["--api-key", "secret", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"]
    behaviour = {"says": SAYS, "refuse": ["too-large"], "step_s": 0.002}
    with ServerUnderTest(model, tmp_path_factory.mktemp("server"), *flags, behaviour=behaviour) as running:
        yield running.wait_ready()


@pytest.fixture
def client(server: ServerUnderTest) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="secret", max_retries=0) as client:
        yield client


def user(words: Any) -> Any:
    return {"role": "user", "content": words}


def ask(client: anthropic.Anthropic, *messages: Any, stream: bool = False, **fields: Any) -> Message:
    """The answer, as the client puts it together."""
    asked: Any = {"model": "any", "max_tokens": 200, "messages": list(messages)} | fields
    if not stream:
        return client.messages.create(**asked)
    with client.messages.stream(**asked) as events:
        return events.get_final_message()


def shown(message: Message) -> list[dict]:
    """The blocks, without ids and what the client adds."""
    names = ("type", "text", "thinking", "signature", "name", "input")
    return [{name: getattr(block, name) for name in names if hasattr(block, name)} for block in message.content]


both_ways = pytest.mark.parametrize("stream", [False, True])


@both_ways
def test_simple_question_is_answered(client: anthropic.Anthropic, stream: bool) -> None:
    message = ask(client, user("Hello"), stream=stream, extra_body={"rid": f"q{stream}"})
    assert shown(message) == [{"type": "text", "text": "Good day, 漢字 ü!"}]
    assert (message.stop_reason, message.stop_sequence, message.role) == ("end_turn", None, "assistant")
    assert message.id == f"msg_q{stream}" and message.type == "message"
    prompt = len("[user]Hello<eos>\n[assistant]") - len("<eos>") + 1
    usage = message.usage
    # The double finds all but the last token of a prompt.
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (1, prompt - 1, 0)
    assert usage.output_tokens == len("Good day, 漢字 ü!".encode()) + 1
    assert message.model_extra is not None and message.model_extra["baton"]["rid"] == f"q{stream}"


def test_stream_has_named_events(client: anthropic.Anthropic, server: ServerUnderTest) -> None:
    body = {"model": "x", "max_tokens": 99, "messages": [user("Hello")], "stream": True}
    answer = server.client.post("/v1/messages", json=body, headers={"x-api-key": "secret"})
    assert answer.headers["content-type"].startswith("text/event-stream") and "[DONE]" not in answer.text
    assert answer.headers["request-id"] == answer.headers["x-request-id"]
    lines = [event.split("\n") for event in answer.text.removesuffix("\n\n").split("\n\n")]
    names = [event.removeprefix("event: ") for event, _ in lines]
    assert all(data.startswith(f'data: {{"type":"{name}"') for name, (_, data) in zip(names, lines, strict=True))
    assert names[:3] == ["message_start", "ping", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert set(names[3:-3]) == {"content_block_delta"}
    asked: Any = {"model": "x", "max_tokens": 99, "messages": [user("Hello")]}
    with client.messages.stream(**asked) as stream:
        assert "".join(stream.text_stream) == "Good day, 漢字 ü!"


@both_ways
def test_tool_call_round_trip(client: anthropic.Anthropic, stream: bool) -> None:
    """What the client got goes back as it is."""
    question = user("Weather?")
    message = ask(client, question, stream=stream, tools=[WEATHER])
    assert shown(message) == [
        {"type": "thinking", "thinking": "I need to look.", "signature": ""},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "name": "weather", "input": {"city": "Bern", "days": [1, 2]}},
    ]
    assert message.stop_reason == "tool_use"
    call = message.content[-1]
    assert call.type == "tool_use" and call.id
    for failed, says in ((False, "It is sunny."), (True, "It failed.")):
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny", "is_error": failed}
        said: Any = {"role": "assistant", "content": message.content}
        answer = ask(client, question, said, user([result]), stream=stream, tools=[WEATHER])
        assert shown(answer) == [{"type": "text", "text": says}] and answer.stop_reason == "end_turn"


@both_ways
def test_parallel_tool_calls(client: anthropic.Anthropic, stream: bool) -> None:
    message = ask(client, user("Both?"), stream=stream, tools=[WEATHER])
    assert [block["input"]["city"] for block in shown(message)] == ["Bern", "Rome"]
    assert message.content[0] != message.content[1]
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    only = ask(client, user("Both?"), stream=stream, tools=[WEATHER], tool_choice=choice)
    assert [block["input"]["city"] for block in shown(only)] == ["Bern"] and only.stop_reason == "tool_use"


@pytest.mark.parametrize(("choice", "city"), [({"type": "any"}, "Rome"), ({"type": "tool", "name": "weather"}, "Oslo")])
@both_ways
def test_required_tool_call_is_forced(client: anthropic.Anthropic, choice: Any, city: str, stream: bool) -> None:
    tools: Any = [WEATHER, {"name": "other", "input_schema": {}}]
    message = ask(client, user("Now"), stream=stream, tools=tools, tool_choice=choice)
    assert shown(message) == [{"type": "tool_use", "name": "weather", "input": {"city": city}}]
    assert message.stop_reason == "tool_use"


def test_tool_choice_none_disables_call_parsing(client: anthropic.Anthropic) -> None:
    message = ask(client, user("Both?"), tools=[WEATHER], tool_choice={"type": "none"})
    assert shown(message) == [{"type": "text", "text": SAYS[2][1]}] and message.stop_reason == "end_turn"


@both_ways
def test_stop_reasons_are_reported(client: anthropic.Anthropic, stream: bool) -> None:
    cut = ask(client, user("Hello"), stream=stream, max_tokens=4)
    assert (cut.stop_reason, shown(cut)[0]["text"], cut.usage.output_tokens) == ("max_tokens", "Good", 4)
    stopped = ask(client, user("Hello"), stream=stream, stop_sequences=["!", "day"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "day")
    assert shown(stopped) == [{"type": "text", "text": "Good "}]
    broken = ask(client, user("Broken?"), stream=stream, tools=[WEATHER])
    assert broken.stop_reason == "end_turn", "a call that was not finished is none to be run"
    assert shown(broken)[0]["input"] == ({"city": "Bern"} if stream else {}), "the client reads what it can"


def test_prefill_is_continued_and_thinking_enabled(client: anthropic.Anthropic) -> None:
    message = ask(client, user("Sun?"), {"role": "assistant", "content": "The best is ("})
    assert shown(message) == [{"type": "text", "text": "B) Sol"}]
    thinking = {"type": "enabled", "budget_tokens": 1024}
    thoughtful = ask(client, user("Hm?"), thinking=thinking)
    assert [block["type"] for block in shown(thoughtful)] == ["thinking", "text"]
    assert thoughtful.model_extra is not None
    assert thoughtful.model_extra["baton"]["unenforced"] == ["thinking.budget_tokens"]


def test_count_tokens_matches_usage(client: anthropic.Anthropic) -> None:
    fields: Any = {"system": "Be kind.", "tools": [WEATHER], "thinking": {"type": "adaptive"}}
    more: Any
    for more in ({}, {"tool_choice": {"type": "any"}}):
        counted = client.messages.count_tokens(model="x", messages=[user("Hello")], **fields, **more).input_tokens
        usage = ask(client, user("Hello"), **fields, **more).usage
        assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0) > len("Be kind.Hello")


def test_count_tokens_accepts_prompts_beyond_the_context(client: anthropic.Anthropic) -> None:
    """Clients count before they decide whether to compact a conversation."""
    long = [user("x" * 5000)]
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 5019 tokens > 4096 maximum"):
        ask(client, *long)
    assert client.messages.count_tokens(model="x", messages=long).input_tokens == 5019
    edits: Any = {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}
    assert client.messages.count_tokens(model="x", messages=long, extra_body=edits).input_tokens == 5019
    very_long = [user("x" * 1_990_000)]  # more than is rendered where it has to fit
    assert client.messages.count_tokens(model="x", messages=very_long, extra_body=edits).input_tokens == 1_990_019
    many = [user("Hello")] * 5000
    assert client.messages.count_tokens(model="x", messages=many).input_tokens > 5000 * len("Hello")
    with pytest.raises(anthropic.BadRequestError, match="more than 2000000 tokens"):
        client.messages.count_tokens(model="x", messages=[user("x" * 2_000_001)])


def test_errors_raise_client_exceptions(server: ServerUnderTest, client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="unknown field colour") as refused:
        ask(client, user("Hello"), extra_body={"colour": "red"})
    assert (refused.value.type, refused.value.error_code) == ("invalid_request_error", "unknown_field")
    with pytest.raises(anthropic.BadRequestError, match="this server takes text or tool_result"):
        ask(client, user([{"type": "image", "source": {"type": "url", "url": "data:,"}}]))
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long: 5019 tokens > 4096 maximum"):
        ask(client, user("x" * 5000))
    with pytest.raises(anthropic.BadRequestError, match="web_search"):
        client.messages.count_tokens(
            model="x", messages=[user("Hi")], tools=[{"type": "web_search_20250305", "name": "web_search"}]
        )
    for stream in (False, True):
        with pytest.raises(anthropic.BadRequestError) as by_worker:
            ask(client, user("Hello"), stream=stream, extra_body={"rid": "too-large"})
        assert by_worker.value.type == "invalid_request_error", "also where the scheduler says so"
    body: Any = by_worker.value.body
    assert set(body) == {"type", "error"} and set(body["error"]) == {"type", "message", "details"}
    assert server.client.post("/v1/completions", json={"prompt": 5}).json()["error"]["code"] == "invalid_api_key"


def test_keys(server: ServerUnderTest) -> None:
    keys: Any
    for keys in ({"api_key": "secret"}, {"auth_token": "secret"}):
        with anthropic.Anthropic(base_url=server.url, max_retries=0, **keys) as client:
            assert ask(client, user("Hello")).content
    with anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0) as stranger:
        with pytest.raises(anthropic.AuthenticationError, match="x-api-key: KEY") as refused:
            ask(stranger, user("Hello"))
        assert (refused.value.type, refused.value.error_code) == ("authentication_error", "invalid_api_key")
    body = {"model": "x", "max_tokens": 9, "messages": [user("Hello")]}
    for key, status in (("secret", 200), ("wrong", 401)):  # older clients send it so
        headers = {"x-api-key": key, "anthropic-version": "2023-06-01", "anthropic-beta": "x,y"}
        assert server.client.post("/v1/messages", json=body, headers=headers).status_code == status


def test_async_client_is_served(server: ServerUnderTest) -> None:
    asked: Any = {"model": "x", "max_tokens": 200, "tools": [WEATHER]}

    async def ask_all() -> list[str]:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="secret") as client:
            answers = [client.messages.create(messages=[user("Hello")], **asked) for _ in range(8)]
            words = [shown(message)[0]["text"] for message in await asyncio.gather(*answers)]
            async with client.messages.stream(messages=[user("Weather?")], **asked) as stream:
                final = await stream.get_final_message()
            assert final.stop_reason == "tool_use"
            return words

    assert asyncio.run(ask_all()) == ["Good day, 漢字 ü!"] * 8


def test_aborted_stream_ends_with_an_error_event(server: ServerUnderTest) -> None:
    """The double repeats its prompt for as long as it may."""
    headers = {"x-api-key": "secret"}
    body: dict[str, Any] = {"model": "x", "max_tokens": 3000, "messages": [user("y" * 50)], "stream": True}
    body |= {"rid": "long", "ignore_eos": True}
    with server.client.stream("POST", "/v1/messages", json=body, headers=headers) as answer:
        lines = answer.iter_lines()
        assert answer.status_code == 200 and next(lines) == "event: message_start"
        # By the id of the message, which names the request.
        aborted = httpx.post(f"{server.url}/abort_request", json={"rid": "msg_long"}, headers=headers)
        assert aborted.json() == {"aborted": ["long"]}
        rest = list(lines)
    assert rest[-3] == "event: error" and '"type":"error","error":{"type":"invalid_request_error"' in rest[-2]
    assert "event: message_stop" not in rest


# -- the toy model -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    flags = ["--max-total-tokens", "8192", "--dtype", "float32", "--device", "cpu", "--linear-backend", "torch"]
    folder = tmp_path_factory.mktemp("toy")
    with ServerUnderTest(TOY_MODEL, folder, *flags, "--served-model-name", "toy", behaviour=None) as running:
        yield running.wait_ready()


@both_ways
def test_second_turn_is_a_handoff_from_the_first(toy: ServerUnderTest, stream: bool) -> None:
    """Without a key, too."""
    question = user("How many lines are in manual.md?" if stream else "How many lines are in notes.md?")
    fields: dict[str, Any] = {"model": "toy", "temperature": 0.0}
    with anthropic.Anthropic(base_url=toy.url, api_key="any", max_retries=0) as client:
        first = ask_toy(client, question, stream=stream, **fields)
        assert first["stop_reason"] == "end_turn" and first["baton"]["retained"]["tokens"] > 10
        said = {"role": "assistant", "content": first["content"]}
        second = ask_toy(client, question, said, user("And words?"), stream=stream, **fields)
    assert second["baton"]["continuation"]["path"] == "handoff"
    first_tokens = sum(count for name, count in first["usage"].items() if name != "cache_creation_input_tokens")
    assert second["usage"]["cache_read_input_tokens"] == second["baton"]["continuation"]["inherited_tokens"]
    assert second["usage"]["cache_read_input_tokens"] >= first_tokens - 2
    assert 0 < second["usage"]["input_tokens"] < 20


def test_chat_continues_across_apis(toy: ServerUnderTest) -> None:
    messages: list[Any] = [user("How many lines are in todo.md?")]
    asked = {"model": "toy", "temperature": 0, "messages": messages}
    first = toy.client.post("/v1/chat/completions", json=asked).json()
    messages += [{"role": "assistant", "content": first["choices"][0]["message"]["content"]}, user("And words?")]
    second = toy.client.post("/v1/messages", json=asked | {"max_tokens": 40}).json()
    assert second["baton"]["continuation"]["path"] == "handoff"
    messages += [{"role": "assistant", "content": second["content"][0]["text"]}, user("And?")]
    third = toy.client.post("/v1/chat/completions", json=asked).json()
    assert third["choices"][0]["baton"]["continuation"]["path"] == "handoff"


def ask_toy(client: anthropic.Anthropic, *messages: Any, stream: bool, **fields: Any) -> dict[str, Any]:
    """The message, with all that the last event brings."""
    temperature = fields.pop("temperature")
    asked: Any = {"max_tokens": 60, "messages": list(messages), "extra_body": {"temperature": temperature}} | fields
    if not stream:
        return client.messages.create(**asked).to_dict(mode="json")
    with client.messages.stream(**asked) as events:
        end: dict[str, Any] = {}
        for event in events:
            if event.type == "message_delta":
                end = event.to_dict(mode="json")
        message = events.get_final_message().to_dict(mode="json")
    return message | {"baton": end["baton"], "usage": end["usage"]}


def test_bundled_tool_template_is_used_when_the_model_has_none(toy: ServerUnderTest) -> None:
    """It is told of them by a bundled template of its own form."""
    with anthropic.Anthropic(base_url=toy.url, api_key="any", max_retries=0) as client:
        plain = client.messages.count_tokens(model="toy", messages=[user("Hello")]).input_tokens
        with_tools = client.messages.count_tokens(model="toy", messages=[user("Hello")], tools=[WEATHER]).input_tokens
        assert with_tools > plain + 20
        ask(client, user("Hello"), model="toy", tools=[WEATHER], max_tokens=5)
    assert toy.log.count("chats with tools use the bundled chatml_tools.jinja") == 1


def test_unserved_model_is_404(toy: ServerUnderTest) -> None:
    with anthropic.Anthropic(base_url=toy.url, api_key="any", max_retries=0) as client:
        with pytest.raises(anthropic.NotFoundError, match="is not served here"):
            ask(client, user("Hello"), model="claude-5")
        thinking = client.messages.with_raw_response.create(
            model="toy",
            messages=[user("Hello")],
            max_tokens=5,
            thinking={"type": "enabled", "budget_tokens": 1024},
        )
        assert "thinking: the model does not think" in thinking.headers["X-Baton-Warning"]


@both_ways
def test_changed_prompts_are_diagnosed(toy: ServerUnderTest, stream: bool) -> None:
    """In Anthropic's words where the client asks with ``diagnostics``, by token in the cache report."""

    def turn(client: anthropic.Anthropic, system: str, *messages: Any, previous: str | None) -> tuple[Message, dict]:
        more = {"diagnostics": {"previous_message_id": previous}, "return_cache_report": True, "temperature": 0.0}
        asked: Any = {"model": "toy", "max_tokens": 8, "system": system, "messages": list(messages)}
        asked |= {"extra_body": more}
        if not stream:
            message = client.messages.create(**asked)
            return message, message.to_dict(mode="json")["baton"]
        with client.messages.stream(**asked) as events:
            deltas: list[Any] = [each.to_dict(mode="json") for each in events if each.type == "message_delta"]
            baton = deltas[0]["baton"]
            return events.get_final_message(), baton

    def reasons(baton: dict) -> list[str]:
        return [span["reason"] for span in baton["cache_report"]["missed"]]

    with anthropic.Anthropic(base_url=toy.url, api_key="any", max_retries=0) as client:
        system, question = f"Be brief, and count to {7 + stream}.", user("How many lines are in manual.md?")
        first, baton = turn(client, system, question, previous=None)
        assert first.to_dict()["diagnostics"] is None and reasons(baton)[-1] == "required"
        said = {"role": "assistant", "content": first.to_dict()["content"]}
        second, baton = turn(client, system, question, said, user("And now?"), previous=first.id)
        assert second.to_dict()["diagnostics"] is None and "divergence" not in baton["cache_report"]
        told = baton["cache_report"]
        found, missed = sum(told["found"].values()), sum(span["tokens"] for span in told["missed"])
        assert found > 0 and set(reasons(baton)) <= {"unseen", "required"}
        assert found + missed == second.usage.input_tokens + (second.usage.cache_read_input_tokens or 0)

        edited = system.replace("brief", "short")
        third, baton = turn(client, edited, question, said, user("And now?"), previous=second.id)
        diagnosis: Any = third.to_dict()["diagnostics"]
        assert diagnosis["cache_miss_reason"]["type"] == "system_changed"
        assert diagnosis["cache_miss_reason"]["cache_missed_input_tokens"] > 0
        assert "diverged" in reasons(baton) and "brief" in baton["cache_report"]["divergence"]["was"]
        assert "short" in baton["cache_report"]["divergence"]["now"]
        fourth, _ = turn(client, system, question, previous="msg_of_nobody")
        assert fourth.to_dict()["diagnostics"] == {"cache_miss_reason": {"type": "previous_message_not_found"}}
        fifth, _ = turn(client, system, user("Which rivers flow north?"), previous=second.id)
        diagnosis = fifth.to_dict()["diagnostics"]
        assert diagnosis["cache_miss_reason"]["type"] == "messages_changed", "another conversation"
        assert diagnosis["cache_miss_reason"]["cache_missed_input_tokens"] > 0
