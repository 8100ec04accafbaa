"""The events of a response and the response itself, from updates made by hand."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from baton.entrypoints.chat.answer_parsers import AnswerParsers
from baton.entrypoints.chat.chats import ChatUpdate
from baton.entrypoints.openai.responses.fields import LOGPROBS, parse_response
from baton.entrypoints.openai.responses.response_object import ResponseObject
from baton.entrypoints.openai.responses.running import RunningResponse
from baton.entrypoints.openai.responses.store import StoredResponse
from baton.runtime.answer import Logprobs, Output
from baton.runtime.messages import ContinuationOutput, LogprobChunk
from baton.runtime.text.tokenizer import Tokenizer
from baton.scheduler.outcome import FinishReason, FoundTokens, RequestRefused
from baton.scheduler.token_buffer import pack_ids
from tests.doubles.byte_tokenizer import CHAT_TEMPLATE, write_byte_tokenizer

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
LS = {"type": "function", "name": "ls", "parameters": {"type": "object"}}
CALL = '<tool_call>\n{"name": "ls", "arguments": {"path": "/"}}\n</tool_call>'
STOP, LENGTH, ABORT = FinishReason("stop", matched=256), FinishReason("length"), FinishReason("abort", message="gone")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_byte_tokenizer(tmp_path_factory.mktemp("bytes")))


class Closable:
    closed = 0

    def close(self) -> None:
        self.closed += 1


class Said:
    """An answer that says these texts, an update each, and ends; or fails, if that is an error. forced: what was put
    before them."""

    def __init__(self, request: Any, texts: Iterable[str], end: FinishReason | RequestRefused, forced: str) -> None:
        self.answer = Closable()
        self.turns: list = []
        self._call, self._texts, self._end = request.call, list(texts), end
        self._parser = AnswerParsers("hermes", "qwen3", CHAT_TEMPLATE).make_parser(self._call, "")
        self.continuation: ContinuationOutput | None = None
        self.forced = forced

    async def updates(self) -> AsyncIterator[ChatUpdate]:
        count = 0
        for number, text in enumerate(self._texts):
            last = number == len(self._texts) - 1
            finish = self._end if last and isinstance(self._end, FinishReason) else None
            ids = list(text.encode())
            count += len(ids)
            output = Output(self._call.prompt, 0, 0, text, ids, 7, count, FoundTokens(device=5), finish=finish)
            if finish is not None:
                output.continuation = self.continuation
            if self._call.prompt.spec.logprobs is not None:
                values = (np.array(ids, dtype="<f4") / -1000).tobytes()
                chunk = LogprobChunk(ids=pack_ids(ids), values=values, top_ids=pack_ids(ids), top_values=values)
                output.output_logprobs = Logprobs([chunk], lambda token_id: chr(token_id))
            pieces = self._parser.push_text(text if number else self.forced + text)
            yield ChatUpdate(output, pieces + self._parser.finish() if finish is not None else pieces)
        if isinstance(self._end, RequestRefused):
            raise self._end


class Scene:
    """One response. ``stored``: what it gave to the store, once it has ended."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        texts: Iterable[str],
        end: FinishReason | RequestRefused = STOP,
        forced: str = "",
        **fields: Any,
    ) -> None:
        request = parse_response({"input": "Hi", "rid": "r", **fields})
        self.said = Said(request, texts, end, forced)
        self.stored: list[StoredResponse | None] = []
        parsers = AnswerParsers("hermes", "qwen3", CHAT_TEMPLATE)
        response = ResponseObject(request, "served")
        self.running = RunningResponse(
            "", request, None, self.said, response, parsers, tokenizer.token_bytes,  # pyright: ignore[reportArgumentType]
            lambda running, stored: self.stored.append(stored),
        )  # fmt: skip

    def events(self) -> list[dict]:
        async def read() -> list[dict]:
            with self.running:
                return [msgspec.json.decode(msgspec.json.encode(event)) async for event in self.running.events()]

        events = asyncio.run(read())
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        for event in events:
            EVENT.validate_python(event)
        assert self.said.answer.closed and len(self.stored) == 1
        return events

    def body(self) -> dict:
        body = json.loads(self.running.body)
        Response.model_validate(body)
        return body


def types(events: list[dict]) -> list[str]:
    """Without the prefix, equal neighbours once."""
    names = [event["type"].removeprefix("response.") for event in events]
    return [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]]


MESSAGE = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
           "output_item.done"]  # fmt: skip
THOUGHT = ["output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done",
           "content_part.done", "output_item.done"]  # fmt: skip
CALLED = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]


def test_text_answer_gives_message_events(tokenizer: Tokenizer) -> None:
    scene = Scene(tokenizer, ["Good ", "day."])
    events = scene.events()
    assert types(events) == ["created", "in_progress", *MESSAGE, "completed"]
    assert [event["delta"] for event in events if "delta" in event] == ["Good ", "day."]
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []
    done = events[-1]["response"]
    (item,) = done["output"]
    assert item == {
        "id": "msg_r_0", "type": "message", "status": "completed", "role": "assistant",
        "content": [{"type": "output_text", "text": "Good day.", "annotations": [], "logprobs": []}],
    }  # fmt: skip
    assert events[2]["item"] == {"id": "msg_r_0", "type": "message", "status": "in_progress", "role": "assistant",
                                 "content": []}  # fmt: skip
    assert events[-2]["item"] == item and done == scene.body()
    assert done["status"] == "completed" and done["completed_at"] >= done["created_at"] and done["model"] == "served"
    assert done["usage"] == {
        "input_tokens": 7, "output_tokens": 9, "total_tokens": 16, "output_tokens_details": {"reasoning_tokens": 0},
        "input_tokens_details": {
            "cached_tokens": 5, "cache_write_tokens": 0,
            "cached_tokens_details": {"device": 5, "host": 0, "disk": 0, "remote": 0},
        },
    }  # fmt: skip


def test_reasoning_text_and_calls_are_separate_items(tokenizer: Tokenizer) -> None:
    text = f"<think>\nHm, é?\n</think>\n\nLet me see.\n{CALL}\n{CALL}"
    scene = Scene(tokenizer, [text[i : i + 3] for i in range(0, len(text), 3)], tools=[LS])
    events = scene.events()
    assert types(events) == ["created", "in_progress", *THOUGHT, *MESSAGE, *CALLED, *CALLED, "completed"]
    output = events[-1]["response"]["output"]
    assert [item["id"] for item in output] == ["rs_r_0", "msg_r_1", "fc_r_2", "fc_r_3"]
    assert output[0]["content"] == [{"type": "reasoning_text", "text": "Hm, é?"}] and output[0]["summary"] == []
    assert output[1]["content"][0]["text"] == "Let me see."
    assert [(item["name"], json.loads(item["arguments"])) for item in output[2:]] == [("ls", {"path": "/"})] * 2
    assert output[2]["call_id"] != output[3]["call_id"]
    assert all(item["status"] == "completed" for item in output)
    places = [event["output_index"] for event in events if "output_index" in event]
    assert places == sorted(places) and set(places) == {0, 1, 2, 3}
    ids = {event["output_index"]: event["item_id"] for event in events if "item_id" in event}
    assert ids == {index: item["id"] for index, item in enumerate(output)}
    arguments = [event["delta"] for event in events if event["type"].endswith("arguments.delta")]
    assert "".join(arguments) == output[2]["arguments"] * 2
    (stored,) = scene.stored
    assert stored is not None
    answer = stored.messages[-1]
    assert (answer["content"], answer["reasoning_content"]) == ("Let me see.", "Hm, é?")
    assert [call["id"] for call in answer["tool_calls"]] == [item["call_id"] for item in output[2:]]
    assert answer["tool_calls"][0]["function"] == {"name": "ls", "arguments": {"path": "/"}}
    assert stored.output == [output[0], {**output[1], "content": [_bare(output[1]["content"][0])]}, *output[2:]]


def _bare(part: dict) -> dict:
    return {name: value for name, value in part.items() if name != "logprobs"}


def test_text_around_a_call_is_split_into_items(tokenizer: Tokenizer) -> None:
    scene = Scene(tokenizer, [f"One.\n{CALL}\nTwo."], tools=[LS])
    events = scene.events()
    assert types(events) == ["created", "in_progress", *MESSAGE, *CALLED, *MESSAGE, "completed"]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert all(item["status"] == "in_progress" for item in added) and added[1]["arguments"] == ""
    (stored,) = scene.stored
    assert stored is not None and stored.messages[-1]["content"] == "One.\nTwo."


def test_whole_and_streamed_responses_are_equal(tokenizer: Tokenizer) -> None:
    text = "<think>\nHm.\n</think>\n\nGood day."
    whole = Scene(tokenizer, [text])
    assert json.loads(asyncio.run(whole.running.whole())) == whole.body()
    streamed = Scene(tokenizer, list(text))
    streamed.events()
    times = ("created_at", "completed_at")
    assert {**whole.body(), **dict.fromkeys(times)} == {**streamed.body(), **dict.fromkeys(times)}


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_reasoning_tokens_exclude_think_tags(tokenizer: Tokenizer, size: int) -> None:
    text = "<think>\nHm, é?\n</think>\n\nHm, é?"
    scene = Scene(tokenizer, [text[i : i + size] for i in range(0, len(text), size)])
    scene.events()
    assert scene.body()["usage"]["output_tokens_details"] == {"reasoning_tokens": len("Hm, é?".encode())}


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_logprobs_cover_only_visible_text(tokenizer: Tokenizer, size: int) -> None:
    text = f"<think>\nHm.\n</think>\n\nDay.\n{CALL}"
    fields = {"include": [LOGPROBS], "top_logprobs": 1, "tools": [LS]}
    scene = Scene(tokenizer, [text[i : i + size] for i in range(0, len(text), size)], **fields)
    events = scene.events()
    part = scene.body()["output"][1]["content"][0]
    assert part["text"] == "Day." and [row["token"] for row in part["logprobs"]] == list("Day.")
    row = part["logprobs"][0]
    assert row["bytes"] == [ord("D")] and abs(row["logprob"] + ord("D") / 1000) < 1e-6
    assert row["top_logprobs"] == [{name: row[name] for name in ("token", "logprob", "bytes")}]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [row for event in deltas for row in event["logprobs"]] == part["logprobs"]
    for event in deltas:
        assert "".join(row["token"] for row in event["logprobs"]) == event["delta"]
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == part["logprobs"]
    (stored,) = scene.stored
    assert stored is not None and "logprobs" not in stored.output[1]["content"][0]


@pytest.mark.parametrize("size", [1, 4, 1000])
def test_forced_prefix_has_no_logprobs(tokenizer: Tokenizer, size: int) -> None:
    """It was to be a call, and became words, of which the model wrote only the last."""
    text = "no call.</tool_call>\n" + CALL + "Day."
    parts = [text[i : i + size] for i in range(0, len(text), size)]
    scene = Scene(tokenizer, parts, forced="<tool_call>\n", include=[LOGPROBS], tools=[LS])
    scene.events()
    words, _, more = scene.body()["output"]
    assert words["content"][0]["text"].startswith("<tool_call>\nno call.")
    assert "".join(row["token"] for row in words["content"][0]["logprobs"]).startswith("no call.")
    assert "".join(row["token"] for row in more["content"][0]["logprobs"]) == more["content"][0]["text"] == "Day."


def test_truncated_answer_is_incomplete(tokenizer: Tokenizer) -> None:
    scene = Scene(tokenizer, ["<think>\nHm.\n</think>\n\n", "Good"], LENGTH)
    events = scene.events()
    assert events[-1]["type"] == "response.incomplete"
    body = scene.body()
    assert body["status"] == "incomplete" and body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in body["output"]] == ["completed", "incomplete"] and body["completed_at"] is None
    (stored,) = scene.stored
    assert stored is not None and stored.status == "incomplete"


def test_truncated_call_is_incomplete(tokenizer: Tokenizer) -> None:
    scene = Scene(tokenizer, [CALL[:50]], LENGTH, tools=[LS])
    assert types(scene.events()) == ["created", "in_progress", *CALLED, "incomplete"]
    (item,) = scene.body()["output"]
    assert item["status"] == "incomplete" and item["arguments"].startswith('{"path"')
    assert scene.stored[0] is not None


def test_empty_answer_is_an_empty_message(tokenizer: Tokenizer) -> None:
    scene = Scene(tokenizer, [""])
    assert types(scene.events()) == ["created", "in_progress", *[n for n in MESSAGE if "delta" not in n], "completed"]
    assert scene.body()["output"][0]["content"][0]["text"] == ""


def test_cancelled_response_has_status_cancelled(tokenizer: Tokenizer) -> None:
    scene = Scene(tokenizer, ["Go", ""], ABORT)
    assert scene.events()[-1]["type"] == "response.incomplete"
    body = scene.body()
    assert body["status"] == "cancelled" and body["incomplete_details"] is None
    assert body["output"][0]["status"] == "incomplete" and body["output"][0]["content"][0]["text"] == "Go"
    (stored,) = scene.stored
    assert stored is not None and stored.turn is None
    assert Scene(tokenizer, [""], ABORT).events()[-1]["response"]["output"] == []


REFUSAL = RequestRefused("max_new_tokens is too large", param="max_new_tokens")


def test_early_refusal_is_raised_with_response_field_names(tokenizer: Tokenizer) -> None:
    scene = Scene(tokenizer, [], REFUSAL)
    with pytest.raises(RequestRefused, match="max_output_tokens is too large") as caught:
        scene.events()
    assert caught.value.param == "max_output_tokens" and scene.stored == [None]


@pytest.mark.parametrize(
    ("cause", "code"),
    [
        ("request_failed", "server_error"),
        ("queue_full", "rate_limit_exceeded"),
        ("invalid_request", "invalid_prompt"),
    ],
)
def test_late_failure_is_a_failed_event(tokenizer: Tokenizer, cause: str, code: str) -> None:
    scene = Scene(tokenizer, ["Go"], RequestRefused("the worker is gone", code=cause))
    events = scene.events()
    assert types(events)[-1] == "failed"
    assert events[-1]["response"]["error"] == {"code": code, "message": "the worker is gone"}
    assert scene.body()["status"] == "failed" and scene.stored == [None]


def test_failed_background_response_can_be_retrieved(tokenizer: Tokenizer) -> None:
    scene = Scene(tokenizer, [], REFUSAL, background=True)
    assert scene.body()["status"] == "queued"
    with pytest.raises(RequestRefused):
        scene.events()
    (stored,) = scene.stored
    assert stored is not None and stored.status == "failed" and json.loads(stored.body)["status"] == "failed"


def test_store_false_stores_nothing(tokenizer: Tokenizer) -> None:
    scene = Scene(tokenizer, ["Go"], store=False)
    scene.events()
    assert scene.stored == [None] and scene.body()["store"] is False


def test_abandoned_stream_is_not_stored(tokenizer: Tokenizer) -> None:
    scene = Scene(tokenizer, ["Go", "on"])

    async def leave() -> None:
        with scene.running:
            async for event in scene.running.events():
                if event["type"].endswith("delta"):
                    break

    asyncio.run(leave())
    assert scene.stored == [None] and scene.said.answer.closed and scene.running.ended.is_set()
    assert json.loads(scene.running.body)["status"] == "in_progress"


def test_metadata_reports_the_continuation_path(tokenizer: Tokenizer) -> None:
    mine = {"mine": "x", "baton_path": "handoff"}
    scene = Scene(tokenizer, ["Go"], metadata=mine, previous_response_id="resp_p")
    scene.said.continuation = ContinuationOutput("match", 12, 3, 1)
    first = scene.events()[0]
    assert first["response"]["metadata"] == {"mine": "x"}, "a client's own are of the response before"
    body = scene.body()
    assert body["metadata"] == {
        "mine": "x", "baton_path": "match", "baton_inherited_tokens": "12", "baton_recomputed_tokens": "3",
    }  # fmt: skip
    assert body["baton"]["continuation"]["inherited_tokens"] == 12 and body["baton"]["rid"] == "r"
    alone = Scene(tokenizer, ["Go"], previous_response_id="resp_p")
    alone.events()
    assert alone.body()["metadata"]["baton_path"] == "fallback" == alone.body()["baton"]["continuation"]["path"]
    first = Scene(tokenizer, ["Go"], metadata=mine)
    first.events()
    assert first.body()["metadata"] == {"mine": "x"} and "continuation" not in first.body()["baton"]


def test_large_updates_are_formatted_like_small_ones(tokenizer: Tokenizer, tmp_path: Path) -> None:
    words = "word " * 6000
    scene = Scene(tokenizer, [words])
    scene.events()
    assert scene.body()["output"][0]["content"][0]["text"] == words


AGENTS = {"type": "namespace", "name": "agents", "description": "Agents.", "tools": [LS]}
PATCH = {"type": "custom", "name": "patch"}


def test_call_carries_the_namespace_of_its_tool(tokenizer: Tokenizer) -> None:
    text = CALL.replace('"ls"', '"agents__ls"')
    scene = Scene(tokenizer, [text[i : i + 5] for i in range(0, len(text), 5)], tools=[AGENTS, LS])
    events = scene.events()
    (item,) = events[-1]["response"]["output"]
    assert (item["type"], item["namespace"], item["name"]) == ("function_call", "agents", "ls")
    assert next(event for event in events if event["type"].endswith("item.added"))["item"]["namespace"] == "agents"
    assert [tool["type"] for tool in scene.body()["tools"]] == ["namespace", "function"]
    (stored,) = scene.stored
    assert stored is not None
    assert stored.messages[-1]["tool_calls"][0]["function"]["name"] == "agents__ls", "as the model knows it"


def test_custom_tool_call_carries_its_input_text(tokenizer: Tokenizer) -> None:
    text = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin\\né"}}\n</tool_call>'
    scene = Scene(tokenizer, [text[:40], text[40:60], text[60:]], tools=[PATCH])
    events = scene.events()
    assert types(events) == [
        "created", "in_progress", "output_item.added", "custom_tool_call_input.delta", "custom_tool_call_input.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    (item,) = events[-1]["response"]["output"]
    assert item["id"] == "ctc_r_0" and (item["type"], item["name"], item["input"]) == (
        "custom_tool_call", "patch", "*** Begin\né",
    )  # fmt: skip
    assert [event["delta"] for event in events if "delta" in event] == ["*** Begin\né"]
    (stored,) = scene.stored
    assert stored is not None
    assert stored.messages[-1]["tool_calls"][0]["function"]["arguments"] == {"input": "*** Begin\né"}
    assert scene.body()["tools"] == [PATCH]
