"""The interface of constraints on outputs: item tries and lists of ids today, grammars later.

Constraint        which outputs a request may have; immutable, shared by all requests that name it
ConstraintState   the positions of some sequences in it; immutable too, so that a fork costs a reference
AllowedTokens     which tokens may come next, as packed bits: the form in which a step tells the sampler
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

BITS = 32
"""Tokens per word."""


@dataclass(slots=True, frozen=True)
class AllowedTokens:
    """The tokens that may follow each of some sequences; only words with a bit set are listed, in ascending order.

    A few hundred of 150,000 tokens then take a few hundred bytes, and all of them at most three times a plain mask.
    Bit i of a word ``w`` stands for token ``32 * w + i``, as in XGrammar's masks.
    """

    rows: np.ndarray
    """int32 [m]: the sequence of each word. A sequence without a word may have no token at all."""
    words: np.ndarray
    """int32 [m]"""
    bits: np.ndarray
    """uint32 [m]"""

    @classmethod
    def pack(cls, rows: np.ndarray, tokens: np.ndarray) -> AllowedTokens:
        """From pairs of sequence and token, int32 [n] each, in ascending order and each once."""
        if not len(rows):
            nothing = np.empty(0, dtype=np.int32)
            return cls(nothing, nothing, np.empty(0, dtype=np.uint32))
        words = tokens >> 5
        starts = np.flatnonzero((np.diff(rows) != 0) | (np.diff(words) != 0)) + 1
        starts = np.concatenate([[0], starts])
        bits = np.bitwise_or.reduceat(np.left_shift(np.uint32(1), (tokens & (BITS - 1)).astype(np.uint32)), starts)
        return cls(rows[starts], words[starts], bits)

    def unpack(self) -> tuple[np.ndarray, np.ndarray]:
        """The pairs again: sequences and tokens, int32 [n] each, in ascending order."""
        each = self.bits.astype("<u4", copy=False).view(np.uint8)
        found = np.flatnonzero(np.unpackbits(each, bitorder="little")).astype(np.int32)
        at = found >> 5
        return self.rows[at], (self.words[at] << 5) + (found & (BITS - 1))

    def holds(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """bool [n]: which of these pairs of sequence and token, int [n] each, are allowed. Any token id is accepted,
        including one outside every vocabulary."""
        wanted, words = rows.astype(np.int64), tokens.astype(np.int64) >> 5
        in_reach = (words >= 0) & (words < 2**31)
        wanted = wanted << 32 | np.where(in_reach, words, 0)
        listed = self.rows.astype(np.int64) << 32 | self.words
        if not len(listed):
            return np.zeros(len(rows), dtype=bool)
        place = np.minimum(np.searchsorted(listed, wanted), len(listed) - 1)
        bit = self.bits[place] >> (tokens & (BITS - 1)).astype(np.uint32) & np.uint32(1)
        return in_reach & (listed[place] == wanted) & (bit == 1)

    @classmethod
    def join(cls, parts: Sequence[tuple[int, AllowedTokens]]) -> AllowedTokens | None:
        """Join several into one; each comes with the number of its first row. None if there are none."""
        if not parts:
            return None
        return cls(
            np.concatenate([first + part.rows for first, part in parts]).astype(np.int32),
            np.concatenate([part.words for _, part in parts]),
            np.concatenate([part.bits for _, part in parts]),
        )


class ConstraintState(Protocol):
    """The positions of n sequences in a constraint."""

    def __len__(self) -> int: ...

    def allowed(self) -> AllowedTokens:
        """The tokens that may follow each sequence."""
        ...

    def num_allowed(self) -> np.ndarray:
        """int [n]: how many tokens may follow each sequence."""
        ...

    def select(self, sequences: np.ndarray) -> ConstraintState:
        """int [k]: the state of these sequences; one may come several times (a fork)."""
        ...

    def advance(self, tokens: np.ndarray) -> ConstraintState:
        """int [n]: the state after one more token in each sequence, which must be an allowed one."""
        ...

    def at_end(self) -> np.ndarray:
        """bool [n]: the sequence is a whole output, and nothing may follow."""
        ...


class Constraint(Protocol):
    """Which outputs a request may have."""

    name: str
    """For messages, e.g. "the item trie 'catalogue'"."""
    output_name: str
    """One whole output, for messages, e.g. "item of 'catalogue'"."""
    matched: str
    """`FinishReason.matched` where the constraint ended an output."""
    eos_ends: bool
    """An eos token ends an output. False: eos is a token like any other."""
    must_complete: bool
    """An output that is cut off by its length does not count: a beam search drops it."""
    is_uniform: bool
    """All outputs are of one length."""
    min_tokens: int
    max_tokens: int | None
    """None for no limit."""

    def start(self) -> ConstraintState:
        """One sequence before its first token."""
        ...
