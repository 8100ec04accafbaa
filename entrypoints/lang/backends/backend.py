"""The calls of programs to a server or an Engine. All backends take the fields of ``POST /generate``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from ....runtime.text.chat_template import ChatTemplate

NO_TEMPLATE = "this model has no chat template; write the text of the roles yourself"


@runtime_checkable
class Backend(Protocol):
    """The calls that a program makes to a server, from many threads at once. Failures raise BackendError."""

    def generate(self, fields: dict[str, Any]) -> Any:
        """The answer: a dict {text, output_ids, meta_info}, or a list of them for a batch or n > 1."""
        ...

    def stream(self, fields: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yields growing answers, each with the whole output so far."""
        ...

    def abort(self, rid: str) -> None:
        """End an open request; nothing happens if there is none."""
        ...

    def release(self, rid: str) -> None:
        """Release the leases of a finished request; nothing happens if there are none."""
        ...

    def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]: ...

    def chat_template(self) -> ChatTemplate:
        """The model's chat template. Raises ChatTemplateError if it has none."""
        ...


def whole_outputs(events: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Turns events with only the new output into events with the whole output so far."""
    text, output_ids, logprobs = "", [], {}
    for event in events:
        text += event["text"]
        output_ids = output_ids + event["output_ids"]
        meta = event["meta_info"]
        logprobs = {name: logprobs.get(name, []) + meta[name] for name in meta if name.endswith("logprobs")}
        yield {**event, "text": text, "output_ids": output_ids, "meta_info": {**meta, **logprobs}}
