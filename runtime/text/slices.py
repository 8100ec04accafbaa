"""Tokenises a long text piece by piece, with the ids of the whole: little memory, and others get their turn in between.

The library takes some 150 bytes per byte of a text while it works on it. A text is cut where a word of the
pre-tokenizer ends, far enough from the end of the piece: from there on the rest is tokenised as if nothing stood before
it. Whether that holds for a tokenizer is checked at every cut: the next piece must begin with the tokens that the one
before it saw behind the cut.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

SLICE_CHARS = 65_536


class Encoding(Protocol):
    """What is used of the library's class: a token's id, its word (None for none), and its place in characters."""

    @property
    def ids(self) -> list[int]: ...

    @property
    def word_ids(self) -> list[int | None]: ...

    @property
    def offsets(self) -> list[tuple[int, int]]: ...


class TooManyTokens(Exception):
    """More than was allowed, and there is more text."""


class CannotBeCut(Exception):
    """The tokens of this text depend on what stands far before them, or its words are longer than a piece."""


def encode_slices(text: str, max_tokens: int, slice_chars: int = SLICE_CHARS) -> Generator[str, Encoding, list[int]]:
    """Yields pieces to be encoded, takes their encodings, returns the ids of ``text``, without special tokens.

    Raises TooManyTokens as soon as there are more than ``max_tokens``, and CannotBeCut.
    """
    ids: list[int] = []
    start = 0
    expected: list[int] = []
    while True:
        piece = text[start : start + slice_chars]
        encoding = yield piece
        found = encoding.ids
        if found[: len(expected)] != expected:
            raise CannotBeCut
        if start + len(piece) == len(text):
            return ids + found
        num_tokens, num_chars = _cut(encoding, len(piece))
        ids += found[:num_tokens]
        start += num_chars
        if len(ids) > max_tokens:
            raise TooManyTokens
        expected = found[num_tokens : _reliable(encoding, len(piece))]
        if not expected:
            raise CannotBeCut


def _reliable(encoding: Encoding, num_chars: int) -> int:
    """How many tokens stand before the last eighth of the piece, where special tokens and words may be halves."""
    places = encoding.offsets
    return next((i + 1 for i in range(len(places) - 1, -1, -1) if places[i][1] <= num_chars * 7 // 8), 0)


def _cut(encoding: Encoding, num_chars: int) -> tuple[int, int]:
    """The last place in the middle half of the piece where a word ends: tokens and characters before it."""
    words, places = encoding.word_ids, encoding.offsets
    for i in range(len(words) - 1, 0, -1):
        here, before = places[i], places[i - 1]
        is_new_word = words[i] != words[i - 1] and words[i] is not None
        if is_new_word and here[0] == before[1] and num_chars // 4 <= here[0] <= num_chars * 3 // 4:
            return i, here[0]
    raise CannotBeCut
