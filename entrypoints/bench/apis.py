"""The three APIs that the benchmark can load: how each sends a turn, and how its stream is read.

Every turn sends the whole conversation again, as OpenAI's APIs require (`PREFIX`). On Baton's ``/generate`` it can
instead name the turn before it and send only its own text (`CONTINUATION`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PREFIX = "prefix"
CONTINUATION = "continuation"
RETAIN_S = 120
"""Seconds for which Baton is asked to keep a turn's KV: the next turn follows at once."""


@dataclass
class Answer:
    """One answer. Times are of time.perf_counter, in seconds; token counts are the server's, None if it sends none."""

    started: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    """When each event with output arrived."""
    ended: float = 0.0
    text: str = ""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    rid: str | None = None
    """Baton's name of the request."""
    path: str | None = None
    """Where a continuation's KV came from."""


@dataclass(frozen=True)
class Turn:
    """One user's text, and the turns before it: (text, answer) pairs, oldest first."""

    text: str
    before: Sequence[tuple[str, Answer]] = ()
    is_last: bool = True

    @property
    def whole_text(self) -> str:
        return "".join(text + answer.text for text, answer in self.before) + self.text


class Api(ABC):
    """See the module docstring. ``ignore_eos``: ask for answers of exactly the requested length, which no end token
    cuts short."""

    name: str
    path: str

    def __init__(self, model: str, ignore_eos: bool) -> None:
        self._model = model
        self._ignore_eos = ignore_eos

    @abstractmethod
    def request(self, turn: Turn, way: str, output_tokens: int) -> dict[str, Any]:
        """The JSON body."""

    @abstractmethod
    def read_event(self, event: dict[str, Any], now: float, answer: Answer) -> None:
        """Add one event of the stream to the answer."""


class _OpenAI(Api):
    def _fields(self, output_tokens: int) -> dict[str, Any]:
        fields: dict[str, Any] = {"model": self._model, "max_tokens": output_tokens, "temperature": 0, "stream": True}
        fields["stream_options"] = {"include_usage": True}
        if self._ignore_eos:  # a field of vLLM, SGLang and Baton
            fields["ignore_eos"] = True
        return fields

    def read_event(self, event: dict[str, Any], now: float, answer: Answer) -> None:
        for choice in event.get("choices") or ():
            if (text := self._output(choice)) is not None:
                answer.arrivals.append(now)
                answer.text += text
        if usage := event.get("usage"):
            answer.prompt_tokens = usage.get("prompt_tokens")
            answer.output_tokens = usage.get("completion_tokens")
            answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")

    @abstractmethod
    def _output(self, choice: dict[str, Any]) -> str | None:
        """The output in a choice of an event, None if the event has none."""


class Completions(_OpenAI):
    name = "openai"
    path = "/v1/completions"

    def request(self, turn: Turn, way: str, output_tokens: int) -> dict[str, Any]:
        return {**self._fields(output_tokens), "prompt": turn.whole_text}

    def _output(self, choice: dict[str, Any]) -> str | None:
        # A token may have no text of its own. The last event may have only the reason.
        return None if not choice.get("text") and choice.get("finish_reason") else choice.get("text") or ""


class Chat(_OpenAI):
    name = "openai-chat"
    path = "/v1/chat/completions"

    def request(self, turn: Turn, way: str, output_tokens: int) -> dict[str, Any]:
        messages = [
            {"role": role, "content": content}
            for text, answer in turn.before
            for role, content in (("user", text), ("assistant", answer.text))
        ]
        return {**self._fields(output_tokens), "messages": [*messages, {"role": "user", "content": turn.text}]}

    def _output(self, choice: dict[str, Any]) -> str | None:
        # The first event has only the role, before any token is there.
        delta = choice.get("delta") or {}
        thought = delta.get("reasoning_content") or delta.get("reasoning")
        if not (delta.get("content") or thought or delta.get("tool_calls")):
            return None
        return delta.get("content") or ""


class Generate(Api):
    name = "baton"
    path = "/generate"

    def request(self, turn: Turn, way: str, output_tokens: int) -> dict[str, Any]:
        sampling = {"max_new_tokens": output_tokens, "temperature": 0, "ignore_eos": self._ignore_eos}
        fields: dict[str, Any] = {"model": self._model, "sampling_params": sampling, "stream": True}
        if way == PREFIX or not turn.before:
            fields["text"] = turn.whole_text
        else:
            fields |= {"continuation_of": turn.before[-1][1].rid, "continuation_suffix": turn.text}
        if way == CONTINUATION and not turn.is_last:
            fields["retain_ttl"] = RETAIN_S
        return fields

    def read_event(self, event: dict[str, Any], now: float, answer: Answer) -> None:
        meta = event["meta_info"]
        if meta["completion_tokens"] != (answer.output_tokens or 0):
            answer.arrivals.append(now)
        answer.text, answer.rid = event["text"], meta["id"]
        answer.prompt_tokens, answer.output_tokens = meta["prompt_tokens"], meta["completion_tokens"]
        answer.cached_tokens = meta.get("cached_tokens")
        answer.path = (meta.get("continuation") or {}).get("path", answer.path)


APIS: dict[str, type[Api]] = {api.name: api for api in (Completions, Chat, Generate)}
