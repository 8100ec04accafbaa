"""The worker's main loop: finish a step, take messages, form the next step, launch it.

Start with `EventLoop.turn`; the other methods are what it calls.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..scheduler.batch import ScheduleBatch, StopMatch
from ..scheduler.outcome import RequestRefused
from ..scheduler.recovery import request_failed
from ..scheduler.request import Request, RequestEvent
from ..scheduler.request_spec import RequestSpec
from ..scheduler.scheduler import Scheduler
from ..scheduler.token_buffer import unpack_ids
from .channels import Receiver, Sender
from .constraints.grammars import Grammars
from .constraints.item_tries import ItemTries
from .constraints.resolve import resolve_constraint
from .control import Control
from .job_records import JobRecords
from .kv_events.publisher import KVEventPublisher
from .kv_transfer.tier_io import BlocksEnded, TierIO
from .live_reports.reporter import LiveReporter
from .lora.adapter_config import AdapterError
from .lora.adapters import Adapters
from .messages import (
    AbortRequest,
    DescribeJobs,
    DescribeLeases,
    EndJob,
    LoadAdapter,
    PrepareTurn,
    ReleaseRequest,
    RequestError,
    StepCalls,
    ToWorker,
    UnloadAdapter,
    WalkTree,
    WatchRequests,
)
from .outputs import OutputBuilder
from .runner.cpu_threads import WatchThreads
from .runner.step_profile import StepProfiler
from .step_runner import StepInFlight, StepOutput, StepRunner
from .text.continuation_suffixes import ContinuationSuffixes

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
"""Seconds from one stats message to the next, busy or idle. An idle loop sleeps no longer than this."""

POLL_S = 0.005
"""Seconds between checks of a loop without other work for ended copies between the tiers, and for compiled grammars.
The threads that make them also wake it."""

IDLE_WORK_S = 1.0
"""Seconds without a request after which idle work begins."""

MAX_FAILED_STEPS = 3
"""Failed steps in a row after which the worker gives up: then the device is broken, not a request."""


@dataclass(slots=True)
class _Launched:
    """A step in flight. If its launch failed, ``step`` is the exception; earlier steps are still committed first."""

    batch: ScheduleBatch
    step: StepInFlight | Exception

    @property
    def lacks_tokens(self) -> bool:
        """It is sampled only once the step before it is committed."""
        return not isinstance(self.step, Exception) and self.step.sampled is None

    @property
    def must_end_first(self) -> bool:
        """No other step may be launched before this one is committed."""
        return isinstance(self.step, Exception) or bool(self.batch.beams)


class EventLoop:
    """Each turn finishes the step that the previous turn launched.

    With ``overlap`` it finishes the step before that one: while the device works on a step, the host forms and
    launches the next. Steps with a beam search are not overlapped: the loop waits for them.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        step_runner: StepRunner,
        inbox: Receiver[ToWorker],
        outbox: Sender,
        suffixes: ContinuationSuffixes,
        item_tries: ItemTries,
        grammars: Grammars,
        adapters: Adapters,
        info: dict,
        profiler: StepProfiler,
        overlap: bool = False,
        clock: Callable[[], float] = time.monotonic,
        watch_threads: WatchThreads = lambda now, *, after_idle_work: None,
        idle_work: Callable[[], float | None] | None = None,
        tier_io: TierIO | None = None,
        job_records: JobRecords | None = None,
        kv_events: KVEventPublisher | None = None,
    ) -> None:
        """clock: in seconds. A turn reads it once for all its decisions. watch_threads: called before each step with
        that time, see `runner/cpu_threads.py`. idle_work: does a piece of work for which no request may be open, and
        returns the seconds until the next one, or None when all is done. tier_io: executes the transfers that the
        scheduler's tiers order; None without tiers. job_records: records the events of jobs. kv_events: publishes the
        contents of the cache."""
        self._scheduler = scheduler
        self._step_runner = step_runner
        self._inbox = inbox
        self._outbox = outbox
        self._suffixes = suffixes
        self._item_tries = item_tries
        self._grammars = grammars
        self._adapters = adapters
        self._info = info
        scheduler.set_adapters(adapters.named_keys)
        self._control = Control(scheduler, item_tries, profiler, info, outbox)
        self._live_reports = LiveReporter(scheduler, outbox, clock)
        self._profiler = profiler
        self._overlap = overlap
        self._clock = clock
        self._watch_threads = watch_threads
        self._idle_work = idle_work
        self._idle_since = clock()
        self._next_idle_work = 0.0
        self._did_idle_work = False
        """True if idle work has been done since the last step."""
        self._tier_io = tier_io
        self._job_records = job_records
        self._kv_events = kv_events
        self._outputs = OutputBuilder()
        self._in_flight: deque[_Launched] = deque()
        self._last_launched: ScheduleBatch | None = None
        self._next_heartbeat = 0.0
        self._failed_steps = 0

    def run(self, stop: threading.Event) -> None:
        """Serve until ``stop`` is set."""
        while not stop.is_set():
            self.turn()

    def turn(self) -> None:
        finished = self.finish_steps()
        messages = self.receive_messages(has_news=bool(finished))
        now = self._clock()
        self.run_observer(lambda: self._scheduler.advance_statistics(now))
        self.end_transfers(now)
        for batch, output in finished:
            self.commit_step(batch, output, now)
        if (late := self.sample_waiting_step(now)) is not None:
            finished.append(late)
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + HEARTBEAT_S
            self.run_contained(lambda: self.audit_pages(now), now)
            self.run_observer(lambda: self.send_heartbeat(now))
            self.run_observer(self.drop_unused_adapters)
        self.run_contained(self.end_adapter_loads, now)
        for message in messages:
            self.handle_message(message, now)
        self.run_contained(lambda: self.end_overdue_requests(now), now)
        self._profiler.lap("receive")
        batch = self.next_batch(now)
        self._profiler.lap("schedule")
        failure = None
        if self._tier_io is not None:
            failure = self.run_contained(lambda: self.submit_transfer_orders(now), now)
            self._profiler.lap("tiers")
        self._last_launched = batch
        if batch is not None:
            self._watch_threads(now, after_idle_work=self._did_idle_work)
            self._did_idle_work = False
            self.launch_step(batch, failure)
        self.run_observer(lambda: self._live_reports.report_turn([ended for ended, _ in finished], batch, now))
        self._outbox.flush()
        if self._kv_events is not None:
            self.run_observer(self._kv_events.publish_events)
        if self._idle_work is not None:
            self.do_idle_work(now, has_steps=bool(finished or batch))
        self._profiler.end_turn(batch)

    def do_idle_work(self, now: float, *, has_steps: bool) -> None:
        """Do a piece of the work that waits for an idle loop, if no request has been open for a while."""
        if has_steps or self._in_flight or not self._scheduler.is_idle or self._control.paused:
            self._idle_since = now
        elif now >= self._idle_work_due and self._idle_work is not None:
            wait = self._idle_work()
            self._did_idle_work = True
            if wait is None:
                self._idle_work = None
            elif wait > 0:
                self._next_idle_work = self._clock() + wait

    @property
    def _idle_work_due(self) -> float:
        return max(self._idle_since + IDLE_WORK_S, self._next_idle_work)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def next_batch(self, now: float) -> ScheduleBatch | None:
        """Form the next step. None while the worker is paused; leases expire even then."""
        if not self._control.paused:
            batch = self._scheduler.next_batch(now)
            if events := self._scheduler.take_events():
                self.send_events(events, now)
            return batch
        self.run_contained(lambda: self._scheduler.expire_leases(now), now)
        return None

    def submit_transfer_orders(self, now: float) -> None:
        """Issue the transfers that the tiers have ordered, before the step formed last is launched."""
        if self._tier_io is not None:
            self._tier_io.submit_orders(self._scheduler.take_transfer_orders(now))

    def launch_step(self, batch: ScheduleBatch, failure: Exception | None = None) -> None:
        """Launch a step. If that raises, the exception takes the step's place and is committed when its turn comes.
        failure: why it cannot be launched; what it reads was not ordered.

        What the sender still holds is delivered when all is prepared: while kernels run, other threads have the
        interpreter to themselves."""
        previous = self._in_flight[-1].step if self._in_flight else None
        assert not isinstance(previous, Exception), "a failed step ends before another is launched"
        try:
            if failure is not None:
                raise failure
            step = self._step_runner.launch(batch, previous, self._outbox.flush)
        except Exception as error:
            step = error
        self._in_flight.append(_Launched(batch, step))

    def finish_steps(self) -> list[tuple[ScheduleBatch, StepOutput | Exception]]:
        """Finish the steps that are due: all that are in flight. With overlap the newest keeps running, unless the last
        turn launched nothing or the newest must end before another can be launched."""
        due = len(self._in_flight)
        if due and self._overlap:
            newest = self._in_flight[-1]
            due -= newest.lacks_tokens or (self._last_launched is not None and not newest.must_end_first)
        launched = [self._in_flight.popleft() for _ in range(due)]
        return [(each.batch, self.finish_step(each)) for each in launched]

    def finish_step(self, launched: _Launched) -> StepOutput | Exception:
        """Wait for a step. If that raises, or its launch did, the exception takes its output's place."""
        if isinstance(launched.step, Exception):
            return launched.step
        try:
            return self._step_runner.finish(launched.step)
        except Exception as error:
            return error

    def sample_waiting_step(self, now: float) -> tuple[ScheduleBatch, StepOutput | Exception] | None:
        """Sample the newest step, if it waited for tokens of the one before it, which is committed now. If no other may
        be launched before it ends, finish and commit it, and return what it gave."""
        newest = self._in_flight[-1] if self._in_flight else None
        if newest is None or not newest.lacks_tokens:
            return None
        try:
            self._scheduler.add_masks(now)
            self.send_events(self._scheduler.take_events(), now)
            assert not isinstance(newest.step, Exception)
            self._step_runner.sample(newest.step)
        except Exception as error:
            newest.step = error
        if not newest.must_end_first:
            return None
        output = self.finish_step(self._in_flight.pop())
        self.commit_step(newest.batch, output, now)
        return newest.batch, output

    def commit_step(self, batch: ScheduleBatch, output: StepOutput | Exception, now: float) -> None:
        """Let the scheduler process a finished step, and send its outputs to the clients."""
        if isinstance(output, Exception):
            self.fail_step(output, now)
            return
        self._failed_steps = 0
        self.complete_suffixes(output, now)
        events = self._scheduler.process_result(output.result, now)
        self.run_contained(lambda: self.remember_tails(events), now)
        self.send_events(events, now, output=output)
        self._profiler.lap("commit")

    def fail_step(self, error: Exception, now: float) -> None:
        """End the requests of a step that raised, with the reason; all others continue."""
        logger.error("a step failed; its requests end with an error", exc_info=error)
        self._failed_steps += 1
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise error
        reason = f"the forward step failed: {type(error).__name__}: {error}"
        self.send_events(self._scheduler.fail_step(now, reason), now)

    def end_transfers(self, now: float) -> None:
        """Report ended transfers to the scheduler."""
        for ended in self._tier_io.poll() if self._tier_io is not None else ():
            if self.run_contained(lambda ended=ended: self.end_transfer(ended, now), now) is not None:
                # It is not reported again. If the first attempt got that far, there is nothing left to end.
                self.run_contained(lambda ended=ended: self.end_transfer(ended, now), now)

    def end_transfer(self, ended: Any, now: float) -> None:
        if isinstance(ended, BlocksEnded):
            self._scheduler.finish_block_order(ended.fence, ended.blocks, now, ended.seconds)
        elif events := self._scheduler.finish_copy(ended.fence, ended.ok, now, ended.seconds):
            self.send_events(events, now)

    # -- faults --------------------------------------------------------------------------------------------------------

    def run_observer(self, action: Callable[[], object]) -> None:
        """Run an action that only reads the scheduler's state. If it raises, log the exception."""
        try:
            action()
        except Exception:
            logger.exception("statistics, a dashboard or a subscriber could not be served; requests are not affected")

    def run_contained(
        self, action: Callable[[], object], now: float, at_fault: Sequence[Request] = ()
    ) -> Exception | None:
        """Run an action that must not end the loop. If it raises, end the requests at fault with an error, repair state
        that was left half changed, and return the exception."""
        try:
            action()
        except Exception as error:
            self.send_events(self._scheduler.contain(error, at_fault, now), now)
            return error
        return None

    # -- messages ------------------------------------------------------------------------------------------------------

    def receive_messages(self, *, has_news: bool = False) -> Sequence[ToWorker]:
        """Return every waiting message. Without work, or paused, first sleep until one comes, a copy ends, or a
        heartbeat, lease or watcher is due. has_news: finished steps await their commit; do not sleep
        when paused."""
        timeout = 0.0
        copying = self._tier_io is not None and self._tier_io.under_way > 0
        if self._scheduler.is_idle or (self._control.paused and not has_news):
            timeout = self.seconds_to_sleep()
        waits = [copying]
        self.run_observer(lambda: waits.append(self._scheduler.is_compiling))
        # Nothing can run before one of them ends.
        if any(waits) and self._last_launched is None and not self._in_flight:
            timeout = POLL_S if not timeout else min(timeout, POLL_S)
        messages = self._inbox.poll(timeout)
        self._profiler.lap("idle" if timeout else "receive")
        return messages

    def seconds_to_sleep(self) -> float:
        """Seconds until the next timed work, if no message comes."""
        due = [self._next_heartbeat]
        if self._idle_work is not None and not self._control.paused:
            due.append(self._idle_work_due)
        self.run_observer(lambda: due.append(self._live_reports.due))
        self.run_observer(lambda: due.append(_or_never(self._scheduler.next_lease_deadline)))
        return max(0.0, min(due) - self._clock())

    def handle_message(self, message: ToWorker, now: float) -> None:
        """Handle a message. If that raises, its sender gets an error."""
        named: list[Request] = []
        if isinstance(message, AbortRequest) and (rid := message.rid) is not None:
            self.run_observer(lambda: named.extend(self._scheduler.live_of(rid)))
        error = self.run_contained(lambda: self.dispatch_message(message, now), now, named)
        if error is None:
            return
        failure = request_failed(error)
        if isinstance(message, RequestSpec):
            self.refuse_request(message.rid, failure, now)
        elif (call_id := getattr(message, "call_id", None)) is not None:
            self._control.send_reply(call_id, failure.message, ok=False)

    def dispatch_message(self, message: ToWorker, now: float) -> None:
        """Pass a message to the component that it concerns."""
        match message:
            case RequestSpec():
                self.add_request(message, now)
            case AbortRequest(rid=rid):
                if rid is None:
                    events = self._scheduler.abort_all_requests(now, "aborted: all requests were")
                else:
                    events = self._scheduler.abort_request(rid, now)
                self.send_events(events, now)
            case ReleaseRequest():
                self._control.send_reply(message.call_id, self._scheduler.release_leases(message.rid))
            case StepCalls():
                self._scheduler.record_tool_calls(message.rid, message.index, message.calls, now)
            case PrepareTurn():
                self._scheduler.prepare_turn(message.rid, message.index, unpack_ids(message.ids))
            case DescribeJobs(call_id=call_id, namespace=namespace, job_id=job_id, prefix=prefix):
                self._control.send_reply(call_id, self._scheduler.describe_jobs(namespace, job_id, now, prefix))
            case DescribeLeases(call_id=call_id, after=after, limit=limit, client=client):
                self._control.send_reply(call_id, self._scheduler.describe_leases(now, after, limit, client))
            case EndJob():
                self.end_job(message, now)
            case LoadAdapter():
                self.load_adapter(message)
            case UnloadAdapter():
                self.unload_adapter(message)
            case WatchRequests() | WalkTree():
                self._live_reports.handle_message(message, now)
            case _:
                self._control.handle_call(message)

    def add_request(self, spec: RequestSpec, now: float) -> None:
        try:
            own_ids = None
            if spec.continuation is not None:
                own_ids = self._suffixes.complete_suffix(spec.continuation, spec.token_ids)
            constraint = resolve_constraint(spec.sampling, self._item_tries, self._grammars, spec.client)
            adapter = self._adapters.key_of(spec.adapter)
            requests = self._scheduler.add_request(spec, now, own_ids=own_ids, constraint=constraint, adapter=adapter)
        except RequestRefused as refusal:
            self.refuse_request(spec.rid, refusal, now)
            self.send_events(self._scheduler.take_events(), now)
            return
        self.run_contained(lambda: self.register_requests(spec, requests, now), now, requests)

    def register_requests(self, spec: RequestSpec, requests: list[Request], now: float) -> None:
        """Register a request that the scheduler has accepted with the other components."""
        for request in requests:
            self._outputs.open_sample(request)
        self._live_reports.requests_added(requests, now)
        self._suffixes.forget_tails(spec.rid)
        if spec.continuation is not None:
            self._suffixes.open_suffix(spec.rid, spec.continuation, spec.token_ids)

    def end_job(self, message: EndJob, now: float) -> None:
        """End a job, and send the ends of its open requests."""
        ended = self._scheduler.end_job(message.namespace, message.job_id, now)
        given_up = None
        if ended is not None:
            self.send_events(ended.events, now)
            given_up = {"aborted": ended.aborted_rids, "released_tokens": ended.released_tokens}
        self._control.send_reply(message.call_id, given_up)

    # -- adapters ------------------------------------------------------------------------------------------------------

    def load_adapter(self, message: LoadAdapter) -> None:
        """Begin to load an adapter; its client gets the reply when it is there."""
        try:
            self._adapters.begin_load(message)
        except AdapterError as error:
            self._control.send_reply(message.call_id, str(error), ok=False)

    def end_adapter_loads(self) -> None:
        """Let requests use the adapters that have been read."""
        for call, error in self._adapters.take_loaded():
            self.adapters_changed()
            if error is None:
                self._control.send_reply(call.call_id, self._adapters.describe())
                continue
            if not isinstance(error, AdapterError):
                logger.error("adapter %s could not be loaded", call.name, exc_info=error)
            shown = str(error) if isinstance(error, AdapterError) else f"{type(error).__name__}: {error}"
            self._control.send_reply(call.call_id, shown, ok=False)

    def unload_adapter(self, message: UnloadAdapter) -> None:
        if not self._adapters.unload(message.name):
            self._control.send_reply(message.call_id, f"there is no adapter {message.name!r}", ok=False)
            return
        self.adapters_changed()
        self.drop_unused_adapters()
        self._control.send_reply(message.call_id, self._adapters.describe())

    def adapters_changed(self) -> None:
        """Bring what depends on the names of adapters up to date."""
        self._scheduler.set_adapters(self._adapters.named_keys)
        self._info["adapters"] = self._adapters.describe()

    def drop_unused_adapters(self) -> None:
        """Free the weights of unloaded adapters once no live request uses them."""
        if self._adapters.has_unnamed:
            self._adapters.drop_unused(self._scheduler.adapters_in_use)

    def end_overdue_requests(self, now: float) -> None:
        """End the requests that are past --request-timeout."""
        if events := self._scheduler.time_out(now):
            self.send_events(events, now)

    # -- continuations -------------------------------------------------------------------------------------------------

    def complete_suffixes(self, output: StepOutput, now: float) -> None:
        """Where a stop string begins inside a token, prepend the part of the token that the client saw to the suffixes
        of the children, including children that already wait."""
        ending: list[tuple[Request, StopMatch]] = []
        self.run_contained(lambda: ending.extend(self._scheduler.ends_within_token(output.result)), now)
        for parent, match in ending:
            self.run_contained(lambda parent=parent, match=match: self.complete_suffix(parent, match), now, [parent])
        self.run_observer(lambda: self._suffixes.prune_tails(self._scheduler.is_on_record))

    def complete_suffix(self, parent: Request, match: StopMatch) -> None:
        self._suffixes.remember_tail(parent.key, match.visible_tail)
        for child in self._scheduler.children_waiting_for(parent.rid, parent.index):
            child.own_ids = self._suffixes.suffix_ids(child.rid)

    def remember_tails(self, events: list[RequestEvent]) -> None:
        """Do the same for beam searches. Their results are numbered only now, and no child waits for them yet."""
        for event in events:
            if event.request.beams is not None and event.finish is not None:
                for index, hypothesis in enumerate(event.request.beams.results):
                    if hypothesis.visible_tail:
                        self._suffixes.remember_tail((event.request.rid, index), hypothesis.visible_tail)

    # -- clients -------------------------------------------------------------------------------------------------------

    def send_events(
        self,
        events: list[RequestEvent],
        now: float,
        *,
        output: StepOutput | None = None,
    ) -> None:
        """Send the events to the clients, and forget the requests that have ended. output: the step that the events
        came from."""
        refusals = {event.request.rid: event.refusal for event in events if event.refusal is not None}
        message = self._outputs.build_outputs([e for e in events if e.request.rid not in refusals], output, now)
        if message is not None:
            self._outbox.send(message)
        for rid, refusal in refusals.items():
            self.refuse_request(rid, refusal, now)
        for event in events:
            if event.finish is not None:
                self.run_observer(lambda request=event.request: self.release_request(request))
        for request, error in self._outputs.take_failures():
            failed = self._scheduler.contain(error, [request], now)
            self.send_events(failed, now)
            if all(event.request.rid != request.rid for event in failed):  # it had ended already
                self.refuse_request(request.rid, request_failed(error), now)

    def refuse_request(self, rid: str, refusal: RequestRefused, now: float) -> None:
        self.run_observer(lambda: self._live_reports.request_refused(rid, now))
        self._outbox.send(
            RequestError(
                rid=rid,
                message=refusal.message,
                code=refusal.code,
                param=refusal.param,
                overflow=refusal.overflow,
            )
        )

    def release_request(self, request: Request) -> None:
        """Forget a request that has ended. (The step runner forgets it when a later batch says so.)"""
        self._outputs.close_sample(request)
        self._suffixes.close_suffix(request.rid)
        self._live_reports.request_released()

    # -- once a second -------------------------------------------------------------------------------------------------

    def send_heartbeat(self, now: float) -> None:
        self.send_stats()
        if self._job_records is not None:
            self._job_records.heartbeat(now)

    def audit_pages(self, now: float) -> None:
        """Check that every page of the pool has one owner. If not, end the requests that this spoils."""
        if damaged := self._scheduler.self_check(now):
            self.send_events(damaged, now)

    def send_stats(self) -> None:
        self._outbox.send(self._scheduler.stats())


def _or_never(time: float | None) -> float:
    return math.inf if time is None else time
