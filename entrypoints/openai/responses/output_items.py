"""The output items of a response, and the events of a stream as they grow.

    Reasoning  ─▶  {"type": "reasoning", "content": [{"type": "reasoning_text"}]}
    Text       ─▶  {"type": "message", "content": [{"type": "output_text"}]}
    CallBegins ─▶  {"type": "function_call", "call_id", "name", "arguments"}, with the namespace of its tool
                   {"type": "custom_tool_call", "call_id", "name", "input"}, where its tool takes a text

The text for a custom tool is known once its arguments are whole, so it comes as one delta.

A response that is not streamed is made the same way, so the two cannot differ.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Literal

import msgspec

from ....runtime.answer import Output, TokenLogprob
from ....runtime.text.incremental_decode import IncrementalDecoder
from ....runtime.text.token_bytes import TokenBytes
from ...chat.messages import Message
from ...tool_parsers.pieces import CallArguments, CallBegins, Piece, Reasoning, Text
from .items import custom_call, tool_call
from .tools import ResponseTools, custom_input, qualified

Event = dict[str, Any]
Kind = Literal["message", "reasoning", "function_call", "custom_tool_call"]
Status = Literal["completed", "incomplete"]

_ID_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}
_CALLS = ("function_call", "custom_tool_call")
_TEXT_EVENTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


@dataclass(slots=True)
class _Growing:
    """An item that has not ended. ``words``: of its text, or of its arguments."""

    index: int
    kind: Kind
    item: dict[str, Any]
    words: list[str] = field(default_factory=list)
    logprobs: list[LogprobRow] = field(default_factory=list)

    @property
    def place(self) -> dict[str, Any]:
        return {"item_id": self.item["id"], "output_index": self.index}

    @property
    def text(self) -> str:
        return "".join(self.words)


class OutputItems:
    """The items of one answer. tokens: None where neither logprobs nor thoughts are told apart."""

    def __init__(
        self, rid: str, new_call_id: Callable[[], str], tokens: TextTokens | None, offered: ResponseTools
    ) -> None:
        """offered: the tools that are called."""
        self.ended: list[dict[str, Any]] = []
        self.reasoning_tokens = 0
        self._rid = rid
        self._new_call_id = new_call_id
        self._tokens = tokens
        self._offered = offered
        self._growing: _Growing | None = None

    def take_piece(self, piece: Piece) -> Iterator[Event]:
        """The next piece of the answer."""
        match piece:
            case Reasoning(text):
                yield from self._grow("reasoning", text)
            case Text(text):
                yield from self._grow("message", text)
            case CallBegins(_, name):
                origin = self._offered.origin(name)
                if origin.kind == "custom":
                    yield from self._begin("custom_tool_call", origin.call(self._new_call_id()) | {"input": ""})
                else:
                    yield from self._begin("function_call", origin.call(self._new_call_id()) | {"arguments": ""})
            case CallArguments(_, delta):
                assert self._growing is not None
                self._growing.words.append(delta)
                if self._growing.kind == "function_call":
                    yield {"type": "response.function_call_arguments.delta", **self._growing.place, "delta": delta}

    def end_answer(self, status: Status, *, may_be_empty: bool) -> Iterator[Event]:
        """The answer is over. ``status``: of its last item. may_be_empty: it may have none; otherwise it has a message
        without words."""
        if not (self.ended or self._growing or may_be_empty):
            yield from self._begin("message", {"role": "assistant", "content": []})
        yield from self._close(status)

    @property
    def message(self) -> Message:
        """All of them as one message, which the next turn begins with."""
        said: dict[str, list[str]] = {"message": [], "reasoning": []}
        calls: list[dict] = []
        for item in self.ended:
            if item["type"] in _CALLS:
                name = qualified(item.get("namespace"), item["name"])
                if item["type"] == "function_call":
                    calls.append(tool_call(item["call_id"], name, item["arguments"]))
                else:
                    calls.append(custom_call(item["call_id"], name, item["input"]))
            else:
                said[item["type"]] += [part["text"] for part in item["content"]]
        message: Message = {"role": "assistant", "content": "".join(said["message"])}
        if said["reasoning"]:
            message["reasoning_content"] = "".join(said["reasoning"])
        if calls:
            message["tool_calls"] = calls
        return message

    # -- items begin, grow and end -------------------------------------------------------------------------------------

    def _begin(self, kind: Kind, more: dict[str, Any]) -> Iterator[Event]:
        yield from self._close("completed")
        index = len(self.ended)
        item = {"id": f"{_ID_PREFIXES[kind]}_{self._rid}_{index}", "type": kind, "status": "in_progress", **more}
        growing = self._growing = _Growing(index, kind, item)
        yield {"type": "response.output_item.added", "output_index": index, "item": dict(item)}
        if kind not in _CALLS:
            part = {"content_index": 0, "part": self._part(growing)}
            yield {"type": "response.content_part.added", **growing.place, **part}

    def _grow(self, kind: Literal["message", "reasoning"], text: str) -> Iterator[Event]:
        growing = self._growing
        if growing is None or growing.kind != kind:
            first = {"role": "assistant"} if kind == "message" else {"summary": []}
            yield from self._begin(kind, {**first, "content": []})
            growing = self._growing
        assert growing is not None
        growing.words.append(text)
        count, rows = self._tokens.take_piece(text) if self._tokens is not None else (0, [])
        event = {"type": f"{_TEXT_EVENTS[kind]}.delta", **growing.place, "content_index": 0, "delta": text}
        if kind == "message":
            growing.logprobs += rows
            event["logprobs"] = rows
        else:
            self.reasoning_tokens += count
        yield event

    def _close(self, status: Status) -> Iterator[Event]:
        growing, self._growing = self._growing, None
        if growing is None:
            return
        if growing.kind == "function_call":
            growing.item["arguments"] = growing.text
            name = "response.function_call_arguments.done"
            called = {"name": growing.item["name"], "arguments": growing.text}
            yield {"type": name, **growing.place, **called}
        elif growing.kind == "custom_tool_call":
            text = growing.item["input"] = custom_input(growing.text)
            if text:
                yield {"type": "response.custom_tool_call_input.delta", **growing.place, "delta": text}
            yield {"type": "response.custom_tool_call_input.done", **growing.place, "input": text}
        else:
            part = self._part(growing)
            growing.item["content"] = [part]
            done = {"type": f"{_TEXT_EVENTS[growing.kind]}.done", **growing.place, "content_index": 0}
            yield done | {"text": part["text"]} | ({"logprobs": part["logprobs"]} if "logprobs" in part else {})
            yield {"type": "response.content_part.done", **growing.place, "content_index": 0, "part": part}
        growing.item["status"] = status
        self.ended.append(growing.item)
        yield {"type": "response.output_item.done", "output_index": growing.index, "item": growing.item}

    def _part(self, growing: _Growing) -> dict[str, Any]:
        if growing.kind == "reasoning":
            return {"type": "reasoning_text", "text": growing.text}
        logprobs = list(growing.logprobs)
        return {"type": "output_text", "text": growing.text, "annotations": [], "logprobs": logprobs}


# -- their tokens ------------------------------------------------------------------------------------------------------

LogprobRow = msgspec.Raw
"""JSON of one token's logprobs: there may be many thousands, and so they take the least room."""


class TextTokens:
    """One output. A piece of it is looked up in its text, from where the last one ended; what lies between (the marks
    of thoughts and calls) belongs to none. Words behind a call may be found too early, inside of the call."""

    def __init__(self, token_bytes: TokenBytes, forced: str) -> None:
        """forced: what stands before the output's text, and may be the beginning of a piece."""
        self._token_bytes = token_bytes
        self._decoder: IncrementalDecoder | None = None
        """Decodes with the settings of the output."""
        self._decoded = 0
        """Characters of all tokens so far."""
        self._waiting: deque[tuple[int, int, LogprobRow | None]] = deque()
        """Tokens that no piece was made of yet: from where to where each goes in the text."""
        self._text = forced
        """The text behind the last piece, and where that piece ended."""
        self._start = -len(forced)

    def add_output(self, output: Output) -> None:
        """The output has grown."""
        if self._decoder is None:
            skips = output.prompt.sampling.skip_special_tokens
            self._decoder = IncrementalDecoder(self._token_bytes, skip_special_tokens=skips)
        self._text += output.text
        rows: Iterable[TokenLogprob | None] = output.output_logprobs if len(output.output_logprobs) else repeat(None)
        for token_id, row in zip(output.token_ids, rows, strict=False):
            start = self._decoded
            self._decoded += len(self._decoder.push_ids((token_id,)))
            # One within a character has a part in it, though it completes none.
            stop = self._decoded + self._decoder.has_pending_bytes
            self._waiting.append((start, stop, None if row is None else self._encoded(row)))

    def take_piece(self, piece: str) -> tuple[int, list[LogprobRow]]:
        """(how many tokens, their logprobs if there are any) of the next words or thoughts. Each token counts once,
        for the first piece that it has a part in."""
        found = max(0, self._text.find(piece))
        begin, end = self._start + found, self._start + found + len(piece)
        self._text, self._start = self._text[found + len(piece) :], end
        taken: list[LogprobRow | None] = []
        while self._waiting and self._waiting[0][0] < end:
            _, stop, row = self._waiting.popleft()
            if stop > begin:
                taken.append(row)
        return len(taken), [row for row in taken if row is not None]

    def _encoded(self, token: TokenLogprob) -> LogprobRow:
        top = [self._alone(other) for other in token.top or ()]
        return msgspec.Raw(msgspec.json.encode({**self._alone(token), "top_logprobs": top}))

    def _alone(self, token: TokenLogprob) -> dict:
        return {"token": token.text, "logprob": token.logprob, "bytes": list(self._token_bytes[token.id])}
