"""The interface of constraints on outputs: item tries, lists of ids, grammars.

Constraint        which outputs a request may have; immutable, shared by all requests that name it
ConstraintState   the positions of some sequences in it; immutable too, so that a fork costs a reference
AllowedTokens     which tokens may come next, as packed bits: the form in which a step tells the sampler
TokenMasks        the same for sequences that may have most of the vocabulary: a bit for every token
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..outcome import RequestRefused

BITS = 32
"""Tokens per word."""

ITEM, GRAMMAR = "item", "grammar"
"""`FinishReason.matched` of an output that ended because it is a whole item, or because its grammar allows nothing
more. No text is cut off for either."""

ENDS = (ITEM, GRAMMAR)

MAX_FORCED = 64
"""Most tokens that `ConstraintState.forced` tells."""


_POPCOUNT = np.array([bin(byte).count("1") for byte in range(256)], dtype=np.int32)


@dataclass(slots=True, frozen=True)
class TokenMasks:
    """Whole masks of some sequences; those in the same state share one. Bit i of word ``w`` stands for token
    ``32 * w + i``, as in llguidance's masks and XGrammar's."""

    rows: np.ndarray
    """int32 [k], ascending: the sequences."""
    mask_of: np.ndarray
    """int32 [k]: the mask of each."""
    masks: np.ndarray
    """uint32 [m, words]"""

    @classmethod
    def stack(cls, rows: np.ndarray, masks: Sequence[np.ndarray]) -> TokenMasks:
        """From one mask for each sequence, uint32 [words]; the same array may come several times."""
        distinct = {id(mask): mask for mask in masks}
        places = {key: place for place, key in enumerate(distinct)}
        mask_of = np.array([places[id(mask)] for mask in masks], dtype=np.int32)
        return cls(rows.astype(np.int32), mask_of, np.concatenate(list(distinct.values())).reshape(len(distinct), -1))

    def count(self) -> np.ndarray:
        """int32 [k]: how many tokens each sequence may have."""
        return _POPCOUNT[self.masks.view(np.uint8)].sum(axis=1, dtype=np.int32)[self.mask_of]

    def unpack(self) -> tuple[np.ndarray, np.ndarray]:
        """Pairs of sequence and token, int32 [n] each, in ascending order."""
        bits = np.unpackbits(self.masks.astype("<u4", copy=False).view(np.uint8), axis=1, bitorder="little")
        place, tokens = np.nonzero(bits[self.mask_of])
        return self.rows[place], tokens.astype(np.int32)

    def holds(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """bool [n]: as `AllowedTokens.holds`."""
        place = np.minimum(np.searchsorted(self.rows, rows), len(self.rows) - 1)
        tokens = tokens.astype(np.int64)
        known = (self.rows[place] == rows) & (tokens >= 0) & (tokens < self.masks.shape[1] * BITS)
        tokens = np.where(known, tokens, 0)
        bits = self.masks[self.mask_of[place], tokens >> 5] >> (tokens & (BITS - 1)).astype(np.uint32)
        return known & ((bits & np.uint32(1)) == 1)

    @classmethod
    def merge(cls, parts: Sequence[TokenMasks]) -> TokenMasks | None:
        """As `AllowedTokens.merge`. Parts with the same array of masks go on sharing it."""
        if not parts:
            return None
        distinct = {id(part.masks): part.masks for part in parts}
        counts = [len(masks) for masks in distinct.values()]
        first_of = dict(zip(distinct, np.cumsum([0, *counts[:-1]]).tolist()))
        masks = next(iter(distinct.values())) if len(distinct) == 1 else np.concatenate(list(distinct.values()))
        rows = np.concatenate([part.rows for part in parts])
        mask_of = np.concatenate([first_of[id(part.masks)] + part.mask_of for part in parts]).astype(np.int32)
        order = _ascending(rows)
        return cls(rows, mask_of, masks) if order is None else cls(rows[order], mask_of[order], masks)


@dataclass(slots=True, frozen=True)
class AllowedTokens:
    """The tokens that may follow each of some sequences; only words with a bit set are listed, in ascending order.

    A few hundred of 150,000 tokens then take a few hundred bytes. Sequences that may have most of the vocabulary are in
    ``dense`` instead. Bit i of a word ``w`` stands for token ``32 * w + i``.
    """

    rows: np.ndarray
    """int32 [m]: the sequence of each word. A sequence without a word, and not in ``dense``, may have no token at all.
    """
    words: np.ndarray
    """int32 [m]"""
    bits: np.ndarray
    """uint32 [m]"""
    dense: TokenMasks | None = None

    @classmethod
    def pack(cls, rows: np.ndarray, tokens: np.ndarray) -> AllowedTokens:
        """From pairs of sequence and token, int32 [n] each, in ascending order and each once."""
        if not len(rows):
            return cls(_NO_WORDS, _NO_WORDS, _NO_BITS)
        words = tokens >> 5
        starts = np.flatnonzero((np.diff(rows) != 0) | (np.diff(words) != 0)) + 1
        starts = np.concatenate([[0], starts])
        bits = np.bitwise_or.reduceat(np.left_shift(np.uint32(1), (tokens & (BITS - 1)).astype(np.uint32)), starts)
        return cls(rows[starts], words[starts], bits)

    @classmethod
    def of_masks(cls, masks: TokenMasks) -> AllowedTokens:
        return cls(_NO_WORDS, _NO_WORDS, _NO_BITS, masks)

    def named_rows(self) -> np.ndarray:
        """int32 [k], ascending: the sequences that have a token."""
        if self.dense is not None and not len(self.rows):
            return self.dense.rows
        rows = self.rows[np.flatnonzero(np.diff(self.rows, prepend=-1))]
        return rows if self.dense is None else np.union1d(rows, self.dense.rows)

    def count(self) -> int:
        """How many pairs of sequence and token there are."""
        listed = int(_POPCOUNT[self.bits.view(np.uint8)].sum())
        return listed if self.dense is None else listed + int(self.dense.count().sum())

    def unpack(self) -> tuple[np.ndarray, np.ndarray]:
        """All pairs: sequences and tokens, int32 [n] each, in ascending order."""
        if self.dense is None:
            return self.unpack_words()
        listed, whole = self.unpack_words(), self.dense.unpack()
        rows, tokens = (np.concatenate(pair) for pair in zip(listed, whole))
        order = np.argsort(rows, kind="stable")
        return rows[order], tokens[order]

    def tokens_of(self, row: int) -> np.ndarray:
        """int32 [n]: the tokens that one sequence may have."""
        if self.dense is not None and row in self.dense.rows:
            place = self.dense.mask_of[np.searchsorted(self.dense.rows, row)]
            bits = np.unpackbits(self.dense.masks[place].view(np.uint8), bitorder="little")
            return np.flatnonzero(bits).astype(np.int32)
        rows, tokens = self.unpack_words()
        return tokens[rows == row]

    def unpack_words(self) -> tuple[np.ndarray, np.ndarray]:
        """The pairs outside ``dense``."""
        each = self.bits.astype("<u4", copy=False).view(np.uint8)
        found = np.flatnonzero(np.unpackbits(each, bitorder="little")).astype(np.int32)
        at = found >> 5
        return self.rows[at], (self.words[at] << 5) + (found & (BITS - 1))

    def holds(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """bool [n]: which of these pairs of sequence and token, int [n] each, are allowed. Any token id is accepted,
        including one outside every vocabulary."""
        listed = self._lists(rows, tokens)
        return listed if self.dense is None else listed | self.dense.holds(rows, tokens)

    def _lists(self, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        if not len(self.rows):
            return np.zeros(len(rows), dtype=bool)
        wanted, words = rows.astype(np.int64), tokens.astype(np.int64) >> 5
        in_reach = (words >= 0) & (words < 2**31)
        wanted = wanted << 32 | np.where(in_reach, words, 0)
        listed = self.rows.astype(np.int64) << 32 | self.words
        place = np.minimum(np.searchsorted(listed, wanted), len(listed) - 1)
        bit = self.bits[place] >> (tokens & (BITS - 1)).astype(np.uint32) & np.uint32(1)
        return in_reach & (listed[place] == wanted) & (bit == 1)

    @classmethod
    def merge(cls, parts: Sequence[AllowedTokens]) -> AllowedTokens | None:
        """Make one of several, each about other rows. None if there are none."""
        if len(parts) < 2:
            return parts[0] if parts else None
        dense = TokenMasks.merge([part.dense for part in parts if part.dense is not None])
        listed = [part for part in parts if len(part.rows)] or parts[:1]
        rows, words, bits = (
            np.concatenate(each) for each in zip(*((part.rows, part.words, part.bits) for part in listed))
        )
        order = _ascending(rows)
        return cls(rows, words, bits, dense) if order is None else cls(rows[order], words[order], bits[order], dense)

    @classmethod
    def join(cls, parts: Sequence[tuple[int, AllowedTokens]]) -> AllowedTokens | None:
        """The same for parts that count their rows from 0; each comes with the number of its first row."""
        return cls.merge([part.shift(first) for first, part in parts])

    def shift(self, first: int) -> AllowedTokens:
        """The same with rows that are counted from ``first``."""
        return self.renumber(lambda rows: rows + np.int32(first)) if first else self

    def renumber(self, rows_of: Callable[[np.ndarray], np.ndarray]) -> AllowedTokens:
        """The same for sequences with other numbers. rows_of: int32 [k] -> int32 [k], keeps their order."""
        dense = self.dense
        if dense is not None:
            dense = TokenMasks(rows_of(dense.rows), dense.mask_of, dense.masks)
        return AllowedTokens(rows_of(self.rows), self.words, self.bits, dense)


def _ascending(rows: np.ndarray) -> np.ndarray | None:
    """int [n]: the order in which rows, int32 [n], ascend; equal ones stay as they are. None if they ascend already."""
    return None if (rows[1:] >= rows[:-1]).all() else np.argsort(rows, kind="stable")


_NO_WORDS, _NO_BITS = np.empty(0, dtype=np.int32), np.empty(0, dtype=np.uint32)


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

    def forced(self) -> np.ndarray:
        """int32 [k], at most `MAX_FORCED`: the tokens that follow a state of one sequence, as far as the constraint
        leaves no other output. It may still leave another division of the same text into tokens."""
        ...

    def count_allowed(self, draft: np.ndarray) -> int:
        """How many leading tokens of ``draft``, int32 [k], may follow a state of one sequence."""
        ...

    @classmethod
    def allowed_next(cls, states: Sequence[Any]) -> AllowedTokens:
        """What may follow states of this class, of one sequence each and of any constraints; row i is that of state i.
        Raises RequestRefused if a state failed."""
        ...

    @classmethod
    def allowed_along(cls, states: Sequence[Any], drafts: Sequence[np.ndarray]) -> list[AllowedTokens | RequestRefused]:
        """What may follow states of this class, of one sequence each and of any constraints, and follow each token of
        their drafts, int32 [k]: row j is the state behind j tokens. Rows behind a token that may not follow have no
        tokens. An error stands for a state that failed; the others have their tokens."""
        ...


def join_allowed(states: Sequence[ConstraintState]) -> AllowedTokens:
    """`ConstraintState.allowed_next`, state by state."""
    joined = AllowedTokens.join([(row, state.allowed()) for row, state in enumerate(states)])
    assert joined is not None
    return joined


def walk_draft(state: ConstraintState, draft: np.ndarray) -> AllowedTokens:
    """`ConstraintState.allowed_along` for one state, token by token."""
    parts = [(0, state.allowed())]
    for place, token in enumerate(draft.reshape(-1, 1), 1):
        if state.at_end()[0] or not parts[-1][1].holds(np.zeros(1, dtype=np.int32), token)[0]:
            break
        state = state.advance(token)
        parts.append((place, state.allowed()))
    joined = AllowedTokens.join(parts)
    assert joined is not None
    return joined


class Constraint(Protocol):
    """Which outputs a request may have. Before it is ready only ``start`` may be called, and nothing of that state but
    its length."""

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
    max_tokens: int | None
    """None for no limit."""

    @property
    def min_tokens(self) -> int:
        """Every output has so many at least, as far as it is known; 0 while the constraint is being made."""
        ...

    @property
    def is_ready(self) -> bool:
        """False while it is being made elsewhere, as a grammar is compiled."""
        ...

    def failure(self) -> RequestRefused | None:
        """Why it could not be made; None if it was. Call it once it is ready."""
        ...

    def start(self) -> ConstraintState:
        """One sequence before its first token."""
        ...
