"""The interface of reasoning parsers."""

from __future__ import annotations

from typing import ClassVar, Protocol

from ..tool_parsers.pieces import Piece


class ReasoningParser(Protocol):
    """Splits one answer into Reasoning and Text. Never raises because of what the model wrote."""

    keeps_special_tokens: ClassVar[bool]
    """True if the text must be decoded with special tokens, since the tags are (or may be) some."""
    start: ClassVar[str]
    end: ClassVar[str]
    resumes: ClassVar[str]
    """Text that ends a thought that has begun, up to where the answer begins."""
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
