"""Keeps token sequences (``bad_words``) out of outputs: bans the last token of a sequence after its other tokens.

    one token         always banned: a logit_bias of minus infinity, part of the sampler's plan
    two, (p, t)       t is banned after p: (row, p, t) stay on the device while the same sequences sample together
    more, (…q, p, t)  t is banned after …q, p: the host compares …q, which it always knows, and sends (row, p, t)

Token p may still be in flight (PendingTokens), so the device compares it, for all rows alike. Only output counts, as in
vLLM: a sequence that begins in the prompt may end in the output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from ..runner.device_copy import upload
from .penalties import PendingTokens

NO_TOKEN = -1
"""Stands for the token before the first one; no sequence has it."""


class BannedTokens:
    """Banned token sequences of one request, and the tail of its output."""

    __slots__ = ("_lengths", "_longer", "_tail", "pairs", "singles")

    def __init__(self, banned: Iterable[Sequence[int]]) -> None:
        """banned: token sequences, none of them empty."""
        sequences = [tuple(sequence) for sequence in banned]
        self.singles = sorted({s[0] for s in sequences if len(s) == 1})
        self.pairs = sorted({(s[0], s[1]) for s in sequences if len(s) == 2})
        self._longer: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        """…q -> the (p, t) that follow it in some sequence."""
        for sequence in sequences:
            if len(sequence) > 2:
                self._longer.setdefault(sequence[:-2], []).append((sequence[-2], sequence[-1]))
        self._lengths = sorted({len(start) for start in self._longer})
        self._tail: deque[int] = deque(maxlen=max(self._lengths, default=0) + 1)

    @property
    def looks_back(self) -> bool:
        """True if the bans depend on the output so far."""
        return bool(self.pairs or self._longer)

    def append(self, token_id: int) -> None:
        """Add the next output token."""
        self._tail.append(token_id)

    @property
    def last(self) -> int:
        return self._tail[-1] if self._tail else NO_TOKEN

    def reached_pairs(self, is_late: bool) -> list[tuple[int, int]]:
        """The (p, t) of the sequences of three and more tokens that the output has reached up to its newest token.
        is_late: that token is in flight, so the tail does not have it yet."""
        if not self._lengths:
            return []
        before = tuple(self._tail) if is_late else tuple(self._tail)[:-1]
        return [
            pair
            for length in self._lengths
            if length <= len(before)
            for pair in self._longer.get(before[len(before) - length :], ())
        ]


class _Pairs(NamedTuple):
    """Tokens that are banned after another one; device int64 [m] each."""

    rows: torch.Tensor
    """Index in `BanPlan.rows`."""
    before: torch.Tensor
    tokens: torch.Tensor


@dataclass(slots=True)
class BanPlan:
    """The rows of a batch with bans that depend on the output so far."""

    rows: np.ndarray
    """int64 [n]: their rows of the logits."""
    banned: list[BannedTokens]
    """The banned sequences of each."""
    pairs: _Pairs
    """Bans of sequences of two tokens."""

    @classmethod
    def of(cls, banned: Sequence[BannedTokens | None], device: torch.device) -> BanPlan | None:
        """The plan for the rows of a batch; None if no row needs one."""
        rows = [i for i, each in enumerate(banned) if each is not None and each.looks_back]
        if not rows:
            return None
        kept = [each for i in rows if (each := banned[i]) is not None]
        pairs = _columns([(i, before, token) for i, each in enumerate(kept) for before, token in each.pairs])
        return cls(np.array(rows, dtype=np.int64), kept, _Pairs(*upload(pairs, device)))


def ban_tokens(logits: torch.Tensor, plan: BanPlan, pending: PendingTokens | None = None) -> None:
    """Set the logits of banned tokens to -inf, in place. logits: float32 [rows of the batch, vocab]."""
    last_ids = np.zeros(len(plan.rows), dtype=np.int64) if pending is None else pending.last_ids[plan.rows]
    is_late = last_ids < 0
    late = np.flatnonzero(is_late)
    reached = [
        (i, before, token)
        for i, (each, flag) in enumerate(zip(plan.banned, is_late.tolist()))
        for before, token in each.reached_pairs(flag)
    ]
    reached_rows, reached_before, reached_tokens = _columns(reached)
    known = np.array([each.last for each in plan.banned], dtype=np.int64)
    places = -last_ids[late].astype(np.int64) - 1
    row_of, last, late_places, late_rows, more_rows, more_before, more_tokens = upload(
        [plan.rows, known, places, late, reached_rows, reached_before, reached_tokens], logits.device
    )
    if pending is not None and len(late):
        last = last.index_copy(0, late_rows, pending.ids[late_places])
    owner = torch.cat([plan.pairs.rows, more_rows])
    before = torch.cat([plan.pairs.before, more_before])
    token = torch.cat([plan.pairs.tokens, more_tokens])
    # Added, not written: the same token may be banned by one sequence and allowed by another.
    bans = logits.new_zeros(len(owner)).masked_fill_(last[owner] == before, -float("inf"))
    logits.index_put_((row_of[owner], token), bans, accumulate=True)


def _columns(triples: list[tuple[int, int, int]]) -> list[np.ndarray]:
    """Three arrays, int64 [n] each."""
    return list(np.array(triples, dtype=np.int64).reshape(-1, 3).T)
