"""Plain data between the scheduler and whatever computes a step.

The scheduler hands out a `ScheduleBatch`, the runtime answers with a `StepResult`; neither knows more of the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from ..memory_pool.req_to_token import RowUpdates
from .request import FinishReason, Request


class ForwardMode(Enum):
    EXTEND = "extend"
    """Several new tokens per request over a cached prefix: prefill, chunks, continuations."""
    DECODE = "decode"
    """Exactly one new token per request."""


@dataclass(slots=True)
class ScheduleBatch:
    """One forward step. ``bs`` requests, ``tokens`` = sum(extend_lens) new tokens, concatenated in request order."""

    step_id: int
    mode: ForwardMode
    requests: list[Request]
    input_ids: np.ndarray
    """int32 [tokens]. A negative value -(i + 1) stands for the token that row i of the previous step samples."""
    out_cache_loc: np.ndarray
    """int32 [tokens]: the slot each new token's K and V are written to."""
    req_pool_indices: np.ndarray
    """int32 [bs]: row of req_to_token."""
    prefix_lens: np.ndarray
    """int32 [bs]: tokens whose KV is already in the pool."""
    extend_lens: np.ndarray
    """int32 [bs]: new tokens."""
    samples: np.ndarray
    """bool [bs]: the row's last new token ends the known sequence, so a next token is sampled from it."""
    logprob_starts: np.ndarray
    """int32 [bs]: first of the row's new tokens whose input logprob is wanted; extend_len for none. New token j
    predicts the token at position prefix_len + j + 1."""
    row_updates: RowUpdates
    """What changed in req_to_token since the previous batch; apply before the forward."""

    @property
    def seq_lens(self) -> np.ndarray:
        """int32 [bs]: length of each sequence once this step has run."""
        return self.prefix_lens + self.extend_lens

    def __len__(self) -> int:
        return len(self.requests)


@dataclass(slots=True, frozen=True)
class StopMatch:
    """A stop string was found. ``stop_index``: which of sampling.stop; ``kept_tokens``: how many output tokens lie
    wholly before the match (a continuation inherits just these)."""

    stop_index: int
    kept_tokens: int


@dataclass(slots=True)
class StepResult:
    """What a step computed. next_ids: int32 [bs], -1 where the row does not sample."""

    next_ids: np.ndarray
    stop_matches: dict[int, StopMatch] = field(default_factory=dict)
    """Batch row -> match, found in the text up to and including the new token."""


@dataclass(slots=True)
class RequestEvent:
    """What a processed step means for one request: a new token, an end, or both.

    row: row of the batch the token came from, -1 when there is none (abort). token_id: -1 when there is none.
    """

    request: Request
    row: int
    token_id: int
    finish: FinishReason | None = None
