"""Splits one answer into pieces: a reasoning parser finds the thoughts, then a tool parser the calls in the rest."""

from __future__ import annotations

from typing import ClassVar, Protocol

from ..tool_parsers.pieces import Piece, Text, ToolParser, forced_prefix, joined


class ReasoningParser(Protocol):
    """Splits one answer into Reasoning and Text. Never raises because of what the model wrote."""

    keeps_special_tokens: ClassVar[bool]
    """True if the text must be decoded with special tokens, since the tags are (or may be) some."""
    start: ClassVar[str]
    end: ClassVar[str]
    resumes: ClassVar[str]
    """Text that ends a thought that has begun, up to where the answer begins."""
    answer_start: ClassVar[str]
    """Text that an answer begins with, behind a thought or without one."""
    is_inside: bool
    """True if the answer began inside of a thought."""

    def __init__(self, *, begins_inside: bool | None = None) -> None:
        """begins_inside: whether the prompt has opened a thought (see the method); None for what is usual here."""
        ...

    def push_text(self, text: str) -> list[Piece]:
        """Take the next text of the answer; return what is certain now."""
        ...

    def finish(self) -> list[Piece]:
        """Take the end of the answer; return what was held back."""
        ...

    @classmethod
    def begins_inside(cls, prompt_text: str) -> bool:
        """True if this prompt has opened a thought. Pass only what the template wrote after the last message, or what
        an assistant's message begins with: in a user's words, a tag is none."""
        ...


def opens_thought(prompt_text: str, start: str, end: str) -> bool:
    """True if the last start tag comes after the last end tag."""
    return prompt_text.rfind(start) > prompt_text.rfind(end)


class OutputParser:
    """Puts the two parsers one behind the other; either may be missing. Both see the answer once.

    <think>Shall I?</think>\\n\\nYes.\\n<tool_call>…    ->    Reasoning, Text, CallBegins, CallArguments
    """

    def __init__(self, reasoning: ReasoningParser | None = None, tools: ToolParser | None = None) -> None:
        self._reasoning, self._tools = reasoning, tools
        self.keeps_special_tokens = any(parser.keeps_special_tokens for parser in (reasoning, tools) if parser)
        """True if the text must be decoded with special tokens."""

    def push_text(self, text: str) -> list[Piece]:
        """Take the next text of the answer; return what is certain now."""
        return joined(self._find_calls(self._reasoning.push_text(text) if self._reasoning else [Text(text)]))

    def finish(self) -> list[Piece]:
        """Take the end of the answer; return what was held back."""
        rest = self._find_calls(self._reasoning.finish() if self._reasoning else [])
        return joined(rest + (self._tools.finish() if self._tools else []))

    def forced_prefix(self, name: str | None) -> str:
        """Text that makes the model call this function (None: any) if its answer begins with it; it ends a thought that
        the prompt has opened. Raises ValueError without a tool parser."""
        if self._tools is None:
            raise ValueError("a call cannot be forced without a tool parser; set --tool-call-parser")
        before = self._reasoning.resumes if self._reasoning and self._reasoning.is_inside else ""
        return before + forced_prefix(self._tools, name)

    def _find_calls(self, pieces: list[Piece]) -> list[Piece]:
        if self._tools is None:
            return pieces
        found: list[Piece] = []
        for piece in pieces:
            found.extend(self._tools.push_text(piece.text) if isinstance(piece, Text) else [piece])
        return found
