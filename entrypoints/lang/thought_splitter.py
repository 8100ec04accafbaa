"""Separates a model's thoughts from its answer while it generates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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

    def after_thoughts(self, sampling: dict[str, Any]) -> dict[str, Any]:
        """The sampling_params with their form moved behind the thought, to the answer."""
        fields = [name for name in _FORMATS if sampling.get(name) is not None]
        if not fields:
            return sampling
        (field,) = fields
        form, parser, is_inside = _FORMATS[field](sampling[field]), self._parser, self._first.is_inside
        after = parser.resumes.partition(parser.end)[2].strip("\n")
        thought = {"begin": "" if is_inside else parser.start, "content": {"type": "any_text"}}
        parts = [{"type": "tag", **thought, "end": parser.end}]
        parts += [{"type": "const_string", "value": after}] if after else []
        parts += [{"type": "regex", "pattern": "\\n{0,2}"}, form]
        format = {"type": "sequence", "elements": parts}
        if not is_inside:  # a model may answer without a thought
            start = [{"type": "const_string", "value": parser.answer_start}] if parser.answer_start else []
            format = {"type": "or", "elements": [format, {"type": "sequence", "elements": [*start, form]}]}
        others = {name: value for name, value in sampling.items() if name != field}
        return {**others, "structural_tag": {"format": format}}

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


_FORMATS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "json_schema": lambda schema: {"type": "json_schema", "json_schema": schema},
    "regex": lambda pattern: {"type": "regex", "pattern": pattern},
    "ebnf": lambda grammar: {"type": "grammar", "grammar": grammar},
    "choice": lambda texts: {"type": "or", "elements": [{"type": "const_string", "value": text} for text in texts]},
}
"""Field of a form -> the same in a structural tag."""


def _apart(pieces: list[Piece]) -> tuple[str, str]:
    answer = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    return answer, "".join(piece.text for piece in pieces if isinstance(piece, Reasoning))
