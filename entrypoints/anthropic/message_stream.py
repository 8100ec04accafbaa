"""Turns the answer to a chat into the events of Anthropic's streams.

message_start, ping
content_block_start, content_block_delta …, content_block_stop      for each block
message_delta (how it ended, usage), message_stop
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from ..chat.chats import ChatAnswer, ChatUpdate
from ..tool_parsers.pieces import CallArguments, CallBegins, Piece, Reasoning
from .message_response import details_of, edits_of, message_head, stop_of, usage
from .messages import MESSAGE_NAMES, MessagesRequest


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
            "delta": stop_of(output.finish, list(calls.values())),
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
