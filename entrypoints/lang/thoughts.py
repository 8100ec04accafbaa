"""Takes a model's thoughts out of what it generates, as it comes."""

from __future__ import annotations

from ..reasoning_parsers.registry import reasoning_parser
from ..tool_parsers.pieces import Piece, Reasoning, Text


class ThoughtSplitter:
    """Splits the samples of one generation. ``name``: of the parser. opening: what stands in the prompt since the last
    message ended, where a template may have opened the thought."""

    def __init__(self, name: str, opening: str) -> None:
        self._parser = reasoning_parser(name)
        self._begins_inside = self._parser.begins_inside(opening) or None
        self._first = self._parser(begins_inside=self._begins_inside)
        self._seen = ""
        self.keeps_special_tokens = self._parser.keeps_special_tokens
        """Whether the text must be decoded with special tokens."""

    def push(self, text: str) -> tuple[str, str]:
        """The first sample's text so far -> what is new: (answer, thought)."""
        pieces = self._first.push(text[len(self._seen) :])
        self._seen = text
        return _apart(pieces)

    def finish(self) -> tuple[str, str]:
        """The end of the first sample -> what was held back."""
        return _apart(self._first.finish())

    def split(self, text: str) -> tuple[str, str]:
        """Another sample, as a whole."""
        parser = self._parser(begins_inside=self._begins_inside)
        return _apart(parser.push(text) + parser.finish())


def _apart(pieces: list[Piece]) -> tuple[str, str]:
    answer = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    return answer, "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
