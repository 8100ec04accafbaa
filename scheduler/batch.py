"""Plain data between the scheduler and whatever computes a step.

The scheduler hands out a `ScheduleBatch`, the runtime answers with a `StepResult`; neither knows more of the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from ..memory_pool.req_to_token import RowUpdates
from .refusal import RequestRefused
from .request import FinishReason, Request


class ForwardMode(Enum):
    EXTEND = "extend"
    """Several new tokens per request over a cached prefix: prefill, chunks, continuations."""
    DECODE = "decode"
    """Exactly one new token per request."""


@dataclass(slots=True, frozen=True)
class KVCopies:
    """K and V to copy before a step computes anything: all sources are read before any target is written."""

    source: np.ndarray
    """int32 [n]: slots."""
    target: np.ndarray
    """int32 [n]: slots."""

    @classmethod
    def join(cls, parts: list[KVCopies]) -> KVCopies:
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

    request: Request
    start: int
    stop: int
    num_candidates: int
    scores: np.ndarray
    """float32 [stop - start]: accumulated log-probability of each beam."""
    shared_len: int = 0
    """Tokens at the start of every beam whose K and V are in the same slots."""
    bans_ends: bool = False
    """min_new_tokens is not reached: eos and stop ids are no candidates."""
    allowed: tuple[np.ndarray, np.ndarray] | None = None
    """int32 [m] each, (row counted from ``start``, token id): the only candidates, where an item trie says so."""


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

    A row is one sequence of a request: its only one, or one of its beams; then several rows have the same request.
    """

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
    copies: KVCopies = field(default_factory=lambda: KVCopies.join([]))
    beams: list[BeamStep] = field(default_factory=list)
    """The searches among the rows, in row order."""
    allowed: dict[int, np.ndarray] = field(default_factory=dict)
    """Row -> int32 [m], the only tokens that may be sampled; of requests with an item trie, searches excluded."""

    @property
    def seq_lens(self) -> np.ndarray:
        """int32 [bs]: length of each sequence once this step has run."""
        return self.prefix_lens + self.extend_lens

    @property
    def is_extend(self) -> bool:
        return self.mode is ForwardMode.EXTEND

    def __len__(self) -> int:
        return len(self.requests)


@dataclass(slots=True, frozen=True)
class StopMatch:
    """A stop string was found. ``stop_index``: which of sampling.stop; ``kept_tokens``: how many output tokens lie
    wholly before the match (a continuation inherits just these); ``rest``: what the client sees between them and the
    match. The scheduler only hands it on."""

    stop_index: int
    kept_tokens: int
    rest: str = ""


@dataclass(slots=True)
class StepResult:
    """What a step computed. next_ids: int32 [bs], -1 where the row does not sample, or is one of a search's."""

    next_ids: np.ndarray
    stop_matches: dict[int, StopMatch] = field(default_factory=dict)
    """Batch row -> match, found in the text up to and including the new token."""
    beams: list[BeamCandidates | None] = field(default_factory=list)
    """Parallel to ScheduleBatch.beams."""


@dataclass(slots=True)
class RequestEvent:
    """What a processed step means for one request: a new token, an end, or both.

    row: row of the batch the token came from, -1 when there is none (abort). token_id: -1 when there is none.
    refusal: the request ended before it began, because of what became of its parent; ``finish`` is set too.
    """

    request: Request
    row: int
    token_id: int
    finish: FinishReason | None = None
    refusal: RequestRefused | None = None


def build_batch(
    step_id: int,
    mode: ForwardMode,
    requests: list[Request],
    new_lens: np.ndarray,
    slots: np.ndarray,
    row_updates: RowUpdates,
    copies: list[KVCopies],
    input_ids: np.ndarray | None = None,
) -> ScheduleBatch:
    """A step that computes each request up to ``new_lens`` (int32 [bs]) and counts it as scheduled.

    ``slots`` as `KVMemory.extend` returned them; ``input_ids`` default to the known tokens of the requests. A search is
    a row like any other while its prompt is computed.
    """
    bs = len(requests)
    prefix_lens = np.fromiter((r.scheduled_len for r in requests), dtype=np.int32, count=bs)
    if input_ids is None:
        spans = zip(requests, prefix_lens.tolist(), new_lens.tolist())
        input_ids = np.concatenate([r.token_ids.view(old, new) for r, old, new in spans])
    samples = np.empty(bs, dtype=bool)
    logprob_starts = new_lens - prefix_lens
    beams: list[BeamStep] = []
    allowed: dict[int, np.ndarray] = {}
    for i, (request, new) in enumerate(zip(requests, new_lens.tolist())):
        samples[i] = new == len(request.token_ids) + request.num_output_placeholders
        if request.logprob_next < request.prompt_len and prefix_lens[i] < request.prompt_len - 1:
            logprob_starts[i] = max(0, request.logprob_next - 1 - int(prefix_lens[i]))
        if samples[i] and request.beams is not None:
            beams.append(_beam_step(request, i, i + 1))
        elif samples[i] and request.item_trie is not None:
            allowed[i] = request.item_trie.children(np.array([request.trie_node], dtype=np.int32))[1]
        request.scheduled_len = new
        request.num_output_placeholders += int(samples[i])
    return ScheduleBatch(
        step_id=step_id,
        mode=mode,
        requests=requests,
        input_ids=input_ids,
        out_cache_loc=slots,
        req_pool_indices=np.fromiter((r.held_kv.row for r in requests), dtype=np.int32, count=bs),
        prefix_lens=prefix_lens,
        extend_lens=new_lens - prefix_lens,
        samples=samples,
        logprob_starts=np.minimum(logprob_starts, new_lens - prefix_lens),
        row_updates=row_updates,
        copies=KVCopies.join(copies),
        beams=beams,
        allowed=allowed,
    )


def add_searches(batch: ScheduleBatch, searches: list[Request], input_ids: np.ndarray, slots: np.ndarray) -> None:
    """Append one row for each beam of each search to a decode batch. input_ids, slots: int32 [rows added]."""
    requests: list[Request] = []
    prefix_lens: list[np.ndarray] = []
    samples: list[np.ndarray] = []
    for search in searches:
        kv, start = search.held_beams, len(batch) + len(requests)
        count = len(kv.rows)
        requests += [search] * count
        step = _beam_step(search, start, start + count)
        batch.beams.append(step)
        prefix_lens.append(np.full(count, kv.length - 1, dtype=np.int32))
        samples.append(np.full(count, step.num_candidates > 0))
        search.num_output_placeholders += 1
    added = np.ones(len(requests), dtype=np.int32)
    batch.requests = batch.requests + requests
    batch.input_ids = np.concatenate([batch.input_ids, input_ids])
    batch.out_cache_loc = np.concatenate([batch.out_cache_loc, slots])
    batch.req_pool_indices = np.concatenate([batch.req_pool_indices, *(s.held_beams.rows for s in searches)])
    batch.prefix_lens = np.concatenate([batch.prefix_lens, *prefix_lens])
    batch.extend_lens = np.concatenate([batch.extend_lens, added])
    batch.samples = np.concatenate([batch.samples, *samples])
    batch.logprob_starts = np.concatenate([batch.logprob_starts, added])


def _beam_step(search: Request, start: int, stop: int) -> BeamStep:
    """What the rows of a search have to answer. A retracted one that computes its known tokens again: nothing."""
    group, kv = search.beams, search.beam_kv
    assert group is not None
    if search.num_computed_beam_tokens < group.num_tokens:
        return BeamStep(search, start, stop, 0, group.scores, shared_len=kv.start if kv is not None else 0)
    return BeamStep(
        search,
        start,
        stop,
        group.num_candidates,
        group.scores,
        shared_len=kv.start if kv is not None else 0,
        bans_ends=group.bans_ends,
        allowed=group.allowed(),
    )
