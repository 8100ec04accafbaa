"""The pieces that a parser splits a model's text into; every chat API formats the same pieces.

    'Let me look.\\n<tool_call>\\n{"name": "ls", "arguments": {"path": "/"}}\\n</tool_call>'
    Text("Let me look."), CallBegins(0, "ls"), CallArguments(0, '{"path": "/'), CallArguments(0, '"}')

The pieces of a text depend on how it was cut; joined, they do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Protocol


@dataclass(slots=True, frozen=True)
class Text:
    """Words for the user."""

    text: str


@dataclass(slots=True, frozen=True)
class Reasoning:
    """Reasoning of the model before its answer."""

    text: str


@dataclass(slots=True, frozen=True)
class CallBegins:
    """A call's name is complete. ``index``: 0 for the first call of an answer. An id is the API's business."""

    index: int
    name: str


@dataclass(slots=True, frozen=True)
class CallArguments:
    """More of the JSON text of a call's arguments. All deltas of a call that the model finished, joined, are one JSON
    object; if it stopped early, its beginning, which may be nothing at all."""

    index: int
    delta: str


Piece = Text | Reasoning | CallBegins | CallArguments


@dataclass(slots=True, frozen=True)
class ToolSpec:
    """A tool that the model may call. ``parameters``: the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    strict: bool = False
    """The model's arguments are held to the schema."""

    @property
    def properties(self) -> Mapping[str, Any]:
        """The schema of each argument by its name, as far as the tool says."""
        properties = self.parameters.get("properties")
        return properties if isinstance(properties, Mapping) else {}


ArgumentsForm = Literal["json", "python", "tags"]
"""How a model writes the arguments of a call: as one JSON object, as those of a Python call, or between tags."""


class ToolParser(Protocol):
    """Finds calls in one answer. Never raises because of what the model wrote, and never loses a word of it."""

    keeps_special_tokens: ClassVar[bool]
    """True if the text must be decoded with special tokens, since the marks of a call are (or may be) some."""

    call_start: ClassVar[str]
    """A call as the model writes it, up to the name of the function."""
    name_end: ClassVar[str]
    """Text between that name and the arguments."""
    call_end: ClassVar[str]
    """Text behind the arguments."""
    next_call: ClassVar[str | None]
    """Text between the end of a call and the name of the next; None if an answer has one call only."""
    calls_end: ClassVar[str]
    """Text behind the last call."""
    arguments_form: ClassVar[ArgumentsForm]
    marks_calls: ClassVar[bool]
    """Nothing but a call begins with the first mark of `call_start`, wherever it stands. False: a call is one by where
    it stands, at the beginning."""

    def __init__(self, tools: Sequence[ToolSpec]) -> None: ...

    def push_text(self, text: str) -> list[Piece]:
        """Take the next text of the answer; return what is certain now."""
        ...

    def finish(self) -> list[Piece]:
        """Take the end of the answer; return what was held back."""
        ...


def forced_prefix(parser: ToolParser, name: str | None) -> str:
    """Text that makes the model call this function (None: any) if its answer begins with it. It belongs to the answer:
    push it first."""
    return parser.call_start if name is None else f"{parser.call_start}{name}{parser.name_end}"


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """The same pieces with neighbours of one kind, or of one call, made one, and empty ones left out."""
    result: list[Piece] = []
    run: list[str] = []

    def close() -> None:
        if len(run) > 1:
            last = result[-1]
            if isinstance(last, CallArguments):
                result[-1] = replace(last, delta="".join(run))
            elif isinstance(last, Text | Reasoning):
                result[-1] = replace(last, text="".join(run))

    for piece in pieces:
        last = result[-1] if result else None
        if isinstance(piece, CallBegins):
            close()
            run = []
            result.append(piece)
            continue
        words = piece.delta if isinstance(piece, CallArguments) else piece.text
        if not words:
            continue
        if type(piece) is type(last):  # Arguments of two calls never meet: a call begins between them.
            run.append(words)
            continue
        close()
        run = [words]
        result.append(piece)
    close()
    return result
