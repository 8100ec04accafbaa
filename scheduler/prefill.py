"""Admission: which waiting requests enter, and how many of their prompt tokens the next step computes.

A prompt longer than the step's token budget is computed in chunks; only one request at a time is in that state. A
request enters only if its whole prompt fits beside what the running ones are expected to still need (`DecodeReserve`).
The policy decides which request is tried first, which had better wait, and for which a lease may break.

A mixed step (--enable-mixed-chunk) also computes one token for each running request, so that prompts and decodes share
one pass over the weights (after SGLang's mixed chunked prefill).
"""

from __future__ import annotations

import logging

import numpy as np

from .batch import ForwardMode
from .batch_builder import PlannedStep, TokenRows, plan_step
from .cache_report import CacheReporter
from .config import SchedulerConfig
from .decode import DecodeScheduler
from .memory.kv_memory import KVMemory, NotYet
from .memory.shared_prefixes import SharedPrefixes
from .policies.policy import SchedulePolicy
from .queues import WaitingQueue
from .request import Request, RequestFault, RequestStatus

logger = logging.getLogger(__name__)


class DecodeReserve:
    """Share of the remaining max_new_tokens that is kept free for running requests.

    It starts high and falls while decoding goes well; a retraction raises it again (after SGLang's new_token_ratio).
    """

    INITIAL, MINIMUM, DECAY, CLIP = 0.7, 0.1, 0.001, 4096

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._ratio = self.INITIAL

    def reserved_tokens(self, request: Request) -> int:
        """Tokens to keep free for a request; each beam of a search fills pages of its own."""
        known = request.num_output_tokens if request.beams is None else request.beams.num_tokens
        expected = int(min(request.max_new_tokens - known, self.CLIP) * self._ratio)
        if request.beams is None:
            return expected
        page, partial = self._page_size, request.prompt_len % self._page_size
        filled = (partial + request.num_computed_beam_tokens) // page  # full pages of each beam: never copied
        return request.num_rows * (-(-(partial + known + expected) // page) - filled) * page

    def lower_ratio(self) -> None:
        self._ratio = max(self.MINIMUM, self._ratio - self.DECAY)

    def reset_ratio(self) -> None:
        self._ratio = self.INITIAL


class ExtendStep:
    """An extend batch while it grows: ``budget`` new tokens may still be added."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.requests: list[Request] = []
        self.new_lens: list[int] = []
        self.slots: list[np.ndarray] = []

    def add_request(self, request: Request, new_len: int, slots: np.ndarray) -> None:
        self.budget -= len(slots)
        self.requests.append(request)
        self.new_lens.append(new_len)
        self.slots.append(slots)

    def add_decodes(self, rows: TokenRows) -> None:
        """After the last prompt: one token for each of these running requests."""
        self.requests += rows.requests
        self.new_lens += rows.new_lens.tolist()
        self.slots.append(rows.slots)


class PrefillScheduler:
    """Forms extend batches. Owns the one request with a partly computed prompt (``prefilling``)."""

    def __init__(
        self,
        memory: KVMemory,
        policy: SchedulePolicy,
        reserve: DecodeReserve,
        reporter: CacheReporter,
        config: SchedulerConfig,
    ) -> None:
        self._memory = memory
        self._policy = policy
        self._reserve = reserve
        self._reporter = reporter
        self._chunk_size = config.step_tokens
        self._max_running = config.max_running_requests
        self._mixes = config.enable_mixed_chunk
        """Running requests get a token in the same step, if they leave half of it to the prompts."""
        self.prefilling: Request | None = None

    def stop_prefilling(self, request: Request) -> bool:
        """Drop the request from ``prefilling``; False if another request, or none, is prefilling."""
        if request is not self.prefilling:
            return False
        self.prefilling = None
        return True

    def resume_prefilling(self, request: Request | None) -> None:
        """Compute the rest of this request's prompt next; None leaves no prompt partly computed."""
        self.prefilling = request

    def next_batch(
        self, waiting: WaitingQueue, decode: DecodeScheduler, in_flight: list[PlannedStep], *, step_id: int, now: float
    ) -> PlannedStep | None:
        """Form the next extend step; None if there is none. Admitted requests leave ``waiting``; when the step computes
        a request's last known token, the request joins ``decode.running``."""
        running = decode.running
        wanting = decode.wanting() if self._mixes else []
        mixes = self._mixes and 2 * len(wanting) <= self._chunk_size
        step = ExtendStep(self._chunk_size - len(wanting) if mixes else self._chunk_size)
        if self.prefilling is not None and not self._go_on(self.prefilling, step, now):
            return None  # no memory for the next chunk: running requests must end or be retracted first
        if waiting:
            computing = [r for other in in_flight for r in other.requests[: other.num_prompts]]
            self._admit(waiting, running, computing, step, now)
        if not step.requests:
            return None
        offered = decode.offer(wanting, in_flight[-1].batch if in_flight else None, now) if mixes else None
        if offered is not None:
            step.add_decodes(offered)
        planned = plan_step(
            ForwardMode.EXTEND,
            step.requests,
            np.array(step.new_lens, dtype=np.int32),
            np.concatenate(step.slots),
            step_id=step_id,
            row_updates=self._memory.req_to_token.take_updates(),
            copies=self._memory.copies.take_copies(),
            running=offered,
        )
        if offered is not None:
            planned.serves_running = all(request.beams is None for request in running)
        for request in step.requests[: planned.num_prompts]:
            if request is not self.prefilling:
                request.status = RequestStatus.RUNNING
                decode.add_running(request)
        return planned

    def _admit(
        self, waiting: WaitingQueue, running: list[Request], computing: list[Request], step: ExtendStep, now: float
    ) -> None:
        """Move requests from ``waiting`` into the step until a budget is spent. Stops at the first that does not fit:
        letting later, smaller ones pass would starve it."""
        rows = sum(request.num_rows for request in (*running, *step.requests))
        if rows >= self._max_running or step.budget <= 0:
            return  # without a look at the queue, which may be long
        shared = SharedPrefixes(self._memory.cache, self._policy.min_shared_tokens)
        for request in (*computing, *step.requests):
            shared.add_request(request)
        deferred = 0
        reserve = sum(map(self._reserve.reserved_tokens, (*running, *step.requests)))
        admitted: list[Request] = []
        order, overdue = self._order(waiting.requests, now)
        for request in order:
            if deferred >= self._policy.max_deferred or step.budget <= 0:
                break
            if rows + request.num_rows > self._max_running:
                break
            try:
                if request is not overdue and self._better_later(request, shared):
                    deferred += 1
                    continue
                # Quarantined pages come back with the step in flight: wait for them, let nothing give way. As for
                # copies.
                memory = self._memory
                comes_back = memory.allocator.quarantined_tokens or memory.copies_under_way or memory.returning_states
                alone = not (running or step.requests or comes_back)
                own_reserve = self._reserve.reserved_tokens(request)
                if not self._enter(request, step, 0 if alone else reserve + own_reserve, alone, now):
                    break
                self._policy.note_admission(request, now)
                shared.add_request(request)
            except Exception as error:
                raise RequestFault(request) from error
            admitted.append(request)
            rows += request.num_rows
            reserve += own_reserve
        waiting.remove_requests(admitted)

    def _order(self, waiting: list[Request], now: float) -> tuple[list[Request], Request | None]:
        """The requests that may enter in the policy's order, and the overdue request, if any."""
        waiting = [request for request in waiting if not request.awaits_constraint]
        if not waiting:
            return [], None
        try:
            return self._policy.order(waiting, now), self._policy.overdue
        except Exception:
            logger.exception("the policy could not rank the requests that wait; they are tried in order of arrival")
            return waiting, None

    def _enter(self, request: Request, step: ExtendStep, reserve: int, alone: bool, now: float) -> bool:
        """Open a request and add its first chunk to the step; False, and nothing changed, if there is no memory yet."""
        try:
            if not self._open(request, reserve, alone, now):
                return False
        except NotYet:
            return False
        request.status = RequestStatus.PREFILLING
        if self._add_chunk(request, step, now):
            return True
        self._memory.close_request(request, None)
        request.status = RequestStatus.WAITING
        return False

    def _open(self, request: Request, reserve: int, alone: bool, now: float) -> bool:
        """Open a request, breaking leases until it fits, as long as the policy allows it. ``alone``: nothing else runs,
        so any lease may break. The lease that the request itself has claimed breaks last."""
        claimed = request.inheritance.lease if request.inheritance is not None else None
        while not self._memory.open_request(request, reserve, now):
            leases = self._memory.leases
            lease = leases.least_valuable(now, spare=claimed) or leases.least_valuable(now)
            if lease is None or not (alone or self._policy.may_break_for(request, lease, now)):
                return False
            self._memory.break_lease(lease)
        self._reporter.report_request(request, now)
        return True

    def _better_later(self, request: Request, shared: SharedPrefixes) -> bool:
        """True if this step already computes a prefix that the request could find in the cache next time."""
        return not (self._memory.cache.disabled or request.has_claim) and shared.will_be_cached(request)

    def _go_on(self, prefilling: Request, step: ExtendStep, now: float) -> bool:
        try:
            return self._add_chunk(prefilling, step, now)
        except Exception as error:
            raise RequestFault(prefilling) from error

    def _add_chunk(self, request: Request, step: ExtendStep, now: float) -> bool:
        """Allocate as much of the request's known tokens as the budget allows; False if there is no memory."""
        new = min(len(request.token_ids) - request.scheduled_len, step.budget)
        slots = self._memory.extend(request, request.scheduled_len + new, now)
        if slots is None:
            return False
        step.add_request(request, request.scheduled_len + new, slots)
        self.prefilling = request if request.scheduled_len + new < len(request.token_ids) else None
        return True
