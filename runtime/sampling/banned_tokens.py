"""Keeps token sequences (``bad_words``) out of outputs: the last token of one is banned where the others stand before
it.

    one token         always banned: a logit_bias of minus infinity, part of the sampler's plan
    two, (p, t)       t is banned after p: (row, p, t) lie on the device while the same sequences sample together
    more, (…q, p, t)  t is banned after …q, p: the host compares …q, which it always knows, and sends (row, p, t)

The token just before may still be in flight (PendingTokens), so p is compared on the device, for all rows alike. Only
output counts, as in vLLM: a sequence that begins in the prompt may end in the output.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..runner.device_copy import upload
from .penalties import PendingTokens

NO_TOKEN = -1
"""In the place of a token where there is none; no sequence has it."""


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
        """True if what is banned depends on what was said."""
        return bool(self.pairs or self._longer)

    def append(self, token_id: int) -> None:
        """One more output token."""
        self._tail.append(token_id)

    @property
    def last(self) -> int:
        return self._tail[-1] if self._tail else NO_TOKEN

    def reached(self, is_late: bool) -> list[tuple[int, int]]:
        """The (p, t) of sequences of three and more tokens with a start that directly precedes the newest output token.
        is_late: that token is in flight, so the tail does not hold it yet."""
        if not self._lengths:
            return []
        before = tuple(self._tail) if is_late else tuple(self._tail)[:-1]
        return [
            pair
            for length in self._lengths
            if length <= len(before)
            for pair in self._longer.get(before[len(before) - length :], ())
        ]


@dataclass(slots=True)
class BanPlan:
    """The rows of a batch with bans that depend on the output so far."""

    rows: np.ndarray
    """int64 [n]: of the logits."""
    banned: list[BannedTokens]
    """One for each."""
    pairs: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    """On the device, int64 [m] each: index in ``rows``, p, t."""

    @classmethod
    def of(cls, banned: Sequence[BannedTokens | None], device: torch.device) -> BanPlan | None:
        """For the rows of a batch; None if no row needs it."""
        rows = [i for i, each in enumerate(banned) if each is not None and each.looks_back]
        if not rows:
            return None
        kept = [each for i in rows if (each := banned[i]) is not None]
        pairs = _columns([(i, *pair) for i, each in enumerate(kept) for pair in each.pairs])
        owner, before, token = upload(list(pairs), device)
        return cls(np.array(rows, dtype=np.int64), kept, (owner, before, token))


def ban_tokens(logits: torch.Tensor, plan: BanPlan, pending: PendingTokens | None = None) -> None:
    """Set what may not come next to -inf, in place. logits: float32 [rows of the batch, vocab]."""
    last_ids = np.zeros(len(plan.rows), dtype=np.int64) if pending is None else pending.last_ids[plan.rows]
    is_late = last_ids < 0
    late = np.flatnonzero(is_late)
    found = [
        (i, *pair) for i, (each, flag) in enumerate(zip(plan.banned, is_late.tolist())) for pair in each.reached(flag)
    ]
    known = np.array([each.last for each in plan.banned], dtype=np.int64)
    row_of, last, places, late_rows, *more = upload(
        [plan.rows, known, -last_ids[late].astype(np.int64) - 1, late, *_columns(found)], logits.device
    )
    if pending is not None and len(late):
        last = last.index_copy(0, late_rows, pending.ids[places])
    owner, before, token = (torch.cat(both) for both in zip(plan.pairs, more))
    # Added, not written: the same token may be banned by one sequence and let through by another.
    bans = logits.new_zeros(len(owner)).masked_fill_(last[owner] == before, -float("inf"))
    logits.index_put_((row_of[owner], token), bans, accumulate=True)


def _columns(rows: list[tuple[int, ...]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """int64 [n] each."""
    first, second, third = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    return first, second, third
