"""The output items of a response, and the events that tell of them as they grow.

    Reasoning  ─▶  {"type": "reasoning", "content": [{"type": "reasoning_text"}]}
    Text       ─▶  {"type": "message", "content": [{"type": "output_text"}]}
    CallBegins ─▶  {"type": "function_call", "call_id", "name", "arguments"}, with the namespace of its tool
                   {"type": "custom_tool_call", "call_id", "name", "input"}, where its tool takes a text

The text for a custom tool is known once its arguments are whole, so it comes as one delta.

A response that is not streamed is made the same way, so the two cannot differ.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from ...chat.messages import Message
from ...tool_parsers.pieces import CallArguments, CallBegins, Piece, Reasoning, Text
from .items import custom_call, tool_call
from .text_tokens import LogprobRow, TextTokens
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

    def end(self, status: Status, *, may_be_empty: bool) -> Iterator[Event]:
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
