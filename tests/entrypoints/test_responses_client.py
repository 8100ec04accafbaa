"""OpenAI's own client against ``/v1/responses``: the answers are scripted, all else is a real server."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseFunctionToolCall, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.doubles.server_under_test import ServerUnderTest

pytestmark = pytest.mark.process

CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
SAYS = [
    ["Hello", "Good day, 漢字 ü!"],
    ["Weather?", f"<think>\nI need to look.\n</think>\n\nLet me see.\n{CALL}"],
    ["[tool]sunny", "It is sunny."],
    ["And?", "And so on."],
    ['[assistant]<tool_call>\n{"name": "', 'weather", "arguments": {"city": "Rome"}}\n</tool_call>'],
]
WEATHER: Any = {
    "type": "function",
    "name": "weather",
    "description": "Weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
ENDLESS: Any = {"input": "Go on", "max_output_tokens": 3000, "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerUnderTest]:
    flags = ["--api-key", "secret", "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3"]
    flags += ["--max-stored-responses", "6"]
    behaviour = {"says": SAYS, "refuse": ["refused"], "step_s": 0.001}
    with ServerUnderTest(model, tmp_path_factory.mktemp("server"), *flags, behaviour=behaviour) as running:
        yield running.wait_ready()


@pytest.fixture
def client(server: ServerUnderTest) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0, timeout=30) as client:
        yield client


def tokens(*messages: str) -> int:
    """Tokens of a prompt with these messages, each in the template's form."""
    return sum(len(message.encode()) + 2 for message in messages) + len("[assistant]")


def raw(server: ServerUnderTest, **fields: Any) -> Any:
    """The answer before the client has read anything into it."""
    answer = server.client.post("/v1/responses", json=fields, headers={"Authorization": "Bearer secret"})
    assert answer.status_code == 200, answer.text
    return answer


def test_simple_question_is_answered(client: openai.OpenAI, server: ServerUnderTest) -> None:
    response = client.responses.create(model="any", input="Hello", metadata={"mine": "x"}, user="me")
    assert response.output_text == "Good day, 漢字 ü!" and response.status == "completed"
    assert response.id.startswith("resp_") and response.object == "response" and response.error is None
    assert response.metadata == {"mine": "x"} and response.user == "me"
    assert response.usage is not None and response.usage.input_tokens == tokens("[user]Hello")
    assert response.usage.output_tokens == len(response.output_text.encode()) + 1
    Response.model_validate(raw(server, input="Hello").json(), strict=False)


def test_responses_require_the_api_key(server: ServerUnderTest, client: openai.OpenAI) -> None:
    known = client.responses.create(model="any", input="Hello").id
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as stranger:
        for call in (stranger.responses.retrieve, stranger.responses.delete, stranger.responses.cancel):
            with pytest.raises(openai.AuthenticationError):
                call(known)
        with pytest.raises(openai.AuthenticationError):
            stranger.responses.create(model="any", input="Hello")
    assert client.responses.retrieve(known).output_text == "Good day, 漢字 ü!"


def test_stream_delivers_the_answer_in_chunks(client: openai.OpenAI, server: ServerUnderTest) -> None:
    with client.responses.stream(model="any", input="Weather?", tools=[WEATHER]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    words = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(words) == final.output_text == "Let me see." and len(words) > 1
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.usage is not None
    assert final.usage.output_tokens_details.reasoning_tokens == len("I need to look.")
    stored = client.responses.retrieve(final.id)
    assert stored.output_text == final.output_text and stored.usage == final.usage


def test_raw_stream_events_are_valid_openai_events(server: ServerUnderTest) -> None:
    """Every event has the name of its type and is one of OpenAI's; no other end than the last one."""
    text = raw(server, input="Weather?", tools=[WEATHER], stream=True).text
    known: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    types: list[str] = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        known.validate_python(event)
        types.append(event["type"])
    assert types[-1] == "response.completed"


def test_async_client_creates_streams_and_retrieves(server: ServerUnderTest) -> None:
    async def talk() -> tuple[str, str, str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="secret", max_retries=0) as client:
            first = await client.responses.create(model="any", input="Hello")
            streamed = ""
            async for event in await client.responses.create(
                model="any", input="And?", previous_response_id=first.id, stream=True
            ):
                if event.type == "response.output_text.delta":
                    streamed += event.delta
            again = await client.responses.retrieve(first.id)
            return first.output_text, streamed, again.output_text

    assert asyncio.run(talk()) == ("Good day, 漢字 ü!", "And so on.", "Good day, 漢字 ü!")


def test_tool_output_with_previous_response_id(client: openai.OpenAI) -> None:
    first = client.responses.create(model="any", input="Weather?", tools=[WEATHER])
    (call,) = [item for item in first.output if isinstance(item, ResponseFunctionToolCall)]
    assert call.name == "weather" and json.loads(call.arguments) == {"city": "Bern"}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    second = client.responses.create(model="any", input=[result], previous_response_id=first.id, tools=[WEATHER])
    assert second.output_text == "It is sunny." and second.previous_response_id == first.id
    items = list(client.responses.input_items.list(second.id, order="asc"))
    assert [item.type for item in items] == [
        "message", "reasoning", "message", "function_call", "function_call_output",
    ]  # fmt: skip
    newest = list(client.responses.input_items.list(second.id, limit=2))
    assert [item.id for item in newest] == [item.id for item in reversed(items)], "the client asks page by page"


def test_tool_output_with_resent_items(client: openai.OpenAI) -> None:
    said: list[Any] = [{"role": "user", "content": "Weather?"}]
    first = client.responses.create(model="any", input=said, tools=[WEATHER], store=False)
    said += first.output
    said.append({"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "sunny"})  # type: ignore
    second = client.responses.create(model="any", input=said, tools=[WEATHER], store=False)
    assert second.output_text == "It is sunny."


def test_required_tool_is_called(client: openai.OpenAI) -> None:
    tools: Any = [WEATHER, {"type": "function", "name": "other", "parameters": {}}]
    response = client.responses.create(model="any", input="Hi", tools=tools, tool_choice="required")
    (call,) = response.output
    assert isinstance(call, ResponseFunctionToolCall) and json.loads(call.arguments) == {"city": "Rome"}


def test_instructions_are_not_inherited(client: openai.OpenAI) -> None:
    first = client.responses.create(model="any", input="Hello", instructions="Be kind.")
    assert first.usage is not None and first.usage.input_tokens == tokens("[system]Be kind.", "[user]Hello")
    second = client.responses.create(model="any", input="And?", previous_response_id=first.id)
    said = ("[user]Hello", "[assistant]Good day, 漢字 ü!", "[user]And?")
    assert second.usage is not None and second.usage.input_tokens == tokens(*said)
    third = client.responses.create(model="any", input="And?", previous_response_id=first.id, instructions="Be brief.")
    assert third.usage is not None and third.usage.input_tokens == tokens("[system]Be brief.", *said)
    assert third.instructions == "Be brief." and second.instructions is None


def test_unstored_response_is_not_found(client: openai.OpenAI) -> None:
    response = client.responses.create(model="any", input="Hello", store=False)
    for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
        with pytest.raises(openai.NotFoundError, match="store: false"):
            call(response.id)
    with pytest.raises(openai.NotFoundError) as caught:
        client.responses.create(model="any", input="And?", previous_response_id=response.id)
    assert caught.value.code == "response_not_found" and caught.value.param == "previous_response_id"


def test_responses_of_another_salt_are_not_found(client: openai.OpenAI) -> None:
    mine: Any = {"cache_salt": "mine"}
    response = client.responses.create(model="any", input="Hello", extra_body=mine)
    for salt in ({}, {"cache_salt": "theirs"}):
        for call in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                call(response.id, extra_query=salt)
        with pytest.raises(openai.NotFoundError):
            client.responses.create(model="any", input="And?", previous_response_id=response.id, extra_body=salt)
    assert client.responses.retrieve(response.id, extra_query=mine).id == response.id
    followed = client.responses.create(model="any", input="And?", previous_response_id=response.id, extra_body=mine)
    assert followed.output_text == "And so on."
    behind = client.responses.create(model="any", input="Hello", background=True, extra_body=mine)
    assert client.responses.cancel(behind.id, extra_query=mine).background
    client.responses.delete(response.id, extra_query=mine)


def test_oldest_response_is_forgotten_with_a_hint(client: openai.OpenAI) -> None:
    ids = [client.responses.create(model="any", input="Hello").id for _ in range(7)]
    assert client.responses.retrieve(ids[1]).status == "completed"
    with pytest.raises(openai.NotFoundError, match="--max-stored-responses"):
        client.responses.retrieve(ids[0])


def test_deleted_response_is_not_found(client: openai.OpenAI, server: ServerUnderTest) -> None:
    response = client.responses.create(model="any", input="Hello")
    key = {"Authorization": "Bearer secret"}
    answer = server.client.delete(f"/v1/responses/{response.id}", headers=key)
    assert answer.json() == {"id": response.id, "object": "response", "deleted": True}
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(response.id)


def wait_for(client: openai.OpenAI, name: str, *statuses: str) -> Response:
    deadline = time.monotonic() + 60
    while (response := client.responses.retrieve(name)).status not in statuses:
        assert time.monotonic() < deadline, response.status
        time.sleep(0.01)
    return response


def test_background_response_completes_or_fails(client: openai.OpenAI) -> None:
    response = client.responses.create(model="any", input="Hello", background=True)
    assert response.status == "queued" and response.background and response.output == []
    done = wait_for(client, response.id, "completed")
    assert done.output_text == "Good day, 漢字 ü!"
    assert client.responses.cancel(response.id).status == "completed", "as it is; nothing to cancel"
    refused = client.responses.create(model="any", input="Hi", background=True, extra_body={"rid": "refused"})
    failed = wait_for(client, refused.id, "failed")
    assert failed.error is not None and "never fit" in failed.error.message
    with pytest.raises(openai.ConflictError, match="failed"):
        client.responses.create(model="any", input="And?", previous_response_id=refused.id)


def test_background_response_can_be_cancelled(client: openai.OpenAI, server: ServerUnderTest) -> None:
    response = client.responses.create(model="any", background=True, **ENDLESS)
    wait_for(client, response.id, "in_progress")
    with pytest.raises(openai.ConflictError, match="in progress"):
        client.responses.create(model="any", input="And?", previous_response_id=response.id)
    cancelled = client.responses.cancel(response.id)
    assert cancelled.status == "cancelled" and cancelled.usage is not None and cancelled.usage.output_tokens < 3000
    assert client.responses.cancel(response.id).status == "cancelled"
    assert client.responses.retrieve(response.id).output == cancelled.output
    with pytest.raises(openai.ConflictError, match="cancelled"):
        client.responses.create(model="any", input="And?", previous_response_id=response.id)
    server.wait_until(lambda: server.running() == 0, "the cancelled request's end")


def test_deleting_a_running_response_aborts_it(client: openai.OpenAI, server: ServerUnderTest) -> None:
    response = client.responses.create(model="any", background=True, **ENDLESS)
    client.responses.delete(response.id)
    server.wait_until(lambda: server.running() == 0, "the deleted request's end")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


@pytest.mark.parametrize("store", [True, False])
def test_streamed_response_can_be_cancelled(client: openai.OpenAI, store: bool) -> None:
    stream = client.responses.create(model="any", stream=True, store=store, **ENDLESS)
    events: list[Any] = [next(iter(stream))]
    cancelling = threading.Thread(target=client.responses.cancel, args=(events[0].response.id,))
    cancelling.start()
    events += stream
    cancelling.join()
    last = events[-1]
    assert last.type == "response.incomplete" and last.response.status == "cancelled"
    if store:
        assert client.responses.retrieve(last.response.id).status == "cancelled"
        with pytest.raises(openai.BadRequestError, match="in the background"):
            client.responses.cancel(last.response.id)


def test_client_disconnect_aborts_the_response(client: openai.OpenAI, server: ServerUnderTest) -> None:
    stream = client.responses.create(model="any", stream=True, **ENDLESS)
    name = next(iter(stream)).response.id  # type: ignore[union-attr]
    assert client.responses.retrieve(name).status == "in_progress"
    stream.close()
    server.wait_until(lambda: server.running() == 0, "the abandoned request's end")

    def is_forgotten() -> bool:
        try:
            client.responses.retrieve(name)
        except openai.NotFoundError:
            return True
        return False

    server.wait_until(is_forgotten, "the end of its response")


@pytest.mark.parametrize("stream", [False, True])
def test_worker_refusal_keeps_its_status(client: openai.OpenAI, stream: bool) -> None:
    with pytest.raises(openai.BadRequestError, match="never fit") as caught:
        client.responses.create(model="any", input="Hi", stream=stream, extra_body={"rid": "refused"})
    assert caught.value.param == "input"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"truncation": "auto"}, "truncation"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"input": "long " * 1000}, "input"),
        ({"input": "long " * 100_000}, "input"),
    ],
)
def test_errors_use_openai_field_names(client: openai.OpenAI, fields: Any, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(**{"model": "any", "input": "Hi", **fields})
    assert caught.value.param == param and "input_ids" not in caught.value.message


def test_invalid_retrieve_queries_are_refused(client: openai.OpenAI) -> None:
    name = client.responses.create(model="any", input="Hello").id
    for call, query, words in (
        (client.responses.retrieve, {"stream": "true"}, "stream"),
        (client.responses.retrieve, {"anything": "1"}, "anything"),
        (client.responses.delete, {"include": "x"}, "include"),
        (client.responses.input_items.list, {"limit": "0"}, "1 to 100"),
        (client.responses.input_items.list, {"limit": "x"}, "1 to 100"),
        (client.responses.input_items.list, {"order": "up"}, "asc or desc"),
        (client.responses.input_items.list, {"after": "nothing"}, "no item"),
    ):
        with pytest.raises(openai.BadRequestError, match=words):
            call(name, extra_query=query)
    assert client.responses.retrieve(name, include=["message.output_text.logprobs"]).id == name
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(name.removeprefix("resp_"))


def test_logprobs(client: openai.OpenAI) -> None:
    response = client.responses.create(
        model="any", input="Hello", include=["message.output_text.logprobs"], top_logprobs=2
    )
    (message,) = response.output
    (part,) = message.content  # type: ignore[union-attr]
    words = bytes(byte for row in part.logprobs for byte in row.bytes)  # type: ignore[union-attr]
    assert words.decode() == response.output_text
    assert all(len(row.top_logprobs) == 2 for row in part.logprobs)  # type: ignore[union-attr]
