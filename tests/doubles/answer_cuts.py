"""Pushes an answer through a parser, cut in many ways, and compares what comes out."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterable
from typing import Protocol

from baton.entrypoints.tool_parsers.pieces import CallArguments, CallBegins, Piece, Text, ToolSpec, joined

TOOLS = [
    ToolSpec(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "units": {"type": ["string", "null"]},
                "wanted": {"type": "array", "items": {"type": "string"}},
            },
        },
    ),
    ToolSpec("list_files", {"type": "object", "properties": {}}),
    ToolSpec("write_file", {"type": "object", "properties": {"path": {"type": "string"}, "content": {}}}),
]
SEED = 20240611


class Parser(Protocol):
    def push_text(self, text: str) -> list[Piece]: ...
    def finish(self) -> list[Piece]: ...


Expected = list[Piece | str | tuple[str, str]]
"""Words as a string, a call as (name, JSON text of its arguments), other pieces as they are."""


def parse(parser: Parser, parts: Iterable[str]) -> list[Piece]:
    """The joined pieces of an answer that comes in these parts."""
    pieces: list[Piece] = []
    for part in parts:
        pieces += parser.push_text(part)
    return joined(pieces + parser.finish())


def pieces_of(expected: Expected) -> list[Piece]:
    pieces: list[Piece] = []
    index = 0
    for item in expected:
        if isinstance(item, str):
            pieces.append(Text(item))
        elif isinstance(item, tuple):
            pieces += [CallBegins(index, item[0]), CallArguments(index, item[1])]
            index += 1
        else:
            pieces.append(item)
    return joined(pieces)


def check(make: Callable[[], Parser], text: str, expected: Expected) -> None:
    """Whole, by single characters, in two parts at every place, and cut at random places, always the same pieces."""
    wanted = pieces_of(expected)
    assert parse(make(), [text]) == wanted
    assert parse(make(), text) == wanted
    for place in range(len(text) + 1):
        assert parse(make(), [text[:place], text[place:]]) == wanted, text[:place]
    random_source = random.Random(SEED)
    for _ in range(20):
        places = sorted(random_source.choices(range(len(text) + 1), k=random_source.randint(2, 9)))
        parts = [text[start:end] for start, end in zip([0, *places], [*places, len(text)])]
        assert parse(make(), parts) == wanted, parts


def check_every_beginning(make: Callable[[], Parser], text: str) -> None:
    """The answer may end anywhere: the pieces of a beginning, however it is cut, begin like those of the whole answer
    as far as calls go, and finishing does not raise."""
    for end in range(len(text)):
        pieces = parse(make(), [text[:end]])
        assert pieces == parse(make(), text[:end])
        whole = parse(make(), [text])
        begun = [piece for piece in pieces if isinstance(piece, CallBegins)]
        assert begun == [piece for piece in whole if isinstance(piece, CallBegins)][: len(begun)], text[:end]


def arguments_of(pieces: Iterable[Piece]) -> list[object]:
    """The parsed arguments of each call."""
    texts: dict[int, str] = {}
    for piece in pieces:
        if isinstance(piece, CallBegins):
            texts[piece.index] = ""
        elif isinstance(piece, CallArguments):
            texts[piece.index] += piece.delta
    return [json.loads(text, strict=False) for text in texts.values()]
