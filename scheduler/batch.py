"""Plain data between the scheduler and whatever computes a step.

The scheduler hands out a `ScheduleBatch`, the runtime answers with a `StepResult`; neither knows more of the other. An
order holds arrays and numbers, no live objects: it can be logged, replayed, compared, and sent to another rank. What
does not change while a sequence lives is told once (`SequenceInfo`), before its first step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from ..memory_pool.req_to_token import RowUpdates
from .constraints.constraint import AllowedTokens
from .request_spec import LogprobOptions
from .sampling_params import SamplingParams


class ForwardMode(Enum):
    EXTEND = "extend"
    """Several new tokens per request over a cached prefix: prefill, chunks, continuations."""
    DECODE = "decode"
    """Exactly one new token per request."""


@dataclass(slots=True, frozen=True)
class SequenceInfo:
    """What computing a sequence takes beside its tokens and slots."""

    serial: int
    """Names the sequence in all its steps; never used again."""
    sampling: SamplingParams
    seed: int
    logprobs: LogprobOptions | None
    eos_ends: bool
    """An eos token is the end of an output, not a token like any other (a constraint may say so)."""
    prompt_ids: np.ndarray
    """int32: the prompt, where a repetition penalty counts its tokens; else empty: a long prompt must cost nothing."""


@dataclass(slots=True, frozen=True)
class KVCopies:
    """K and V to copy before a step computes anything: all sources are read before any target is written."""

    source: np.ndarray
    """int32 [n]: slots."""
    target: np.ndarray
    """int32 [n]: slots."""

    @classmethod
    def join(cls, parts: Sequence[KVCopies]) -> KVCopies:
        nothing = np.empty(0, dtype=np.int32)
        sources, targets = [part.source for part in parts], [part.target for part in parts]
        return cls(np.concatenate([nothing, *sources]), np.concatenate([nothing, *targets]))

    def __len__(self) -> int:
        return len(self.source)


@dataclass(slots=True, frozen=True)
class BeamStep:
    """Rows ``start`` to ``stop`` of a batch are the beams of one search.

    The step answers with the best ``num_candidates`` of all (row, token) pairs by ``scores`` + log-probability; with
    none of them (None) where ``num_candidates`` is 0: a retracted search computes again what it knows.
    """

    serial: int
    start: int
    stop: int
    num_candidates: int
    scores: np.ndarray
    """float32 [stop - start]: accumulated log-probability of each beam."""
    shared_len: int = 0
    """Tokens at the start of every beam whose K and V are in the same slots."""
    bans_ends: bool = False
    """min_new_tokens is not reached: eos and stop ids are no candidates."""
    allowed: AllowedTokens | None = None
    """The only candidates, where a constraint says so; its rows count from ``start``."""
    sequences: np.ndarray | None = None
    """int32 [stop - start, generated tokens]: what the beams have so far, where stop strings are looked for in it."""


@dataclass(slots=True, frozen=True)
class StopMatch:
    """A stop string was found in a sequence's text."""

    stop_index: int
    """Which of sampling.stop."""
    kept_tokens: int
    """Output tokens that lie wholly before the match and end with a whole character; a continuation inherits them."""
    visible_tail: str = ""
    """The text between those tokens and the match, which the client sees."""
    token: int = 0
    """Which of the row's new tokens completes it."""


@dataclass(slots=True, frozen=True)
class BeamCandidates:
    """The best continuations of a search, best first; k of them, fewer than asked for where no more are possible."""

    parents: np.ndarray
    """int32 [k]: row counted from the BeamStep's start."""
    tokens: np.ndarray
    """int32 [k]"""
    scores: np.ndarray
    """float32 [k]: accumulated log-probability, logit_bias included."""
    logprobs: np.ndarray
    """float32 [k]: the token's own log-probability."""
    stops: dict[int, StopMatch] = field(default_factory=dict)
    """Candidate -> the stop string that its token completes."""
    top_ids: np.ndarray | None = None
    """int32 [rows, top_k]: the likeliest tokens after each beam, for requests that want them; likewise below."""
    top_logprobs: np.ndarray | None = None
    """float32 [rows, top_k]"""


@dataclass(slots=True)
class ScheduleBatch:
    """One forward step of ``bs`` rows, ``tokens`` = sum(extend_lens) new tokens, concatenated in row order.

    A row is one sequence: a sample of a request, or one of a search's beams; then several rows have the same serial.
    """

    step_id: int
    mode: ForwardMode
    opened: list[SequenceInfo]
    """Sequences that no step had before."""
    closed: list[int]
    """Serials that no step will have again."""
    serials: np.ndarray
    """int64 [bs]: which sequence each row is."""
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
    output_positions: np.ndarray
    """int32 [bs]: output tokens before the one that is sampled, those of a step in flight included."""
    logprob_starts: np.ndarray
    """int32 [bs]: first of the row's new tokens whose input logprob is wanted; extend_len for none. New token j
    predicts the token at position prefix_len + j + 1."""
    logprob_targets: list[np.ndarray]
    """int32 [n] for each row that wants some: the prompt tokens that its new tokens from logprob_start on predict. The
    row's last new token may predict a token that is none of the prompt's: then there is one target less."""
    row_updates: RowUpdates
    """What changed in req_to_token since the previous batch; apply before the forward."""
    copies: KVCopies = field(default_factory=lambda: KVCopies.join([]))
    beams: list[BeamStep] = field(default_factory=list)
    """The searches among the rows, in row order."""
    allowed: AllowedTokens | None = None
    """The only tokens that may be sampled in rows with a constraint, searches excluded; None where no row has one."""

    @property
    def seq_lens(self) -> np.ndarray:
        """int32 [bs]: length of each sequence once this step has run."""
        return self.prefix_lens + self.extend_lens

    @property
    def is_extend(self) -> bool:
        return self.mode is ForwardMode.EXTEND

    def __len__(self) -> int:
        return len(self.serials)


@dataclass(slots=True)
class StepResult:
    """What a step computed: for each row the tokens that follow it, 0 to k of them, row after row.

    A row brings none where it does not sample, or is one of a search's.
    """

    token_ids: np.ndarray
    """int32 [sum(counts)]"""
    counts: np.ndarray
    """int32 [bs]"""
    stop_matches: dict[int, StopMatch] = field(default_factory=dict)
    """Batch row -> match, found in the text up to and including one of its new tokens."""
    beams: list[BeamCandidates | None] = field(default_factory=list)
    """Parallel to ScheduleBatch.beams."""

    @classmethod
    def of_rows(cls, rows: Sequence[Sequence[int]], beams: list[BeamCandidates | None] | None = None) -> StepResult:
        """From the tokens of each row."""
        counts = np.array([len(row) for row in rows], dtype=np.int32)
        token_ids = np.array([token for row in rows for token in row], dtype=np.int32)
        return cls(token_ids, counts, beams=beams or [])

    def rows(self) -> list[list[int]]:
        """The tokens of each row."""
        tokens = self.token_ids.tolist()
        ends = self.counts.cumsum().tolist()
        return [tokens[end - count : end] for end, count in zip(ends, self.counts.tolist())]
