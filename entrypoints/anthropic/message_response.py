"""Turns the answer to a chat into Anthropic's message: whole, or as the events of a stream.

message_start, ping
content_block_start, content_block_delta …, content_block_stop      for each block
message_delta (how it ended, usage), message_stop
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec

from ...runtime.answer import Output
from ...scheduler.outcome import FinishReason, RequestRefused
from ..chat.chats import ChatAnswer, ChatUpdate
from ..description.json_schema import COUNT, Schema, answered, enum, list_of, open_object, string
from ..fields.output_details import (
    CACHE_REPORT,
    CACHED_TOKENS,
    STAGE_DETAILS,
    cache_report,
    cached_tokens,
    stage_details,
)
from ..tool_parsers.pieces import CallArguments, CallBegins, Piece, Reasoning, Text, joined
from .diagnostics import DIAGNOSED
from .messages import MESSAGE_NAMES, MessagesRequest


def whole_message(
    asked: MessagesRequest, model: str, update: ChatUpdate, new_call_id: Callable[[], str]
) -> dict[str, Any]:
    """The response to a request that does not stream. model: the served name. Raises RequestRefused."""
    output, pieces = update
    content, calls = _content(joined(pieces), new_call_id)
    head = message_head(asked, model, content, output)
    stop = stop_of(asked, output.finish, list(calls.values()))
    return head | stop | edits_of(asked) | {"baton": details_of(asked, output, calls)}


def message_head(asked: MessagesRequest, model: str, content: list[dict], output: Output) -> dict[str, Any]:
    """A message that has not ended."""
    return {
        "id": asked.message_id,
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage(output),
        **({} if asked.diagnostics is None else {"diagnostics": asked.diagnosis}),
        "baton": {"rid": asked.call.rid},
    }


def usage(output: Output) -> dict[str, int]:
    """Tokens; a prompt's are told apart by whether they were cached, as Anthropic has it."""
    return {
        "input_tokens": output.prompt_tokens - output.found.total,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": output.found.total,
        "output_tokens": output.completion_tokens,
    }


def stop_of(asked: MessagesRequest, finish: FinishReason | None, calls: list[str]) -> dict[str, Any]:
    """``stop_reason`` and ``stop_sequence``. calls: the arguments of each. An unfinished one is none to be run. Raises
    RequestRefused for an answer that was aborted: no stop reason says so, and after a 499 no client tries again."""
    assert finish is not None
    if finish.type == "abort":
        raise RequestRefused(f"the answer was aborted: {finish.message}", code="aborted")
    # A grammar or an item that is complete ends an answer too, and is matched by a name that is no stop sequence.
    stopped_by = finish.matched if finish.matched in asked.call.prompt.sampling.stop else None
    if finish.type == "length":
        reason = "max_tokens"
    elif stopped_by is not None:
        reason = "stop_sequence"
    else:
        is_call = bool(calls) and all(read_input(arguments) is not None for arguments in calls)
        reason = "tool_use" if is_call else "end_turn"
    return {"stop_reason": reason, "stop_sequence": stopped_by}


def edits_of(asked: MessagesRequest) -> dict[str, Any]:
    """``context_management`` of the answer: the edits applied, for requests that have the field."""
    return {} if asked.applied_edits is None else {"context_management": {"applied_edits": asked.applied_edits}}


def read_input(arguments: str) -> dict | None:
    """The object that the arguments of a finished call are."""
    try:
        read = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return None
    return read if isinstance(read, dict) else None


def details_of(asked: MessagesRequest, output: Output, calls: dict[str, str]) -> dict[str, Any]:
    """Baton's own fields of a finished answer. calls: id -> arguments. ``unfinished_input``: arguments that the end of
    the answer cut off, as far as they got: a tool_use can have no half object."""
    details = {"rid": asked.call.rid, **stage_details(output)}
    details["cached_tokens_details"] = cached_tokens(output.found)["cached_tokens_details"]
    details |= cache_report(output)
    if unfinished := {call: arguments for call, arguments in calls.items() if read_input(arguments) is None}:
        details["unfinished_input"] = unfinished
    if asked.unenforced:
        details["unenforced"] = list(asked.unenforced)
    return details


def _content(pieces: list[Piece], new_call_id: Callable[[], str]) -> tuple[list[dict], dict[str, str]]:
    """(blocks, id -> arguments of each call). Space alone is no text: Anthropic's API takes no such block back."""
    blocks: list[dict] = []
    calls: dict[str, str] = {}
    for piece in pieces:
        match piece:
            case Reasoning(thoughts):
                blocks.append({"type": "thinking", "thinking": thoughts, "signature": ""})
            case CallBegins(_, name):
                blocks.append({"type": "tool_use", "id": new_call_id(), "name": name, "input": {}})
                calls[blocks[-1]["id"]] = ""
            case CallArguments(_, arguments):
                calls[blocks[-1]["id"]] = arguments
                blocks[-1]["input"] = read_input(arguments) or {}
            case Text(words) if words.strip():
                blocks.append({"type": "text", "text": words})
    return blocks, calls


# -- as it grows -------------------------------------------------------------------------------------------------------


async def message_events(
    asked: MessagesRequest, model: str, answer: ChatAnswer, new_call_id: Callable[[], str]
) -> AsyncIterator[dict]:
    """The events of a stream; model: the served name. Raises RequestRefused with Anthropic's field names."""
    events = MessageEvents(asked, model, new_call_id)
    with MESSAGE_NAMES.translated():
        async for update in answer.updates():
            for event in events.take_update(update):
                yield event


class MessageEvents:
    """The events of one message, as it grows."""

    def __init__(self, asked: MessagesRequest, model: str, new_call_id: Callable[[], str]) -> None:
        self._asked = asked
        self._model = model
        self._blocks = _Blocks(new_call_id)
        self._begun = False

    def take_update(self, update: ChatUpdate) -> Iterator[dict]:
        """Raises RequestRefused for an answer that was aborted."""
        output, pieces = update
        if not self._begun:
            self._begun = True
            yield {"type": "message_start", "message": message_head(self._asked, self._model, [], output)}
            yield {"type": "ping"}
        for piece in pieces:
            yield from self._blocks.take_piece(piece)
        if output.finish is None:
            return
        yield from self._blocks.close()
        calls = {call: "".join(deltas) for call, deltas in self._blocks.calls.items()}
        yield {
            "type": "message_delta",
            "delta": stop_of(self._asked, output.finish, list(calls.values())),
            "usage": usage(output),
            **edits_of(self._asked),
            "baton": details_of(self._asked, output, calls),
        }
        yield {"type": "message_stop"}


class _Blocks:
    """One block is open at a time. ``calls``: id -> the arguments of each call, in deltas."""

    def __init__(self, new_call_id: Callable[[], str]) -> None:
        self.calls: dict[str, list[str]] = {}
        self._new_call_id = new_call_id
        self._num_begun = 0
        self._open = ""
        """The type of the open block; empty for none."""
        self._space = ""
        """Whitespace held back: it begins a text block if words follow; alone it makes none."""

    def take_piece(self, piece: Piece) -> Iterator[dict]:
        match piece:
            case Reasoning(thoughts):
                if self._open != "thinking":
                    yield from self.close()
                    yield self._start("thinking", thinking="", signature="")
                yield self._delta("thinking_delta", thinking=thoughts)
            case CallBegins(_, name):
                yield from self.close()
                call = self._new_call_id()
                self.calls[call] = []
                yield self._start("tool_use", id=call, name=name, input={})
            case CallArguments(_, delta):
                self.calls[next(reversed(self.calls))].append(delta)
                yield self._delta("input_json_delta", partial_json=delta)
            case _:
                yield from self._take_text(piece.text)

    def close(self) -> Iterator[dict]:
        """Stop the open block, if there is one."""
        kind, self._open, self._space = self._open, "", ""
        if kind == "thinking":
            yield self._delta("signature_delta", signature="")
        if kind:
            yield {"type": "content_block_stop", "index": self._num_begun - 1}

    def _take_text(self, words: str) -> Iterator[dict]:
        if self._open != "text":
            words = self._space + words
            yield from self.close()
            if not words.strip():
                self._space = words
                return
            yield self._start("text", text="")
        yield self._delta("text_delta", text=words)

    def _start(self, kind: str, **block: Any) -> dict:
        self._open = kind
        self._num_begun += 1
        return {
            "type": "content_block_start",
            "index": self._num_begun - 1,
            "content_block": {"type": kind, **block},
        }

    def _delta(self, kind: str, **what: str) -> dict:
        return {"type": "content_block_delta", "index": self._num_begun - 1, "delta": {"type": kind, **what}}


# -- as /openapi.json describes them-----------------------------------------------------------------------------------

_EDITED = answered(
    {"applied_edits": list_of(open_object("type, cleared_input_tokens, and cleared_tool_uses or _thinking_turns."))}
)

_USAGE = answered(
    {
        "input_tokens": COUNT,
        "cache_creation_input_tokens": COUNT,
        "cache_read_input_tokens": COUNT,
        "output_tokens": COUNT,
    },
    title="MessageUsage",
)

ANSWER = answered(
    {
        "id": string("msg_, and the rid."),
        "type": enum("message"),
        "role": enum("assistant"),
        "model": string(),
        "content": list_of(open_object()),
        "stop_reason": enum("end_turn", "max_tokens", "stop_sequence", "tool_use", None),
        "stop_sequence": {"type": ["string", "null"]},
        "usage": _USAGE,
        "baton": answered(
            {"rid": string()},
            title="MessageDetails",
            optional={
                **STAGE_DETAILS,
                "cached_tokens_details": CACHED_TOKENS["cached_tokens_details"],
                **CACHE_REPORT,
                "unfinished_input": open_object("Call -> its arguments as far as they got.", values=string()),
                "unenforced": list_of(string(), "Fields that bind nothing."),
            },
        ),
    },
    title="MessageAnswer",
    optional={"context_management": _EDITED, **DIAGNOSED},
)

EVENT: Schema = {
    "title": "MessageEvent",
    "type": "object",
    "properties": {"type": string("message_start, and so on, as Anthropic has them.")},
    "required": ["type"],
}

NUM_TOKENS = answered(
    {"input_tokens": COUNT},
    title="NumTokens",
    optional={"context_management": answered({"original_input_tokens": COUNT})},
)
