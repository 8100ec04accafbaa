"""Finds where the last few tokens of a text occurred before: per n-gram length, a table from hash to last place.

Lossy on purpose: a later n-gram with the same hash takes the place of an earlier one, so a look-up
compares the tokens. So a token costs a few bytes, whole prompts are indexed by numpy in microseconds, and a wrong
entry costs a comparison.
"""

from __future__ import annotations

import numpy as np

SIZES: tuple[int, ...] = (2, 4, 8)
"""Tokens of the n-grams."""

_LONGEST = SIZES[-1]
_MASK = (1 << 64) - 1
_FACTORS = [pow(0x9E3779B97F4A7C15, power, 1 << 64) | 1 for power in range(1, _LONGEST + 1)]
"""The hash of an n-gram is the sum of its tokens, the last first, each times its factor."""

_FIRST_BITS = 11
"""The smallest table has 2,048 places. There are at least four for each token: then one in ten n-grams is lost."""

_FEW = 12
"""Up to this many new tokens are indexed without numpy."""


class NgramIndex:
    """The n-grams of one text that only grows."""

    __slots__ = ("_bits", "_done", "_tables")

    def __init__(self) -> None:
        self._bits = _FIRST_BITS
        self._done = 0
        """The n-grams that end at or before this place are in the tables."""
        self._tables = _empty(self._bits)
        """int32 [sizes, places]: where the text continued after the n-gram, 0 for none."""

    def update(self, text: np.ndarray) -> None:
        """Index a text, int32 [n], that begins with the one of the last call. Its very last n-grams are left out:
        nothing follows them yet."""
        end = len(text) - 1
        if end > 1 << (self._bits - 2):
            self._bits = end.bit_length() + 2
            self._tables, self._done = _empty(self._bits), 0
        if end - self._done <= _FEW:
            self._add_few(text, end)
        else:
            self._add_many(text, end)
        self._done = max(self._done, end)

    def find_match(self, text: np.ndarray, other: np.ndarray, shortest: int = SIZES[0]) -> tuple[int, int]:
        """(length, place): the longest n-gram at the end of ``text`` that is known, and where what follows it begins in
        ``other``, the text that was indexed. (0, 0) if none of at least ``shortest`` tokens is."""
        tail = text[-_LONGEST:].tolist()
        tail.reverse()
        shift, hashes, total = 64 - self._bits, [], 0
        for size, (token, factor) in enumerate(zip(tail, _FACTORS), 1):
            total += (token + 1) * factor
            if size in SIZES:
                hashes.append((total & _MASK) >> shift)
        for level in range(len(hashes) - 1, -1, -1):
            size = SIZES[level]
            if size < shortest:
                break
            place = int(self._tables[level, hashes[level]])
            if place and other[place - size : place].tolist()[::-1] == tail[:size]:
                return size, place
        return 0, 0

    def _add_few(self, text: np.ndarray, end: int) -> None:
        shift = 64 - self._bits
        for place in range(max(self._done + 1, SIZES[0]), end + 1):
            total, tail = 0, text[max(0, place - _LONGEST) : place].tolist()
            tail.reverse()
            for size, (token, factor) in enumerate(zip(tail, _FACTORS), 1):
                total += (token + 1) * factor
                if size in SIZES:
                    self._tables[SIZES.index(size), (total & _MASK) >> shift] = place

    def _add_many(self, text: np.ndarray, end: int) -> None:
        for level, size in enumerate(SIZES):
            first = max(size, self._done + 1)
            if first > end:
                continue
            total = np.zeros(end + 1 - first, dtype=np.uint64)
            for back, factor in enumerate(_FACTORS[:size], 1):
                part = text[first - back : end + 1 - back].astype(np.uint64)
                total += (part + np.uint64(1)) * np.uint64(factor)
            # Of equal indices the last one stays.
            self._tables[level, (total >> np.uint64(64 - self._bits)).astype(np.int64)] = np.arange(first, end + 1)


def _empty(bits: int) -> np.ndarray:
    return np.zeros((len(SIZES), 1 << bits), dtype=np.int32)
