"""Turns the answer to a chat into Anthropic's message, whole. `message_stream` has it as it grows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from ...runtime.answer import Output
from ...scheduler.outcome import FinishReason, RequestRefused
from ..chat.chats import ChatUpdate
from ..fields.output_details import cached_tokens, stage_details
from ..tool_parsers.pieces import CallArguments, CallBegins, Piece, Reasoning, Text, joined
from .messages import MessagesRequest


def whole_message(
    asked: MessagesRequest, model: str, update: ChatUpdate, new_call_id: Callable[[], str]
) -> dict[str, Any]:
    """The response to a request that does not stream. model: the served name. Raises RequestRefused."""
    output, pieces = update
    content, calls = _content(joined(pieces), new_call_id)
    head = message_head(asked, model, content, output)
    stop = stop_of(output.finish, list(calls.values()))
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


def stop_of(finish: FinishReason | None, calls: list[str]) -> dict[str, Any]:
    """``stop_reason`` and ``stop_sequence``. calls: the arguments of each. An unfinished one is none to be run. Raises
    RequestRefused for an answer that was aborted: no stop reason says so, and after a 499 no client tries again."""
    assert finish is not None
    if finish.type == "abort":
        raise RequestRefused(f"the answer was aborted: {finish.message}", code="aborted")
    stopped_by = finish.matched if isinstance(finish.matched, str) else None
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
