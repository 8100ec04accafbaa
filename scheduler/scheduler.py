"""The scheduler: it picks the requests of the next step, and applies a finished step's result to them.

    add_request ──▶ waiting ──PrefillScheduler──▶ DecodeScheduler.running ──process_result──▶ finished
                ▲───────────── retract (memory pressure) ───┘

Pure decision code: it reads no clock (time is an argument) and touches no tensors, so the same calls always give the
same decisions. One step may be in flight while the next is formed (overlapped scheduling): `next_batch` then uses
placeholders for tokens that are not known yet, and `process_result` is called one step late.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..memory_pool.allocator import Allocator
from ..memory_pool.req_to_token import ReqToTokenPool
from ..radix.cache import RadixCache
from ..radix.history import CacheHistory
from ..radix.lease import Lease, LeaseCounts, LeaseTable
from ..radix.snapshot import TreeWalk
from ..radix.tiers.block_orders import BlockOrder
from ..radix.tiers.block_tier import BlockTier
from ..radix.tiers.host_tier import HostTier, TierCopy
from .batch import ScheduleBatch, StepResult, StopMatch
from .batch_builder import PlannedStep, add_masks
from .cache_report import CacheReporter
from .cache_stats import CacheStats
from .cache_stats_collector import CacheStatsCollector
from .config import SchedulerConfig
from .constraints.constraint import Constraint
from .continuation.continuations import Continuations, Handover
from .continuation.records import SampleRecord, describe_leases
from .decode import DecodeScheduler, NoFreeSlots
from .jobs.calls import ToolCall
from .jobs.job import Job
from .jobs.kept_turn import has_share
from .jobs.tool_time import ToolTimes
from .limits import (
    check_queue,
    duplicate_rid,
    forward_failed,
    kv_cache_damaged,
    kv_load_failed,
    lease_budget,
    logits_not_finite,
    output_too_short,
    stop_check_failed,
    timed_out,
    token_not_allowed,
)
from .memory.beam_memory import BeamMemory
from .memory.kv_memory import KVMemory, retire_unwanted, take_back_unfilled
from .memory.nonfinite_guard import NonFiniteGuard
from .memory.self_check import check_and_contain, check_invariants
from .memory.transfer_rates import TransferRates
from .offload import OffloadScheduler
from .outcome import FinishReason, RequestRefused
from .pins import PinManager
from .policies.fill_time import FillTime
from .policies.policy import PolicyTools, SchedulePolicy
from .policies.registry import make_policy
from .prefill import DecodeReserve, PrefillScheduler
from .preparations import Preparations
from .queues import LiveRequests, WaitingQueue
from .recovery import Recovery, request_failed
from .request import Request, RequestEvent, RequestFault, RequestStatus
from .request_factory import RequestFactory
from .request_spec import RequestSpec
from .speculation.speculation import Speculation
from .stats import SchedulerCounters, SchedulerStats, take_stats
from .stopping_criteria import StoppingCriteria

logger = logging.getLogger(__name__)

MAX_FAULTS = 3
"""Turns in a row that may fail for a reason that no single request causes: the first ends no request, the second ends
the running ones, the third all of them. One more means that the scheduler itself is broken."""


MakeDecode = Callable[[KVMemory, BeamMemory, DecodeReserve], DecodeScheduler]
"""Makes the part that forms decode steps."""


@dataclass(slots=True, frozen=True)
class EndedJob:
    """The outcome of `Scheduler.end_job`."""

    aborted_rids: list[str]
    """Rids of the job's requests that were open."""
    released_tokens: int
    """Tokens of KV that were pinned for it."""
    events: list[RequestEvent]


class Scheduler:
    """Owns the queues. ``eos_token_ids`` end a request unless it sets ignore_eos.

    RequestRefused is the only exception about a request that leaves it; on any other, the request ends with an error
    and all others continue (recovery.py). The call that ends a request returns the end as an event; `take_events`
    returns the rest.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        req_to_token: ReqToTokenPool,
        allocator: Allocator,
        cache: RadixCache,
        eos_token_ids: tuple[int, ...],
        tier: HostTier | None = None,
        stores: Sequence[BlockTier] = (),
        bytes_per_token: int = 0,
        make_policy: Callable[[str, PolicyTools], SchedulePolicy] = make_policy,
        make_decode: MakeDecode | None = None,
    ) -> None:
        """``req_to_token`` needs max_running_requests + max_leased_requests rows. tier, stores: below the device.
        make_decode: makes another DecodeScheduler, for simulations."""
        self._config, self._bytes_per_token = config, bytes_per_token
        self._cache = cache
        self._counters = SchedulerCounters()
        self._cache_statistics = CacheStatsCollector(cache, config.hit_rate_alert)
        self._fill_time = FillTime(allocator.total_tokens, config.lease_protection)
        times = ToolTimes(config.random_seed or 0, config.learn_tools)
        tools = PolicyTools(cache, self._fill_time, config.pin_time, config.pin_seconds, config.provisional_ttl, times)
        self._policy = make_policy(config.schedule_policy, tools)
        self._leases = LeaseTable(
            cache, lease_budget(config, allocator), value=self._policy.lease_value, has_share=has_share
        )
        host_rates = TransferRates(self._fill_time)
        self._history = CacheHistory(cache, int(config.cache_history * allocator.total_tokens))
        self._memory = KVMemory(
            req_to_token, allocator, cache, self._leases, tier, host_rates, self._history, config.step_tokens
        )
        self._beams = BeamMemory(self._memory)
        self._reserve = DecodeReserve(allocator.page_size)
        self._prefill = PrefillScheduler(
            self._memory, self._policy, self._reserve, CacheReporter(cache, self._history), config
        )
        self._stopping_criteria = StoppingCriteria(eos_token_ids)
        self._speculation = Speculation(config, self._memory, self._stopping_criteria)
        if make_decode is None:
            self._decode = DecodeScheduler(self._memory, self._beams, self._speculation)
        else:
            self._decode = make_decode(self._memory, self._beams, self._reserve)
        self._factory = RequestFactory(config, allocator, self._stopping_criteria)
        self._continuations = Continuations(config, self._memory, self._beams, self._leases)
        self._pins = PinManager(tools, self._leases, self._policy, config.max_jobs, config.max_recognized_turns)
        self._waiting, self._live = WaitingQueue(), LiveRequests()
        self._preparations = Preparations(
            self._memory,
            self._leases,
            self._continuations,
            self._live,
            self._factory,
            lambda now: self._cache_statistics.tick_times.tick_by(now - self._fill_time.seconds),
            config.step_tokens,
        )
        self._nonfinite_guard = NonFiniteGuard(self._memory, self._live)
        self._offload = OffloadScheduler(self._memory, self._live, self._waiting, self._fill_time, host_rates, stores)
        self._recovery = Recovery(
            self._memory,
            self._beams,
            self._live,
            self._waiting,
            self._offload,
            self._prefill,
            self._decode,
            self._continuations,
            self._pins,
            self._speculation,
        )
        self._events: list[RequestEvent] = []
        """Events that no call has returned yet."""
        self._processing: tuple[PlannedStep, set[Request]] | None = None
        """The step with the result that is being processed, and the requests that are done with it."""
        self._faults_in_a_row = 0
        self._compiling: list[Request] = []
        """Requests with a constraint that was not ready when they came. They enter no step before it is."""
        self._in_flight: list[PlannedStep] = []
        self._closed: list[int] = []  # serials of ended sequences; the next step tells the step runner of them
        self._extends_in_a_row = 0

    # -- arrivals -----------------------------------------------------------------------------------------------------

    def add_request(
        self,
        spec: RequestSpec,
        now: float,
        *,
        own_ids: np.ndarray | None = None,
        constraint: Constraint | None = None,
        adapter: str = "",
    ) -> list[Request]:
        """Queue or park ``spec.sampling.num_requests`` sequences. Raises RequestRefused if they can never be served.

        own_ids: int32 [n], the request's own tokens where they differ from the spec's (see request_spec.py).
        constraint: the object that the spec names. adapter: the key of the adapter that it names.
        """
        requests: list[Request] = []
        is_ready = constraint is None or constraint.is_ready
        if constraint is not None and is_ready and (refusal := constraint.failure()) is not None:
            raise refusal
        try:
            if spec.rid in self._live:
                raise duplicate_rid(spec.rid)
            check_queue(spec, self._offload.num_waiting + self._continuations.num_parked, self._config)
            requests = self._factory.make_requests(spec, now, own_ids, constraint, adapter)
            handover = self._continuations.find_prompt(requests, self._live, self._pins.find_job(requests, now))
            if handover is not None:
                self._inherit(requests, handover, now)
                self._offload.queue_requests(requests, now)
            self._pins.record_arrival(requests, now)
            self._preparations.record_arrival(requests)
            self._continuations.forget_record(spec.rid)
            self._live.add_siblings(spec.rid, requests)
            if not is_ready:
                self._compiling += requests
                for request in requests:
                    request.awaits_constraint = True
        except RequestRefused:
            raise
        except Exception as error:
            # Its name may be another's that is live: only what was made here ends.
            self._recover(error, [request for request in self._live.siblings_of(spec.rid) if request in requests], now)
            self._recovery.forget_refused(requests)
            self._events = [event for event in self._events if event.request not in requests]
            raise request_failed(error) from error
        return list(requests)

    def _inherit(self, children: list[Request], handover: Handover, now: float) -> None:
        """Give the sequences of one rid their prompt and their inheritance. Raises RequestRefused."""
        self._factory.set_prompt(children, handover.prompt)
        for child in children:
            known = handover.diverged_at
            child.diverged_at = child.spec.diverged_at if known is None else known
        self._continuations.hand_over(children, handover, now)

    def _wake_children(
        self, parent: Request, samples: dict[int, SampleRecord], now: float
    ) -> list[tuple[Request, RequestRefused]]:
        """Queue the parked children of a parent that has ended. Returns those that cannot continue, and why."""
        woken: list[Request] = []
        refused: list[tuple[Request, RequestRefused]] = []
        for children, handover in self._continuations.take_children(parent, samples):
            try:
                if isinstance(handover, RequestRefused):
                    raise handover
                self._inherit(children, handover, now)
                woken += children
            except RequestRefused as refusal:
                refused += [(child, refusal) for child in children]
            except Exception as error:
                logger.exception("a request could not continue from its parent and ends with an error")
                refused += [(child, request_failed(error)) for child in children]
        self._offload.queue_requests(woken, now)
        return refused

    # -- ends ---------------------------------------------------------------------------------------------------------

    def abort_request(self, rid: str, now: float, message: str = "aborted by the client") -> list[RequestEvent]:
        """End every sequence of ``rid`` now. Unknown rids give no events."""
        return self._abort_and_take(self._live.siblings_of(rid), now, message)

    def abort_all_requests(self, now: float, message: str) -> list[RequestEvent]:
        self._preparations.clear()
        return self._abort_and_take(self.live_requests, now, message)

    def time_out(self, now: float) -> list[RequestEvent]:
        """End the requests that are older than --request-timeout."""
        if not (limit := self._config.request_timeout) or not (late := self._live.rids_before(now - limit)):
            return []
        refusal = timed_out(limit)
        events = self._abort_and_take([self._live.siblings_of(rid)[0] for rid in late], now, refusal.message)
        for event in events:
            event.refusal = event.refusal or refusal
        return events

    def contain(self, error: Exception, at_fault: Sequence[Request], now: float) -> list[RequestEvent]:
        """End requests after an exception outside the scheduler that they caused, with an error for their clients, and
        repair any state that it left half changed here."""
        self._recover(error, at_fault, now)
        return self.take_events()

    def take_events(self) -> list[RequestEvent]:
        """Return the events that earlier calls have not returned: ends of requests that failed meanwhile."""
        events, self._events = self._events, []
        return events

    def _abort_and_take(self, requests: Sequence[Request], now: float, message: str) -> list[RequestEvent]:
        self._abort_each(requests, now, message)
        return self.take_events()

    def _abort_each(self, requests: Sequence[Request], now: float, message: str) -> list[RequestEvent]:
        """End every sequence of the rids of these requests. The events stay in ``_events`` for the caller to take."""
        first, reason = len(self._events), FinishReason(type="abort", message=message)
        for rid in dict.fromkeys(request.rid for request in requests):
            try:
                while rid in self._live:
                    self._end(RequestEvent(self._live.siblings_of(rid)[0], finish=reason), now)
            except Exception as error:
                self._recover(error, self._live.siblings_of(rid), now)
        return self._events[first:]

    def _refuse(self, requests: list[Request], refusal: RequestRefused, now: float) -> None:
        """End requests with invalid output, siblings included; their clients get an error. Skips those that have ended
        already."""
        rids = {request.rid for request in requests if request.finish is None}
        events = self._abort_each([request for request in requests if request.rid in rids], now, refusal.message)
        for event in events:
            if event.request.rid in rids:
                event.refusal = refusal

    def _recover(self, error: BaseException | None, at_fault: Sequence[Request], now: float) -> None:
        """Recover from an exception that left state half changed: end the requests at fault, repair the rest."""
        steps = [(step, set[Request]()) for step in self._in_flight]
        if self._processing is not None:
            steps.insert(0, self._processing)
        chunk = self._preparations.request_in_flight
        if chunk is not None and not any(chunk in step.requests for step, _ in steps):
            at_fault = [*at_fault, chunk]  # its step was not formed, and it waits in no queue
        rids = ", ".join(sorted({request.rid for request in at_fault}))[:200] or "no request in particular"
        logger.error("an exception while %s was handled; it is contained", rids, exc_info=error)
        shown = error if isinstance(error, Exception) else RuntimeError()
        failure = request_failed(shown)
        events: list[RequestEvent] = []
        try:
            self._recovery.recover(at_fault, failure, steps, self._closed, events, now)
        except Exception:
            logger.exception("the recovery failed; every request ends, and the KV cache starts afresh")
            self._recovery.end_all(failure, self._closed, events)
        self._preparations.drop_failed()
        events = [event for event in events if not event.request.is_preparation]
        self._counters.failed_requests += len({event.request.rid for event in events if event.refusal is failure})
        self._events += events

    def _end(self, event: RequestEvent, now: float, kept_tokens: int | None = None) -> None:
        """End a sequence: give its KV to the tree or a lease, record it, and wake its children.

        kept_tokens: output tokens that a child inherits; None for all. The events of the call get ``event``, then the
        end of every request that waited for this one in vain, directly or through others.
        """
        ended = [event]
        fence = self._in_flight[-1].fence if self._in_flight else None  # of the newest step; older ones end before it
        for current in ended:  # grows while children are refused
            request, reason = current.request, current.finish
            is_preparation = request.is_preparation
            assert reason is not None
            request.finish = reason
            self._leave(request, now)
            self._speculation.keep_output(request)
            samples: dict[int, SampleRecord] = {}
            if is_preparation:
                self._preparations.end_chunk(request, reason)
            elif request.spec.pooling is not None:
                pass  # nothing continues it, and thousands of them must not crowd conversations out of the record
            elif reason.type != "abort":
                self._pins.extend_retention(request, now)
                samples = self._continuations.record_end(request, kept_tokens, now, fence)
            elif current.refusal is None:
                self._continuations.record_failure(request)
            if request.kv is not None:  # retained KV is in a lease by now
                if kept_tokens is not None and request is event.request:
                    self._memory.cut_states(request, request.prompt_len + kept_tokens, fence)
                self._close(request, fence)
            retire_unwanted(self._memory.cache, request)
            request.status = RequestStatus.FINISHED
            self._pins.record_end(request, samples, now)
            if request.is_open:
                self._closed.append(request.serial)
            self._live.remove_request(request)
            if not is_preparation:  # nothing may fail between the two: its client would wait for ever
                self._events.append(current)
            for child, refusal in self._wake_children(request, samples, now):
                gone = FinishReason(type="abort", message=refusal.message)
                ended.append(RequestEvent(child, finish=gone, refusal=refusal))

    def _leave(self, request: Request, now: float) -> None:
        """Remove a request from the queue or set that holds it."""
        if request.status is RequestStatus.PARKED:
            self._continuations.unpark_child(request)
        elif request.status in (RequestStatus.WAITING, RequestStatus.LOADING):
            self._offload.remove_request(request)
            self._continuations.give_claim_back(request, now)
        else:
            self._stop_computing(request)

    def _stop_computing(self, request: Request) -> None:
        if not self._prefill.stop_prefilling(request):
            self._decode.remove_running(request)

    def _close(self, request: Request, fence: int | None) -> None:
        """Give back all that a request holds. fence: that of a step in flight, which may still write for it."""
        self._beams.close_search(request, fence)
        self._memory.close_request(request, fence)

    # -- steps ------------------------------------------------------------------------------------------------------

    def next_batch(self, now: float) -> ScheduleBatch | None:
        """Form the next step, prompts before decodes. None if there is none before the one in flight has ended."""
        try:
            step = self._form_step(now)
        except RequestFault as fault:
            self._recover(fault.__cause__, [fault.request], now)
            return None
        except Exception as error:
            self._faults_in_a_row += 1
            if self._faults_in_a_row > MAX_FAULTS:
                raise
            running = [request for request in self._live if request.kv is not None]
            at_fault: dict[int, list[Request]] = {1: [], 2: running}
            self._recover(error, at_fault.get(self._faults_in_a_row, self.live_requests), now)
            return None
        self._faults_in_a_row = 0
        if step is None:
            return None
        try:
            admitted = self._counters.count_step(step)
            for request in admitted:
                self._preparations.record_admission(request)
            self._cache_statistics.count_admissions(admitted)
        except Exception:
            logger.exception("a step could not be counted")
        return step.batch

    def _form_step(self, now: float) -> PlannedStep | None:
        """Form a step. An exception halfway discards the step, and recovery.py undoes its changes to requests."""
        self._advance_time(now)
        self._leases.expire(now)
        try:
            self._pins.settle_pins(now)
        except Exception:
            logger.exception("what became of pins could not be counted; requests are not affected")
        self._offload.release_overdue(now)
        if self._compiling:
            self._refuse_uncompiled(now)
        step = self._next_prefill_step(now) if not self._decode_is_due() else None
        if step is None and self._decode.running:
            step = self._next_decode_step(now)
            if step is None and not self._decode.running and not self._in_flight:
                step = self._next_prefill_step(now)  # all were retracted, so there is memory
        if step is None and not self._live and not self._in_flight:
            step = self._form_preparation(now)
        if step is None:
            return None
        if not step.is_preparation:
            self._preparations.note_step()
        step.formed, step.fence = now, self._memory.allocator.fences.open_fence()
        if self._memory.states is not None:
            step.batch.states = self._memory.states.plan_rows(step)
        if self._memory.windows is not None:
            step.batch.windows = self._memory.windows.plan_slots(step.batch)
        self._memory.copies.confirm_taken()
        # From here on nothing can fail.
        step.batch.closed, self._closed = self._closed, []
        for request in step.opened:
            request.is_open = True
        self._in_flight.append(step)
        if not step.is_preparation:
            self._extends_in_a_row = 0 if step.serves_running else self._extends_in_a_row + 1
        return step

    def _next_prefill_step(self, now: float) -> PlannedStep | None:
        in_flight = [*self._in_flight]
        return self._prefill.next_batch(self._waiting, self._decode, in_flight, step_id=self._counters.steps, now=now)

    def _refuse_uncompiled(self, now: float) -> None:
        """End the requests whose constraint could not be made."""
        ready = [r for r in self._compiling if r.finish is not None or r.constraint is None or r.constraint.is_ready]
        self._compiling = [request for request in self._compiling if request not in ready]
        for request in ready:
            request.awaits_constraint = False
        for request in ready:
            if request.finish is None and request.constraint is not None:
                refusal = request.constraint.failure()
                refusal = refusal or output_too_short(request.constraint, request.sampling.max_new_tokens)
                if refusal is not None:
                    self._refuse([request], refusal, now)

    def _form_preparation(self, now: float) -> PlannedStep | None:
        step = self._preparations.form_step(self._counters.steps, now)
        if step is not None:
            self._decode.add_running(step.requests[0])  # until its step has ended, as any request without output
        return step

    def _decode_is_due(self) -> bool:
        """True after a chunk of a long prompt, or after several extends in a row: running requests then get a token."""
        most = self._config.decode_interval if self._prefill.prefilling is None else 1
        return self._extends_in_a_row >= most and bool(self._decode.running)

    def _next_decode_step(self, now: float) -> PlannedStep | None:
        previous = self._in_flight[-1].batch if self._in_flight else None
        while True:
            try:
                return self._decode.next_batch(self._counters.steps, previous, now)
            except NoFreeSlots:
                if self._in_flight or self._offload.copies_under_way:
                    return None  # retraction needs to know every token, and what is being copied cannot be evicted
                self._retract(self._policy.victim(self._decode.running, self._prefill.prefilling, now))

    def _retract(self, request: Request) -> None:
        self._stop_computing(request)
        self._close(request, None)
        request.status, request.retractions = RequestStatus.WAITING, request.retractions + 1
        self._counters.retractions += 1
        self._reserve.reset_ratio()
        self._waiting.add_requests([request])

    def add_masks(self, now: float) -> None:
        """Fill in the masks of the newest step in flight, which lacked some when it was formed, once the step before it
        has been processed. Requests whose constraint raises end with an error."""
        step = self._in_flight[-1]
        while step.batch.lacks_masks:
            try:
                add_masks(step)
            except RequestFault as fault:
                self._recover(fault.__cause__, [fault.request], now)

    def ends_within_token(self, result: StepResult) -> list[tuple[Request, StopMatch]]:
        """The requests that ``result`` will end within a token (`StoppingCriteria.cuts_token`), each with its match."""
        return self._stopping_criteria.ends_within_token(self._in_flight[0].requests, result)

    def process_result(self, result: StepResult, now: float) -> list[RequestEvent]:
        """Commit the result of the oldest step in flight. Returns the events for clients: requests, then searches."""
        step = self._in_flight.pop(0)
        self._processing = step, set()
        try:
            self._process(step, result, now)
        except Exception as error:
            self._recover(error, step.requests, now)
        self._end_step(step, now)
        return self.take_events()

    def _process(self, step: PlannedStep, result: StepResult, now: float) -> None:
        assert self._processing is not None
        batch, done, first = step.batch, self._processing[1], len(self._events)
        try:
            self._advance_time(now)
            self._fill_time.record_step(step.num_prompt_tokens, step.formed, now)
            self._speculation.record_step(step, now)
        except Exception:
            logger.exception("a step could not be measured; its requests are not affected")
        if result.failed_rows:
            self._end_nonfinite(step.requests, result.failed_rows, now)
        if result.forbidden_rows:
            self._refuse([step.requests[row] for row in result.forbidden_rows], token_not_allowed(), now)
        if result.unchecked_rows:
            self._refuse([step.requests[row] for row in result.unchecked_rows], stop_check_failed(), now)
        lengths, samples = batch.seq_lens.tolist(), batch.samples.tolist()
        for row, (request, token_ids) in enumerate(zip(step.requests, result.rows(), strict=True)):
            if request.finish is not None or request.beam_kv is not None:
                continue  # it ended while this step was in flight, so its token is not wanted; or it is a beam
            if request.beams is None:
                done.add(request)
            try:
                request.commit(lengths[row])
                if samples[row] and request.beams is None:
                    taken, ending = self._stopping_criteria.take_tokens(
                        request, token_ids, result.stop_matches.get(row)
                    )
                    self._speculation.settle_draft(batch, row, request, len(token_ids), len(taken))
                    event = RequestEvent(request, row, taken, ending.reason if ending is not None else None)
                    begun = result.stop_begins.get(row)
                    request.cut_len = None if begun is None else request.prompt_len + begun
                    if ending is None:
                        self._events.append(event)
                    else:
                        self._end(event, now, ending.kept_tokens)
                elif self._stopping_criteria.ends_with_prompt(request):
                    self._end(RequestEvent(request, row, finish=FinishReason(type="length")), now)
                if request.kv is not None:
                    if row < step.num_prompts:
                        self._memory.publish(request)
                    self._memory.settle_window(request)
            except Exception as error:
                self._drop_news(request)
                self._recover(error, [request], now)
        self._settle_states(step, result, now)
        for search, candidates in zip(step.searches, result.beams, strict=True):
            if search.finish is None:
                done.add(search)
                try:
                    reason = self._beams.advance_search(search, candidates, self._stopping_criteria.end_ids(search))
                    if reason is not None:
                        self._end(RequestEvent(search, finish=reason), now)
                except Exception as error:
                    self._recover(error, [search], now)
        try:
            if not step.is_preparation:
                self._preparations.note_success()
            if len(batch) > step.num_prompts:
                self._reserve.lower_ratio()
            self._counters.count_outputs(self._events[first:], step.searches)
        except Exception:
            logger.exception("what a step brought could not be counted; its requests are not affected")

    def _settle_states(self, step: PlannedStep, result: StepResult, now: float) -> None:
        """Give up the states that nothing can use any more, now that a step's result is known."""
        states = self._memory.states
        if states is None or states.settle_run(step.batch.step_id, bool(result.stop_begins)):
            return
        for request in step.requests:
            if request.finish is not None or request.kv is None or request.beam_kv is not None:
                continue
            try:
                self._memory.settle_states(request)
            except Exception as error:
                self._drop_news(request)
                self._recover(error, [request], now)

    def _end_nonfinite(self, requests: Sequence[Request], failed_rows: Mapping[int, int], now: float) -> None:
        """End the requests in these rows of a step, siblings included; none of the KV they may have spoiled is shared
        or found again. ``requests``: one for each row; ``failed_rows``: see `StepResult`."""
        spoiled = self._nonfinite_guard.withhold_kv(requests, failed_rows)
        if not spoiled.requests:
            return
        self._counters.nonfinite_requests += spoiled.num_rids
        self._refuse(spoiled.requests, logits_not_finite(), now)
        self._nonfinite_guard.drop_kv(spoiled)

    def _drop_news(self, request: Request) -> None:
        """Drop the events of a request that is about to fail: its client gets only the error."""
        if request.finish is None:
            self._events = [event for event in self._events if event.request is not request]

    def _end_step(self, step: PlannedStep, now: float) -> None:
        """Close the fence of a step that ended or failed, which frees the pages that waited for it."""
        self._processing = None
        try:
            self._memory.close_fence(step.fence)
        except Exception as error:
            self._recover(error, [], now)

    def fail_step(self, now: float, message: str) -> list[RequestEvent]:
        """End the requests of the oldest step in flight, which could not be computed, siblings included; keep the
        others. ``message`` says why, for the clients."""
        step = self._in_flight.pop(0)
        batch = step.batch
        self._processing = step, set()
        self._closed += batch.closed  # it may not have got as far as the step runner; to close twice does no harm
        try:
            if step.is_preparation:
                self._preparations.note_failure()
            self._memory.req_to_token.put_back(batch.row_updates)
            failed = [request for request in step.requests if request.finish is None]
            if len(batch.copies):
                self._leases.break_all()  # one of them may hold a copy that was never made
                failed += take_back_unfilled(self._memory.req_to_token.rows, batch.copies.target, self.live_requests)
            self._refuse(failed, forward_failed(message), now)
        except Exception as error:
            self._recover(error, step.requests, now)
        self._end_step(step, now)
        return self.take_events()

    # -- transfers between tiers --------------------------------------------------------------------------------------

    def take_transfer_orders(self, now: float) -> list[TierCopy | BlockOrder]:
        """The copies, reads, writes and queries that are due. They must be ordered before the step that was formed last
        is launched: it may read what they bring."""
        return self._offload.take_orders(now)

    def finish_copy(self, fence: int, ok: bool, now: float, seconds: float = 0.0) -> list[RequestEvent]:
        """Take note that a copy between device and host has ended, well or not. Call it once for each copy. Returns the
        ends of requests that a failed load left without their KV. ``seconds``: duration of the copy itself."""
        self._refuse(self._offload.finish_copy(fence, ok, seconds), kv_load_failed(), now)
        return self.take_events()

    def finish_block_order(self, fence: int, blocks: int, now: float, seconds: float = 0.0) -> None:
        """An order to a store has ended, with ``blocks`` blocks done; requests that wait for it queue for admission.
        ``seconds``: duration of the order itself."""
        self._offload.finish_block_order(fence, blocks, now, seconds)

    # -- leases and continuations -------------------------------------------------------------------------------------

    def expire_leases(self, now: float) -> None:
        """Release the leases that are past their deadline. `next_batch` does this too."""
        self._leases.expire(now)

    @property
    def next_lease_deadline(self) -> float | None:
        """When the first lease expires; None without one that has a deadline."""
        return self._leases.next_deadline()

    def release_leases(self, rid: str) -> bool:
        """Give up the leases of a finished request; its ids stay on record. False if it has none."""
        return self._continuations.release_leases(rid)

    def is_on_record(self, rid: str) -> bool:
        """True if ``rid`` has ended and can still be named as a parent."""
        return self._continuations.is_on_record(rid)

    def forget_record(self, rid: str) -> None:
        """Take a finished request off the record, as if it had never existed."""
        self._continuations.forget_record(rid)

    def children_waiting_for(self, rid: str, index: int) -> list[Request]:
        """Continuations that are parked until this sequence ends."""
        return self._continuations.waiting_for(rid, index)

    def describe_leases(self, now: float, after: int, limit: int, client: str | None = None) -> dict[str, Any]:
        """A page of the live leases, for JSON; see continuation/records.py."""
        return describe_leases(self._leases, self._continuations.leased(), now, after, limit, client)

    def live_leases(self) -> list[Lease]:
        return self._leases.live()

    def named_leases(self) -> dict[Lease, tuple[str, int]]:
        """The live leases of requests on record, with the rid and index of their sequence."""
        return self._continuations.leased()

    def leases_of(self, rid: str) -> dict[int, Lease]:
        """The live leases of a finished request, by index."""
        return self._continuations.leases_of(rid)

    @property
    def lease_counts(self) -> LeaseCounts:
        """Counts of granted and ended leases since start; must not be changed."""
        return self._leases.counts

    # -- jobs ---------------------------------------------------------------------------------------------------------

    def record_tool_calls(self, rid: str, index: int, calls: tuple[ToolCall, ...], now: float) -> None:
        """A finished step of a job called these tools, as its text says; its pin is extended or given up. If it was
        refused one as a first turn that may never be continued, it gets one now. Steps that are not known are
        ignored."""
        terms = self._pins.record_calls(rid, index, calls, now)
        lease = self._continuations.lease_sample(rid, index, terms) if terms is not None else None
        if lease is not None:
            self._pins.record_late_lease(rid, index, lease, now)

    @property
    def adapters_in_use(self) -> set[str]:
        """Keys of the adapters of all live requests."""
        return {request.adapter for request in self._live if request.adapter}

    def set_adapters(self, keys: Set[str]) -> None:
        """Set the adapters that are loaded. Live requests of another continue; it prepares no more turns."""
        self._preparations.adapters = frozenset(keys)

    def prepare_turn(self, rid: str, index: int, ids: np.ndarray) -> None:
        """The next prompt of a finished step's job will begin with ``ids``, int32 [n]: compute them while nothing else
        is to be done; see preparations.py. Steps that are not known are ignored."""
        self._preparations.add_preparation(self._pins.find_step(rid, index), ids)

    def end_job(self, namespace: str, job_id: str, now: float) -> EndedJob | None:
        """Give up all that is kept for a job, and end its open requests. None if it is not known."""
        ended = self._pins.end_job(namespace, job_id)
        if ended is None:
            return None
        open_rids, pinned_tokens = ended
        requests = [request for rid in open_rids for request in self._live.siblings_of(rid)]
        return EndedJob(open_rids, pinned_tokens, self._abort_and_take(requests, now, "aborted: its job was ended"))

    def describe_jobs(
        self, namespace: str | None, job_id: str | None, now: float, prefix: str = ""
    ) -> list[dict[str, Any]]:
        """Describe jobs for JSON: those of a namespace (None: of all) with ids that begin with ``prefix``, or the one
        of this id; see `describe_job`."""
        return self._pins.describe_jobs(namespace, job_id, now, prefix)

    def unended_jobs(self) -> list[Job]:
        """Jobs that are not over, or that still have open requests; the most recently active comes first."""
        return self._pins.unended_jobs()

    def trace_jobs(self) -> None:
        """Record the events of jobs from now on, for `take_job_events`."""
        self._pins.trace.enabled = True

    def take_job_events(self) -> list[dict[str, Any]]:
        """The events of jobs since the last call, one plain dict each; see `JobTrace`."""
        return self._pins.trace.take_events()

    def save_tool_times(self) -> bytes:
        """The durations of tools that were seen, for `load_tool_times` of a later server."""
        return self._pins.times.save()

    def load_tool_times(self, saved: bytes) -> None:
        """Raises ValueError if ``saved`` is not what `save_tool_times` returned."""
        self._pins.times.load(saved)

    # -- state ------------------------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        """True when no request is live and no step is in flight. Preparations that wait do not count."""
        return not self._live and not self._in_flight

    @property
    def is_compiling(self) -> bool:
        """True while requests wait for their constraints."""
        return bool(self._compiling)

    @property
    def live_requests(self) -> list[Request]:
        return list(self._live)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for admission, or for their prefix to be loaded."""
        return self._offload.num_waiting

    @property
    def num_parked(self) -> int:
        """Continuations that wait for their parent to end."""
        return self._continuations.num_parked

    def live_of(self, rid: str) -> list[Request]:
        """The sequences of a rid that have not ended."""
        return list(self._live.siblings_of(rid))

    def self_check(self, now: float) -> list[RequestEvent]:
        """Check that every page of the pool has one owner, and contain the damage if not; see memory/self_check.py.
        Returns the ends of requests that had to fail. A step may be in flight."""
        holders = [request for request in self.live_requests if request.kv is not None]
        found = check_and_contain(self._memory, self._beams, holders)
        self._counters.leaked_tokens += found.leaked_tokens
        self._counters.leaked_states += found.leaked_states
        self._counters.leaked_window_tokens += found.leaked_window_tokens
        if not found.was_reset:
            return []
        self._refuse(holders, kv_cache_damaged(), now)
        return self.take_events()

    def check_invariants(self) -> None:
        """Check every invariant from scratch, which takes a look at the whole pool: for simulations and tests. A step
        may be in flight. Raises InvariantError."""
        check_invariants(self._memory, self._beams, self.live_requests)

    def flush_cache(self) -> bool:
        """Forget all cached prefixes, leased ones too, and the past outputs. False, and no change, if a request is
        open; the chunk of a preparation ends for it."""
        chunk = self._preparations.request_in_flight
        if any(request is not chunk for request in self._live) or any(not s.is_preparation for s in self._in_flight):
            return False
        self._preparations.clear()
        if chunk is not None:
            self._end(
                RequestEvent(chunk, finish=FinishReason(type="abort", message="the cache was flushed")), chunk.arrival
            )
        self._leases.break_all()
        self._speculation.forget_outputs()
        return self._memory.cache.reset(self._in_flight[-1].fence if self._in_flight else 0)

    def stats(self) -> SchedulerStats:
        return take_stats(
            self._counters,
            self._cache,
            self._leases,
            num_running=sum(not request.is_preparation for request in self._decode.running)
            + (self._prefill.prefilling is not None),
            num_waiting=self.num_waiting,
            prefill_tokens_per_s=self._fill_time.tokens_per_s,
            fill_time_s=self._fill_time.seconds,
            bytes_per_token=self._bytes_per_token,
            tiers=self._offload.stats(),
            jobs=self._pins.stats(),
            preparations=self._preparations.stats(),
            drafts=self._speculation.counts,
            cache_stats=self._cache_statistics.since_start(),
        )

    # -- statistics ---------------------------------------------------------------------------------------------------

    def advance_statistics(self, now: float) -> None:
        """Advance the windows of the cache's statistics. Call it once a turn, before the cache changes."""
        self._advance_time(now)

    def _advance_time(self, now: float) -> None:
        """Set the time of all later changes of the cache."""
        self._cache_statistics.set_time(now)
        self._history.now = now

    @property
    def hit_rate_alert(self) -> float:
        """The hit rate of the cache below which the log warns; 0: never."""
        return self._config.hit_rate_alert

    def cache_stats_since_reset(self) -> CacheStats:
        return self._cache_statistics.since_reset()

    def reset_cache_statistics(self) -> None:
        """Set `cache_stats_since_reset` and the windows back to zero."""
        self._cache_statistics.reset()

    def packed_tick_times(self) -> tuple[bytes, bytes]:
        """(int64 ticks, float64 seconds): when the ticks of the cache's nodes happened."""
        return self._cache_statistics.tick_times.packed()

    def walk_tree(self, *, with_heads: bool) -> TreeWalk:
        """A walk over the cache's tree, in as many slices as the caller likes. with_heads: with the first token ids of
        each node."""
        return TreeWalk(self._cache, with_heads=with_heads)
