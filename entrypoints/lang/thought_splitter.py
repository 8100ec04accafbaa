"""Separates a model's thoughts from its answer while it generates."""

from __future__ import annotations

from ..reasoning_parsers.registry import reasoning_parser
from ..tool_parsers.pieces import Piece, Reasoning, Text


class ThoughtSplitter:
    """Splits the samples of one generation. name: of the parser. opening: the prompt's text after the last message,
    where a template may have opened the thought."""

    def __init__(self, name: str, opening: str) -> None:
        self._parser = reasoning_parser(name)
        self._begins_inside = self._parser.begins_inside(opening) or None
        self._first = self._parser(begins_inside=self._begins_inside)
        self._seen = ""
        self.keeps_special_tokens = self._parser.keeps_special_tokens
        """True if the text must be decoded with special tokens."""

    def split_next(self, text: str) -> tuple[str, str]:
        """The first sample's text so far -> its new part as (answer, thought)."""
        pieces = self._first.push_text(text[len(self._seen) :])
        self._seen = text
        return _apart(pieces)

    def split_rest(self) -> tuple[str, str]:
        """The part of the first sample that was held back, as (answer, thought); call it at the end."""
        return _apart(self._first.finish())

    def split_whole(self, text: str) -> tuple[str, str]:
        """Another sample as (answer, thought)."""
        parser = self._parser(begins_inside=self._begins_inside)
        return _apart(parser.push_text(text) + parser.finish())


def _apart(pieces: list[Piece]) -> tuple[str, str]:
    answer = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    return answer, "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
