"""The events of a stream and the whole message say the same, and errors have Anthropic's shape."""

from __future__ import annotations

import dataclasses
import json
from itertools import count
from typing import Any

import pytest

from baton.entrypoints.anthropic.errors import error_body
from baton.entrypoints.anthropic.message_response import MessageEvents, whole_message
from baton.entrypoints.anthropic.messages import parse_messages
from baton.entrypoints.chat.chats import ChatUpdate
from baton.entrypoints.http_statuses import status_of
from baton.entrypoints.tool_parsers.pieces import CallArguments, CallBegins, Piece, Reasoning, Text
from baton.runtime.answer import Output
from baton.runtime.messages import ContinuationOutput, RetainedOutput
from baton.scheduler.constraints.constraint import GRAMMAR, ITEM
from baton.scheduler.outcome import FinishReason, FoundTokens, RequestRefused
from tests.doubles.prompts import make_prompt

END = FinishReason("stop", matched=1)
LS = [CallBegins(0, "ls"), CallArguments(0, '{"path": '), CallArguments(0, '"/"}')]
PWD = [CallBegins(1, "pwd"), CallArguments(1, "{}")]

THINKING = {"type": "thinking", "thinking": "Hm. So.", "signature": ""}
USE_LS = {"type": "tool_use", "id": "c0", "name": "ls", "input": {"path": "/"}}
USE_PWD = {"type": "tool_use", "id": "c1", "name": "pwd", "input": {}}


def words(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


ASKED = parse_messages(
    {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}], "rid": "r",
     "thinking": {"type": "enabled", "budget_tokens": 1024}, "stop_sequences": ["\n\n", "x"]}
)  # fmt: skip


def output(finish: FinishReason | None, **details: Any) -> Output:
    return Output(
        make_prompt(rid="r"), 0, 0, "", [], prompt_tokens=10, completion_tokens=5, found=FoundTokens(4, 2),
        finish=finish, **details,
    )  # fmt: skip


def call_ids() -> Any:
    numbers = count()
    return lambda: f"c{next(numbers)}"


def streamed(updates: list[ChatUpdate]) -> list[dict]:
    events = MessageEvents(ASKED, "served", call_ids())
    return [event for update in updates for event in events.take_update(update)]


def read(events: list[dict]) -> dict:
    """What a client makes of a stream. Checks that blocks follow each other as the protocol has it."""
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    message: dict[str, Any] = events[0]["message"]
    assert message["content"] == [] and message["stop_reason"] is None
    blocks, is_open, inputs = [], False, {}
    for event in events[2:-2]:
        match event["type"]:
            case "content_block_start":
                assert not is_open and event["index"] == len(blocks)
                is_open = True
                blocks.append(dict(event["content_block"]))
                assert not any(blocks[-1].get(name) for name in ("text", "thinking", "signature", "input"))
            case "content_block_delta":
                assert is_open and event["index"] == len(blocks) - 1
                (name, value) = next((n, v) for n, v in event["delta"].items() if n != "type")
                kind = {"partial_json": "input_json", "text": "text"}.get(name, name)
                assert event["delta"]["type"] == f"{kind}_delta"
                if name == "partial_json":
                    inputs[event["index"]] = inputs.get(event["index"], "") + value
                else:
                    blocks[-1][name] += value
            case kind:
                assert kind == "content_block_stop" and is_open and event["index"] == len(blocks) - 1
                is_open = False
    assert not is_open
    for index, given in inputs.items():
        blocks[index]["input"] = json.loads(given)
    end = events[-2]
    return message | {"content": blocks, "usage": end["usage"], "baton": end["baton"]} | end["delta"]


ORDERS: list[tuple[list[Piece], FinishReason, list[dict], str]] = [
    ([], END, [], "end_turn"),
    ([Text("Hi"), Text(" you")], END, [words("Hi you")], "end_turn"),
    ([Reasoning("Hm."), Reasoning(" So.")], FinishReason("length"), [THINKING], "max_tokens"),
    ([Reasoning("Hm. So."), Text("Hi")], END, [THINKING, words("Hi")], "end_turn"),
    (LS, END, [USE_LS], "tool_use"),
    ([*LS, *PWD], END, [USE_LS, USE_PWD], "tool_use"),
    ([Text("Hi"), *LS, Text("\nso")], END, [words("Hi"), USE_LS, words("\nso")], "tool_use"),
    ([Reasoning("Hm. So."), Text("Hi"), *LS, *PWD], END, [THINKING, words("Hi"), USE_LS, USE_PWD], "tool_use"),
    ([*LS], FinishReason("length"), [USE_LS], "max_tokens"),
    ([Text("Hi")], FinishReason("stop", matched="\n\n"), [words("Hi")], "stop_sequence"),
    ([*LS], FinishReason("stop", matched="x"), [USE_LS], "stop_sequence"),
    ([Text("Hi")], FinishReason("stop", matched=GRAMMAR), [words("Hi")], "end_turn"),
    ([*LS], FinishReason("stop", matched=GRAMMAR), [USE_LS], "tool_use"),
    ([Text("Hi")], FinishReason("stop", matched=ITEM), [words("Hi")], "end_turn"),
    # Space alone is no text, and belongs to what follows it.
    ([Text("\n"), Text(" "), Text("Hi")], END, [words("\n Hi")], "end_turn"),
    ([Text(" "), *LS, Text("\n"), *PWD, Text("\n")], END, [USE_LS, USE_PWD], "tool_use"),
    ([Text(" "), *LS, Text("Hi")], END, [USE_LS, words("Hi")], "tool_use"),
    ([Text(" ")], END, [], "end_turn"),
    ([Reasoning("Hm. So."), Text("\n"), Reasoning("Hm. So.")], END, [THINKING, THINKING], "end_turn"),
]  # fmt: skip


@pytest.mark.parametrize(("pieces", "finish", "content", "stop_reason"), ORDERS)
def test_streamed_events_rebuild_the_whole_message(
    pieces: list[Piece], finish: FinishReason, content: list[dict], stop_reason: str
) -> None:
    details: dict[str, Any] = {
        "retained": RetainedOutput(tokens=5, ttl=1.0),
        "continuation": ContinuationOutput(path="handoff", inherited_tokens=3, recomputed_tokens=2, trimmed_tokens=1),
    }
    last = output(finish, **details)
    whole = whole_message(ASKED, "served", ChatUpdate(last, pieces), call_ids())
    assert whole == {
        "id": "msg_r", "type": "message", "role": "assistant", "model": "served", "content": content,
        "stop_reason": stop_reason, "stop_sequence": finish.matched if stop_reason == "stop_sequence" else None,
        "usage": {
            "input_tokens": 4, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 6, "output_tokens": 5,
        },
        "baton": {
            "rid": "r",
            "continuation": {"path": "handoff", "inherited_tokens": 3, "recomputed_tokens": 2, "trimmed_tokens": 1},
            "retained": {"tokens": 5, "ttl": 1.0},
            "cached_tokens_details": {"device": 4, "host": 2, "disk": 0, "remote": 0},
            "unenforced": ["thinking.budget_tokens"],
        },
    }  # fmt: skip
    at_once = [ChatUpdate(last, pieces)]
    one_by_one = [ChatUpdate(output(None), [piece]) for piece in pieces] + [ChatUpdate(last, [])]
    for updates in (at_once, one_by_one):
        assert read(streamed(updates)) == whole


def test_stream_events_have_the_documented_shape() -> None:
    pieces = [Reasoning("Hm."), Text("Hi"), *PWD]
    events = streamed([ChatUpdate(output(None), []), ChatUpdate(output(END), pieces)])
    assert events[0] == {
        "type": "message_start",
        "message": {
            "id": "msg_r", "type": "message", "role": "assistant", "model": "served", "content": [],
            "stop_reason": None, "stop_sequence": None, "baton": {"rid": "r"},
            "usage": {
                "input_tokens": 4, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 6, "output_tokens": 5,
            },
        },
    }  # fmt: skip
    assert [{name: value for name, value in event.items() if name != "type"} for event in events[1:-2]] == [
        {},
        {"index": 0, "content_block": {"type": "thinking", "thinking": "", "signature": ""}},
        {"index": 0, "delta": {"type": "thinking_delta", "thinking": "Hm."}},
        {"index": 0, "delta": {"type": "signature_delta", "signature": ""}},
        {"index": 0},
        {"index": 1, "content_block": {"type": "text", "text": ""}},
        {"index": 1, "delta": {"type": "text_delta", "text": "Hi"}},
        {"index": 1},
        {"index": 2, "content_block": {"type": "tool_use", "id": "c0", "name": "pwd", "input": {}}},
        {"index": 2, "delta": {"type": "input_json_delta", "partial_json": "{}"}},
        {"index": 2},
    ]
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


def test_stream_events_are_emitted_per_update() -> None:
    """The first update opens the message, and each brings all of its words."""
    events = MessageEvents(ASKED, "served", call_ids())
    assert [event["type"] for event in events.take_update(ChatUpdate(output(None), []))] == ["message_start", "ping"]
    assert list(events.take_update(ChatUpdate(output(None), []))) == []
    assert len(list(events.take_update(ChatUpdate(output(None), [Text("Hi")])))) == 2
    assert len(list(events.take_update(ChatUpdate(output(None), [Text("Hi")])))) == 1


TOO_DEEP = '{"a":' * 5000 + "1" + "}" * 5000


@pytest.mark.parametrize(
    "arguments",
    ["", '{"path": "/', '{"path": 1}}', "[1]", "5", TOO_DEEP],
    ids=["empty", "cut off", "too long", "a list", "a number", "too deep"],
)
@pytest.mark.parametrize("finish", [END, FinishReason("length")])
def test_cut_off_call_is_reported_as_unfinished_input(arguments: str, finish: FinishReason) -> None:
    pieces = [*LS, CallBegins(1, "pwd"), *([CallArguments(1, arguments)] if arguments else [])]
    whole = whole_message(ASKED, "served", ChatUpdate(output(finish), pieces), call_ids())
    assert whole["content"] == [USE_LS, USE_PWD]
    assert whole["stop_reason"] == ("max_tokens" if finish.type == "length" else "end_turn")
    assert whole["baton"]["unfinished_input"] == {"c1": arguments}
    end = streamed([ChatUpdate(output(finish), pieces)])[-2]
    assert end["delta"]["stop_reason"] == whole["stop_reason"] and end["baton"] == whole["baton"]


def test_aborted_answer_is_an_error() -> None:
    gone = ChatUpdate(output(FinishReason("abort", message="by request")), [Text("Hi")])
    for answer in (lambda: whole_message(ASKED, "served", gone, call_ids()), lambda: streamed([gone])):
        with pytest.raises(RequestRefused, match="aborted: by request") as error:
            answer()
        assert (status_of(error.value), error.value.code) == (499, "aborted")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("invalid_request", "invalid_request_error"), ("invalid_api_key", "authentication_error"),
        ("admin_key_required", "permission_error"), ("not_found", "not_found_error"),
        ("request_timeout", "timeout_error"), ("duplicate_rid", "invalid_request_error"),
        ("body_too_large", "request_too_large"), ("queue_full", "rate_limit_error"),
        ("request_failed", "api_error"), ("not_ready", "overloaded_error"),
    ],
)  # fmt: skip
def test_error_body_has_anthropic_shape(code: str, kind: str) -> None:
    assert error_body(RequestRefused("no", code=code, param="tools")) == {
        "type": "error",
        "error": {"type": kind, "message": "no", "details": {"error_code": code, "param": "tools"}},
    }


def test_applied_edits_are_reported_in_the_last_event() -> None:
    applied = [{"type": "clear_tool_uses_20250919", "cleared_tool_uses": 2, "cleared_input_tokens": 70}]
    for asked, told in ((ASKED, None), (dataclasses.replace(ASKED, applied_edits=applied), {"applied_edits": applied}),
                        (dataclasses.replace(ASKED, applied_edits=[]), {"applied_edits": []})):  # fmt: skip
        update = ChatUpdate(output(END), [Text("Hi")])
        assert whole_message(asked, "served", update, call_ids()).get("context_management") == told
        delta = list(MessageEvents(asked, "served", call_ids()).take_update(update))[-2]
        assert delta["type"] == "message_delta" and delta.get("context_management") == told
