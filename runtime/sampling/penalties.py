"""Repetition, frequency and presence penalties, on the tokens a request has seen.

Definitions (CTRL, Keskar et al. 2019, for repetition; OpenAI's API for the others), in this order:

    repetition r   tokens of prompt and output:  logit / r where positive, logit * r elsewhere
    frequency f    output tokens:                logit - f * count
    presence p     output tokens:                logit - p

A logit that this would make infinite is clamped (LARGEST), so that nothing that follows becomes NaN.

A sequence has seen few of the vocabulary's tokens, so only those are touched: per request a list of distinct ids with
their counts in the output, kept up to date token by token. There is no [rows, vocabulary] tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...scheduler.sampling_params import SamplingParams
from ..runner.device_copy import upload

LARGEST = 1e30
"""Bound of a penalised logit; a logit of -inf stays -inf."""


class SeenTokens:
    """Distinct token ids of one sequence and how often each is in its output."""

    __slots__ = ("_counts", "_ids", "_num_distinct", "_place")

    def __init__(self, prompt_ids: np.ndarray) -> None:
        """prompt_ids: int32; empty where no penalty looks at the prompt."""
        prompt = np.unique(prompt_ids)
        self._num_distinct = len(prompt)
        self._place = {token_id: i for i, token_id in enumerate(prompt.tolist())}
        self._ids = np.empty(len(prompt) + 64, dtype=np.int32)
        self._ids[: len(prompt)] = prompt
        self._counts = np.zeros(len(prompt) + 64, dtype=np.int32)

    def count(self, token_id: int) -> None:
        """Count one more output token."""
        place = self._place.setdefault(token_id, self._num_distinct)
        if place == self._num_distinct:
            self._append(token_id)
        self._counts[place] += 1

    def _append(self, token_id: int) -> None:
        if self._num_distinct == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[self._num_distinct] = token_id
        self._num_distinct += 1

    @property
    def ids(self) -> np.ndarray:
        """int32 [distinct], view."""
        return self._ids[: self._num_distinct]

    @property
    def output_counts(self) -> np.ndarray:
        """int32 [distinct], parallel to ids, view."""
        return self._counts[: self._num_distinct]


@dataclass(slots=True, frozen=True)
class PendingTokens:
    """Output tokens that only the device knows yet."""

    last_ids: np.ndarray
    """int32 [n], on the host: the token that each row of the logits follows; -(i + 1) stands for ids[i]."""
    ids: torch.Tensor
    """int64, on the device."""


def apply_penalties(
    logits: torch.Tensor,
    rows: Sequence[int],
    seen: Sequence[SeenTokens],
    params: Sequence[SamplingParams],
    pending: PendingTokens | None = None,
) -> None:
    """Change ``logits`` (float32 [n, vocab]) in place. Row rows[i] is the next token of the sequence that has seen
    seen[i] and asks for params[i]."""
    last_ids = np.zeros(len(rows), dtype=np.int64) if pending is None else pending.last_ids[rows].astype(np.int64)
    late = np.flatnonzero(last_ids < 0)
    wanted = [[p.repetition_penalty, p.frequency_penalty, p.presence_penalty] for p in params]
    # One entry per request and distinct token: which request, which token, how often in its output.
    owner, ids, counts, penalties, row_of, late_owner, late_places = upload(
        [
            np.repeat(np.arange(len(seen)), [len(s.ids) for s in seen]),
            np.concatenate([s.ids for s in seen]),
            np.concatenate([s.output_counts for s in seen]).astype(np.float32),
            np.array(wanted, dtype=np.float32),
            np.array(rows),
            late,
            -last_ids[late] - 1,
        ],
        logits.device,
    )
    if pending is not None and len(late):
        owner, ids, counts = _with_pending(owner, ids, counts, len(rows), late_owner, pending.ids[late_places])
    if not len(owner):
        return
    repetition, frequency, presence = penalties[owner].unbind(1)
    row = row_of[owner]
    values = logits[row, ids]
    changed = torch.where(values > 0, values / repetition, values * repetition)
    changed -= frequency * counts + presence * (counts > 0)
    logits[row, ids] = torch.where(values.isneginf(), values, changed.clamp_(-LARGEST, LARGEST))


def _with_pending(
    owner: torch.Tensor,
    ids: torch.Tensor,
    counts: torch.Tensor,
    num_requests: int,
    late_owner: torch.Tensor,
    late_ids: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Count the tokens in flight too: in the token's old entry, if there is one, and in a new entry. Where there are
    both, they hold the same count, so it does not matter which is written last."""
    id_of = ids.new_full((num_requests,), -1).index_copy_(0, late_owner, late_ids)
    counts = counts + (ids == id_of[owner])
    known = counts.new_zeros(num_requests).index_add_(0, owner, counts * (ids == id_of[owner]))
    late_counts = known[late_owner].clamp(min=1)
    return torch.cat([owner, late_owner]), torch.cat([ids, late_ids]), torch.cat([counts, late_counts])
