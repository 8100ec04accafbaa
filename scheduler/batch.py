"""Plain data between the scheduler and whatever computes a step.

The scheduler hands out a `ScheduleBatch`, the runtime answers with a `StepResult`; neither knows more of the other. A
batch holds arrays and numbers, no live objects: it can be logged, replayed, compared, and sent to another rank. Facts
that never change while a sequence lives are sent once (`SequenceInfo`), with its first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

import numpy as np

from ..memory_pool.req_to_token import RowUpdates
from .constraints.constraint import AllowedTokens
from .request_spec import LogprobOptions, PoolingSpec
from .sampling_params import SamplingParams


class ForwardMode(Enum):
    EXTEND = "extend"
    """Several new tokens per request over a cached prefix: prefill, chunks, continuations. Behind them may stand rows
    of running requests with one new token each."""
    DECODE = "decode"
    """Exactly one new token per request."""


@dataclass(slots=True, frozen=True)
class SequenceInfo:
    """The facts about a sequence that its steps need besides its tokens and slots."""

    serial: int
    """Identifies the sequence in all its steps; never reused."""
    sampling: SamplingParams
    seed: int
    logprobs: LogprobOptions | None
    eos_ends: bool
    """True if an eos token ends an output; False where a constraint treats eos like any other token."""
    prompt_ids: np.ndarray
    """int32: the prompt if a repetition penalty counts its tokens; else empty, so that a long prompt costs nothing."""
    banned: tuple[tuple[int, ...], ...] = ()
    """Token sequences that its output must not hold."""
    pooling: PoolingSpec | None = None
    """Set if its prompt is pooled."""
    adapter: str = ""
    """Key of the adapter that computes it; empty for none."""


@dataclass(slots=True, frozen=True)
class KVCopies:
    """K and V to copy before a step computes anything: all sources are read before any target is written."""

    source: np.ndarray
    """int32 [n]: slots."""
    target: np.ndarray
    """int32 [n]: slots."""

    @classmethod
    def join(cls, parts: Sequence[KVCopies]) -> KVCopies:
        if not parts:
            return NO_COPIES
        sources, targets = [part.source for part in parts], [part.target for part in parts]
        return cls(np.concatenate(sources), np.concatenate(targets))

    def __len__(self) -> int:
        return len(self.source)


NO_COPIES = KVCopies(np.empty(0, dtype=np.int32), np.empty(0, dtype=np.int32))


@dataclass(slots=True, frozen=True)
class StateRows:
    """Which recurrent states the rows of a step start from, and where what follows is written.

    A state is that of exactly so many tokens. Row i starts from the state of its ``prefix_lens[i]`` tokens and writes
    at least one: the state after its last new token. It may write others, after fewer of them.
    """

    sources: np.ndarray
    """int32 [bs]: slot that the row starts from; 0 for none, where the row has no prefix."""
    rows: np.ndarray
    """int32 [m]: row of each state that is written, ascending."""
    ends: np.ndarray
    """int32 [m]: after so many of the row's new tokens; ascending within a row, its last equals extend_len."""
    slots: np.ndarray
    """int32 [m]: where it goes; no slot twice. A slot that is written may be the source of its own row, never of
    another."""


@dataclass(slots=True, frozen=True)
class WindowSlots:
    """What a step reads and writes in the pool of layers with a sliding window, where they have one; 0 stands for none:
    the token is behind the window."""

    out: np.ndarray
    """int32 [tokens]: the slot each new token's K and V are written to."""
    updates: np.ndarray
    """int32 [n]: for each value of ``row_updates``, for a second table of the same rows and positions."""
    copies: KVCopies
    """To be made together with the batch's own."""


@dataclass(slots=True, frozen=True)
class BeamStep:
    """Rows ``start`` to ``stop`` of a batch are the beams of one search.

    The step answers with the best ``num_candidates`` (row, token) pairs by ``scores`` + log-probability. It answers
    None where ``num_candidates`` is 0: a retracted search is only recomputing tokens that it knows.
    """

    serial: int
    start: int
    stop: int
    num_candidates: int
    scores: np.ndarray
    """float32 [stop - start]: accumulated log-probability of each beam."""
    shared_len: int = 0
    """Leading tokens of the beams for which all beams share the same KV slots."""
    bans_ends: bool = False
    """True until min_new_tokens is reached: eos and stop ids are not candidates."""
    allowed: AllowedTokens | None = None
    """The tokens that a constraint allows, rows counted from ``start``; None without a constraint."""
    sequences: np.ndarray | None = None
    """int32 [stop - start, generated tokens]: the beams' tokens so far, if the request has stop strings."""


@dataclass(slots=True, frozen=True)
class PooledSpan:
    """The new tokens ``start`` to ``stop`` of a batch row, counted from its first new one, go into the vector of its
    prompt. There may be none: a step that only ends the prompt still asks for the vector."""

    row: int
    start: int
    stop: int
    position: int
    """In the prompt, of the row's first new token. A vector that is gathered over several steps begins anew at 0: the
    prompt of a request that was retracted is computed again."""
    is_last: bool
    """The step computes the end of the prompt, so its result has the vector."""


@dataclass(slots=True, frozen=True)
class StopMatch:
    """A stop string was found in a sequence's text, or a stop regex, which stays in the text."""

    stop_index: int
    """Index in sampling.stop; in sampling.stop_regex if ``is_regex``."""
    kept_tokens: int
    """Output tokens that lie wholly before the match and end with a whole character; a continuation inherits them. All
    tokens if ``is_regex``."""
    visible_tail: str = ""
    """The text between those tokens and the match, which the client sees."""
    token: int = 0
    """Index of the row's new token that completes it."""
    is_regex: bool = False


@dataclass(slots=True, frozen=True)
class BeamCandidates:
    """The k best continuations of a search, best first; k is less than asked for if no more are possible."""

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
    """int32 [rows, top_k]: the likeliest tokens after each beam, for requests that want them."""
    top_logprobs: np.ndarray | None = None
    """float32 [rows, top_k]"""
    is_finite: bool = True
    """False if the logits of some beam are unusable (StepResult.failed_rows)."""


@dataclass(slots=True)
class ScheduleBatch:
    """One forward step of ``bs`` rows, ``tokens`` = sum(extend_lens) new tokens, concatenated in row order.

    A row is one sequence: a sample of a request, or one of a search's beams; then several rows have the same serial.
    """

    step_id: int
    mode: ForwardMode
    opened: list[SequenceInfo]
    """Sequences that are in a step for the first time."""
    closed: list[int]
    """Serials of sequences that will be in no further step."""
    serials: np.ndarray
    """int64 [bs]: which sequence each row is."""
    input_ids: np.ndarray
    """int32 [tokens]. A negative value -(i + 1) stands for the token that row i of the previous step samples."""
    out_cache_loc: np.ndarray
    """int32 [tokens]: the slot each new token's K and V are written to."""
    req_pool_indices: np.ndarray
    """int32 [bs]: row of req_to_token."""
    prefix_lens: np.ndarray
    """int32 [bs]: tokens that already have KV in the pool."""
    extend_lens: np.ndarray
    """int32 [bs]: new tokens."""
    samples: np.ndarray
    """bool [bs]: True if the next token is sampled: the row reaches the end of its known tokens, and needs more."""
    output_positions: np.ndarray
    """int32 [bs]: output tokens before the one that is sampled, those of a step in flight included."""
    logprob_starts: np.ndarray
    """int32 [bs]: index of the row's first new token with a requested input logprob; extend_len for none. New token j
    predicts the token at position prefix_len + j + 1."""
    logprob_targets: list[np.ndarray]
    """int32 [n] for each row with requested ones: the prompt tokens that its new tokens from logprob_start on predict.
    If the row's last new token predicts an output token, there is one target less."""
    row_updates: RowUpdates
    """Changes of req_to_token since the previous batch; apply them before the forward."""
    copies: KVCopies = field(default_factory=lambda: KVCopies.join([]))
    states: StateRows | None = None
    """None for models whose layers keep K and V alone."""
    windows: WindowSlots | None = None
    """None for models without a pool for layers with a sliding window."""
    pooled: list[PooledSpan] = field(default_factory=list)
    """The tokens that are pooled, in row order, at most one span for each row."""
    beams: list[BeamStep] = field(default_factory=list)
    """The searches among the rows, in row order."""
    allowed: AllowedTokens | None = None
    """The only tokens that may be sampled in rows with a constraint, searches excluded; None if no row has one. Its
    rows count samples: `sampled_counts` of each row, in order, those of searches included."""
    lacks_masks: bool = False
    """``allowed`` is not whole: some of it depends on tokens of the step in flight. Nothing is sampled before it is."""
    draft_lens: np.ndarray | None = None
    """int32 [bs]: so many of each row's last new tokens are guesses at what follows the others; None if there are none.
    Such a row samples after each of them too, and its result brings the tokens up to the first that was not guessed."""

    @property
    def sampled_counts(self) -> np.ndarray:
        """int32 [bs]: after how many of its last new tokens each row samples."""
        counts = self.samples.astype(np.int32)
        return counts if self.draft_lens is None else counts * (1 + self.draft_lens)

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
    """The result of a step: the tokens that follow each row, 0 to k of them, row after row.

    A row has none if it does not sample, or if it is a beam of a search.
    """

    token_ids: np.ndarray
    """int32 [sum(counts)]"""
    counts: np.ndarray
    """int32 [bs]"""
    stop_matches: dict[int, StopMatch] = field(default_factory=dict)
    """Batch row -> match, found in the text up to and including one of its new tokens."""
    stop_begins: dict[int, int] = field(default_factory=dict)
    """Batch row -> output tokens that are kept if a stop string ends the sequence that may have begun behind them. Only
    for models with recurrent states, and without rows whose stop strings are not trimmed."""
    beams: list[BeamCandidates | None] = field(default_factory=list)
    """Parallel to ScheduleBatch.beams."""
    failed_rows: dict[int, int] = field(default_factory=dict)
    """Batch rows with unusable logits (one is NaN or +inf, or all are -inf); their tokens are undefined. Each maps to
    the number of leading tokens that may be trusted: those before the first with a K or V that is not finite; 0 if all
    K and V are finite."""
    forbidden_rows: tuple[int, ...] = ()
    """Batch rows with a token that the request does not allow. Their KV is valid."""
    unchecked_rows: tuple[int, ...] = ()
    """Batch rows for which the search for stop strings raised an exception. Their KV is valid."""

    @classmethod
    def of_rows(
        cls,
        rows: Sequence[Sequence[int]],
        beams: list[BeamCandidates | None] | None = None,
        failed_rows: Mapping[int, int] | None = None,
    ) -> StepResult:
        """Build a result from the tokens of each row."""
        counts = np.array([len(row) for row in rows], dtype=np.int32)
        token_ids = np.array([token for row in rows for token in row], dtype=np.int32)
        return cls(token_ids, counts, beams=beams or [], failed_rows=dict(failed_rows or {}))

    def rows(self) -> list[list[int]]:
        """The tokens of each row."""
        tokens = iter(self.token_ids.tolist())
        return [list(islice(tokens, count)) for count in self.counts.tolist()]
