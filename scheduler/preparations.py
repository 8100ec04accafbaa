"""Computes the beginning of a job's next prompt while its tool runs, when no request is open: a preparation.

    turn ends ──▶ add_preparation ──▶ pending ──form_step──▶ chunk in flight ──end_chunk──▶ leased in the turn's place
                                        ▲  └─ its job returned, its lease ended, … ──▶ dropped    │
                                        └──────────────────── more to compute ────────────────────┘

A chat template that drops thoughts writes the next prompt differently from what the turn has left in the cache. The
caller knows the tokens that the next prompt will begin with as soon as the answer has ended; see entrypoints/chat.

A preparation takes nothing that others need:

- A chunk runs only when no request is open, so a request that arrives waits for one chunk at most. Between two chunks a
  preparation holds nothing but the lease.
- It gets free memory, and KV that has been idle for longer than T_fill or is marked as not reusable. It breaks no lease
  and retracts no request.
- After each chunk the turn's lease passes to the prepared tokens, with its deadline and its worth (`LeaseTable.
  exchange`). A preparation without a lease is dropped: nothing says that its job will return.
- Its chunks are at most `STEP_SHARE` of all steps, after a burst.
- A client whose next turns do not use what was prepared gets no more of it (`Benefit`).

It is no request for anyone outside: it has no events, and counts in no statistics but its own.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ..radix.lease import LeaseState, LeaseTable
from .batch import ForwardMode
from .batch_builder import PlannedStep, plan_step
from .client_shares import ClientShares
from .continuation.continuations import Continuations
from .jobs.job import FinishedStep, Job
from .memory.kv_memory import KVMemory
from .outcome import FinishReason, RequestRefused
from .queues import LiveRequests
from .request import PreparedSpan, Request, RequestFault, RequestStatus
from .request_factory import RequestFactory
from .request_spec import Predecessor, RequestSpec
from .sampling_params import SamplingParams
from .stats import PreparationStats

MAX_PENDING = 256
"""Preparations that wait at a time. One more replaces the oldest of the client that has most."""

CHUNK_TOKENS = 512
"""Most tokens of a chunk, or one page if that is more: a request that arrives may have to wait for it."""

STEP_SHARE, BURST_STEPS = 0.25, 64
"""Each step of requests pays for so many chunks; unused ones add up to the burst, with which a server starts."""

Drop = Literal["returned", "lease", "memory", "learned", "replaced", "failed", "refused", "cleared", "adapter"]
"""Why a preparation ended before all of it was computed: the job sent its next request or has another one open; the
turn's lease ended or cannot pass on; memory, for longer than its lease lasts; the client did not use earlier ones; a
newer one came, or too many; its step failed; it can never fit; all requests were aborted, or the cache was flushed; the
turn's adapter was unloaded."""


@dataclass(slots=True, eq=False)
class Preparation:
    """The tokens that a job's next prompt is expected to begin with."""

    step: FinishedStep
    """The turn that it follows."""
    ids: np.ndarray
    """int32 [n]"""
    start: int | None = None
    """The first token that it computed; None before its first chunk."""
    leased_len: int = 0
    """Tokens that the lease keeps by now; 0 before the first chunk has ended."""
    blocked: bool = False
    """There was no memory for its next chunk when that was tried last."""

    @property
    def num_leased(self) -> int:
        """Tokens that it computed and that the lease keeps."""
        return max(0, self.leased_len - (self.start or 0))


class Benefit:
    """Learns for whom preparing pays: compares the tokens prepared with those that the next turns found."""

    TRIALS = 4
    """Preparations whose use is known before a scope is judged, and twice as many may be under way meanwhile."""
    LEAST_USED = 0.25
    """Share of the prepared tokens that must be used."""
    KEPT = 0.9
    """Weight of all earlier preparations when a new one is counted, so that old ones fade."""
    RETRIAL = 16
    """In a scope that was judged badly, one preparation in this many is still made."""
    MAX_SCOPES = 1024

    def __init__(self) -> None:
        self._scopes: OrderedDict[tuple[str, str], _Scope] = OrderedDict()
        """By client and namespace, the latest last."""

    def pays(self, scope: tuple[str, str]) -> bool:
        """Decide whether to prepare once more for this scope."""
        seen = self._seen(scope)
        if seen.count < self.TRIALS:
            return seen.open < 2 * self.TRIALS
        if seen.used >= self.LEAST_USED * seen.prepared:
            return True
        seen.refused += 1
        return seen.refused % self.RETRIAL == 0

    def record_begin(self, scope: tuple[str, str]) -> None:
        """A preparation has computed its first tokens."""
        self._seen(scope).open += 1

    def record_return(self, scope: tuple[str, str]) -> None:
        """A preparation's job has returned, or its lease has ended."""
        seen = self._seen(scope)
        seen.open = max(0, seen.open - 1)

    def record_use(self, scope: tuple[str, str], prepared: int, used: int) -> None:
        """The use of a preparation is known. prepared, used: tokens."""
        seen = self._seen(scope)
        seen.count += 1
        seen.prepared = seen.prepared * self.KEPT + prepared
        seen.used = seen.used * self.KEPT + used

    def _seen(self, scope: tuple[str, str]) -> _Scope:
        seen = self._scopes.setdefault(scope, _Scope())
        self._scopes.move_to_end(scope)
        if len(self._scopes) > self.MAX_SCOPES:
            self._scopes.popitem(last=False)
        return seen


@dataclass(slots=True)
class _Scope:
    count: int = 0
    open: int = 0
    prepared: float = 0.0
    used: float = 0.0
    refused: int = 0


@dataclass(slots=True)
class _Counts:
    computed_tokens: int = 0
    used_tokens: int = 0
    steps: int = 0
    completed: int = 0
    dropped: dict[str, int] = field(default_factory=dict)


class Preparations:
    """Owns the preparations: those that wait, the one with a chunk in flight, and those whose use is not known yet."""

    def __init__(
        self,
        memory: KVMemory,
        leases: LeaseTable,
        continuations: Continuations,
        live: LiveRequests,
        factory: RequestFactory,
        idle_tick: Callable[[float], int],
        step_tokens: int,
    ) -> None:
        """idle_tick: the cache's latest tick that is longer than T_fill ago. step_tokens: of the largest step."""
        self._memory, self._leases, self._continuations = memory, leases, continuations
        self._live, self._factory, self._idle_tick = live, factory, idle_tick
        page = memory.page_size
        self._chunk_tokens = min(step_tokens, max(CHUNK_TOKENS, page))
        self._pending: OrderedDict[Job, Preparation] = OrderedDict()
        """In order of arrival; at most one for a job."""
        self._shares: ClientShares[Job] = ClientShares()
        """The jobs with a pending preparation; their sizes are tokens."""
        self._begun: OrderedDict[Job, Preparation] = OrderedDict()
        """Those that have computed tokens and whose job has not returned."""
        self._in_flight: tuple[Request, Preparation] | None = None
        self._credit = float(BURST_STEPS)
        self._has_failed = False
        """A chunk failed, and no step of a request has ended well since: the device may be at fault."""
        self._benefit = Benefit()
        self.adapters: frozenset[str] = frozenset()
        """Keys of the adapters that are loaded. Nothing is prepared for turns of others."""
        self._counts = _Counts()
        self._number = 0

    # -- from and to jobs ---------------------------------------------------------------------------------------------

    def add_preparation(self, step: FinishedStep | None, ids: np.ndarray) -> None:
        """Prepare the prompt that begins with ``ids``, int32 [n], for the turn after ``step``. step: None if it is not
        known any more."""
        if step is None:
            self._count_drop("returned")
            return
        job = step.job
        self._settle_begun()
        if self._memory.cache.disabled or not len(ids):
            self._count_drop("refused")
        elif (reason := self._obstacle(step)) is not None:
            self._count_drop(reason)
        elif not self._benefit.pays(_scope_of(job)):
            self._count_drop("learned")
        else:
            self._drop_job(job, "replaced")
            self._pending[job] = Preparation(step, ids)
            self._shares.put_key(job.client, job, len(ids))
            if len(self._pending) > MAX_PENDING:
                self._drop_job(next(self._shares.in_order_of_forgetting(by_size=False)), "replaced")

    def record_arrival(self, requests: Sequence[Request]) -> None:
        """Take note of a job's new request: what it can find of the job's preparation, which ends with it."""
        first = requests[0]
        job = first.job
        if job is None:
            return
        self._drop_job(job, "returned")
        preparation = self._begun.get(job)
        if preparation is None or preparation.start is None or first.status is RequestStatus.PARKED:
            return
        shared = min(preparation.leased_len, _num_shared(preparation.ids, first.token_ids.view()))
        if shared > preparation.start:  # else it is a side task, or the prompt is another than expected
            del self._begun[job]
            self._benefit.record_return(_scope_of(job))
            first.prepared = PreparedSpan(preparation.start, shared, preparation.num_leased, _scope_of(job))

    def record_admission(self, request: Request) -> None:
        """Count what a request found of the tokens that were prepared for it. Call it once, at its first admission."""
        if request.prepared is None:
            return
        span, request.prepared = request.prepared, None
        request.prepared_tokens = max(0, min(request.found.total, span.stop) - span.start)
        self._counts.used_tokens += request.prepared_tokens
        self._benefit.record_use(span.scope, span.prepared, request.prepared_tokens)

    def clear(self) -> None:
        """Drop everything that waits: all requests are aborted, or the cache is flushed."""
        for job in list(self._pending):
            self._drop_job(job, "cleared")

    # -- steps --------------------------------------------------------------------------------------------------------

    @property
    def request_in_flight(self) -> Request | None:
        """The request of the chunk in flight; it is live until its step has ended."""
        return self._in_flight[0] if self._in_flight is not None else None

    def note_step(self) -> None:
        """A step of requests was formed."""
        self._credit = min(self._credit + STEP_SHARE, BURST_STEPS)

    def note_success(self) -> None:
        """A step of requests has ended well."""
        self._has_failed = False

    def form_step(self, step_id: int, now: float) -> PlannedStep | None:
        """Form a step with the next chunk, if there is one that may run. No request is live and no step in flight."""
        if not self._pending or self._credit < 1 or self._has_failed:
            return None
        for job, preparation in list(self._pending.items()):
            if (reason := self._obstacle(preparation.step)) is not None:
                self._drop_job(job, "memory" if preparation.blocked and reason == "lease" else reason)
                continue
            step = self._form_chunk(preparation, step_id, now)
            if step is not None:
                self._credit -= 1
                self._counts.steps += 1
                return step
            if job in self._pending:
                return None  # there is no memory; the others would find none either
        return None

    def _form_chunk(self, preparation: Preparation, step_id: int, now: float) -> PlannedStep | None:
        """None if there is no memory now, or if the preparation was dropped."""
        memory, job, ids = self._memory, preparation.step.job, preparation.ids
        cached = memory.cache.match_prefix(preparation.step.namespace, ids[:-1]).device_len
        end = min(len(ids), cached + self._chunk_tokens)
        if end < len(ids):
            end -= end % memory.page_size
        request = self._make_request(preparation, end, now) if end > max(cached, preparation.leased_len) else None
        if request is None:
            self._drop_job(job, "refused")
            return None
        self._in_flight = request, preparation  # before anything can fail: recovery ends it
        self._live.add_siblings(request.rid, [request])
        try:
            slots = self._open(request, now)
        except Exception as error:
            raise RequestFault(request) from error
        preparation.blocked = slots is None
        if slots is None:
            self._live.remove_request(request)
            self._in_flight = None
            return None
        if preparation.start is None:
            if job in self._begun:
                self._forget_begun(job)
            preparation.start, self._begun[job] = request.scheduled_len, preparation
            self._benefit.record_begin(_scope_of(job))
        step = plan_step(
            ForwardMode.EXTEND,
            [request],
            np.array([end], dtype=np.int32),
            slots,
            step_id=step_id,
            row_updates=memory.req_to_token.take_updates(),
            copies=memory.copies.take_copies(),
        )
        step.is_preparation = True
        return step

    def _make_request(self, preparation: Preparation, end: int, now: float) -> Request | None:
        """The request that computes the first ``end`` tokens; None if they can never fit."""
        step = preparation.step
        self._number += 1
        spec = RequestSpec(
            rid=f"{step.rid}/prepared-{self._number}",
            sampling=SamplingParams(max_new_tokens=0, temperature=0.0, seed=0),
            namespace=step.job.namespace,
            client=step.job.client,
            retain_ttl=0.0,
            prepares=Predecessor(step.rid, step.index),
        )
        try:
            (request,) = self._factory.make_requests(spec, now, preparation.ids[:end], None, step.adapter)
            self._factory.set_prompt([request], request.token_ids)
        except RequestRefused:
            return None
        request.queried = True  # the cache's statistics count prompts of clients
        return request

    def _open(self, request: Request, now: float) -> np.ndarray | None:
        """Give a request its KV and the slots of its chunk: int32 [new tokens], or None if there is no memory that it
        may use."""
        memory, needed = self._memory, len(request.token_ids)
        if not memory.open_idle_request(request, self._idle_tick(now)):
            return None
        slots = memory.extend(request, needed, now)
        if slots is None:
            memory.close_request(request, None)
            return None
        request.status = RequestStatus.RUNNING
        return slots

    def end_chunk(self, request: Request, finish: FinishReason) -> None:
        """A chunk has been computed, or has failed. The lease of the turn takes its KV over, if it may; otherwise the
        request still holds it."""
        assert self._in_flight is not None and self._in_flight[0] is request
        (_, preparation), self._in_flight = self._in_flight, None
        job = preparation.step.job
        length = request.committed_len
        if finish.type == "abort":
            if self._pending.get(job) is preparation:
                self._drop_job(job, "failed")
            return
        self._counts.computed_tokens += length - max(preparation.start or 0, preparation.leased_len)
        if self._pending.get(job) is not preparation:
            return  # dropped while it was computed
        if (reason := self._obstacle(preparation.step)) is not None:
            self._drop_job(job, reason)
            return
        lease = preparation.step.lease
        assert lease is not None
        kept = 0
        if not preparation.leased_len:
            kept = _num_shared(preparation.ids, self._left_by(preparation.step))
        if not self._memory.exchange_lease(lease, request, kept):
            self._drop_job(job, "lease")
            return
        preparation.leased_len = length
        preparation.step.tokens = lease.tokens
        step = preparation.step
        self._continuations.record_prepared(step.rid, step.index, step.namespace, preparation.ids[:length])
        if length == len(preparation.ids):
            self._counts.completed += 1
            self._forget_pending(job)

    def _left_by(self, step: FinishedStep) -> np.ndarray:
        """int32 [n]: the tokens of a turn; none if it is off the record."""
        sample = self._continuations.sample_of(step.rid, step.index, step.namespace)
        return sample.ids.view() if sample is not None else np.empty(0, dtype=np.int32)

    def drop_failed(self) -> None:
        """Drop the preparation with a chunk that an exception has ended."""
        if (request := self.request_in_flight) is not None and request.finish is not None:
            self.end_chunk(request, request.finish)

    def note_failure(self) -> None:
        """A chunk's step failed."""
        self._has_failed = True

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _obstacle(self, step: FinishedStep) -> Drop | None:
        """Why nothing may be prepared for the turn after ``step``."""
        job, lease = step.job, step.lease
        if job.is_over or job.open_rids or job.last_step is not step:
            return "returned"
        if lease is None or lease.state is not LeaseState.GRANTED:
            return "lease"
        if step.adapter and step.adapter not in self.adapters:
            return "adapter"
        return None

    def _settle_begun(self) -> None:
        """Count the preparations whose lease has ended without a return as not used."""
        for job, preparation in list(self._begun.items()):
            if not preparation.step.is_pinned and job not in self._pending:
                self._forget_begun(job)
        while len(self._begun) > 4 * MAX_PENDING:
            self._forget_begun(next(iter(self._begun)))

    def _forget_begun(self, job: Job) -> None:
        preparation = self._begun.pop(job)
        self._benefit.record_return(_scope_of(job))
        self._benefit.record_use(_scope_of(job), preparation.num_leased, 0)

    def _drop_job(self, job: Job, reason: Drop) -> None:
        if job in self._pending:
            self._forget_pending(job)
            self._count_drop(reason)

    def _forget_pending(self, job: Job) -> None:
        del self._pending[job]
        self._shares.remove_key(job)

    def _count_drop(self, reason: Drop) -> None:
        self._counts.dropped[reason] = self._counts.dropped.get(reason, 0) + 1

    def stats(self) -> PreparationStats:
        counts = self._counts
        return PreparationStats(
            pending=len(self._pending),
            steps=counts.steps,
            completed=counts.completed,
            computed_tokens=counts.computed_tokens,
            used_tokens=counts.used_tokens,
            dropped=dict(counts.dropped),
        )


def _scope_of(job: Job) -> tuple[str, str]:
    return job.client, job.namespace


def _num_shared(ids: np.ndarray, others: np.ndarray) -> int:
    """Number of leading tokens that two sequences share; both int32."""
    length = min(len(ids), len(others))
    differing = np.flatnonzero(ids[:length] != others[:length])
    return int(differing[0]) if len(differing) else length
