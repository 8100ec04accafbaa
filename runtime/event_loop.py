"""THE loop. A worker does nothing else: take messages, form a step, run it, commit it, say what came of it.

Read `EventLoop.run` top to bottom; everything else in this file is one of its verbs.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable

import msgspec
import numpy as np

from ..scheduler.batch import RequestEvent, ScheduleBatch
from ..scheduler.constraints.item_trie import ItemTrieError
from ..scheduler.refusal import RequestRefused
from ..scheduler.request import ContinuationSpec, LogprobOptions, RequestSpec
from ..scheduler.scheduler import Scheduler
from .channels import Receiver, Sender
from .constraints.item_tries import ItemTries, unpack_trie
from .messages import (
    AbortRequest,
    ControlReply,
    ControlRequest,
    DeleteItemTrie,
    GenerateRequest,
    LoadItemTrie,
    ReleaseRequest,
    RequestError,
    ToWorker,
    WorkerStats,
    unpack_ids,
)
from .outputs import OutputBuilder
from .runner.step_profile import StepProfiler
from .step_runner import StepInFlight, StepOutput, StepRunner
from .text.continuation_suffixes import ContinuationSuffixes

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
"""Stats are sent this often, busy or idle; an idle loop sleeps this long at most."""

MAX_FAILED_STEPS = 3
"""So many failed steps in a row mean that the device, not a request, is broken."""


class EventLoop:
    """The plain loop: one step at a time, nothing in flight between turns.

    With ``overlap``: while the device works on a step, the host forms and launches the next one, and only then looks at
    the result; a step with a beam search is waited for.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        step_runner: StepRunner,
        inbox: Receiver[ToWorker],
        outbox: Sender,
        suffixes: ContinuationSuffixes,
        item_tries: ItemTries,
        info: dict,
        default_retain_ttl: float,
        profiler: StepProfiler,
        overlap: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._step_runner = step_runner
        self._inbox = inbox
        self._outbox = outbox
        self._suffixes = suffixes
        self._item_tries = item_tries
        self._info = info
        self._default_retain_ttl = default_retain_ttl
        self._profiler = profiler
        self._overlap = overlap
        self._in_flight: StepInFlight | None = None
        self._clock = clock
        self._outputs = OutputBuilder()
        self._next_heartbeat = 0.0
        self._failed_steps = 0

    def run(self, stop: threading.Event) -> None:
        """Serve until ``stop`` is set."""
        while not stop.is_set():
            self.receive()
            self._profiler.lap("receive")
            batch = self._scheduler.next_batch(self._clock())
            self._profiler.lap("schedule")
            launched = self.launch(batch) if batch is not None else None
            if self._in_flight is not None:
                self.complete(self._in_flight)
            self._in_flight = launched
            if launched is not None and (not self._overlap or launched.batch.beams):
                self.complete(launched)
            self._profiler.end_turn(None if launched is None else launched.batch)

    def launch(self, batch: ScheduleBatch) -> StepInFlight | None:
        """Begin a step. None if that failed; then the one before it has been completed first."""
        try:
            return self._step_runner.launch(batch, self._in_flight)
        except Exception as error:
            if self._in_flight is not None:
                self.complete(self._in_flight)
            self.fail_step(error)
            return None

    def complete(self, step: StepInFlight) -> None:
        """Wait for the oldest step in flight, commit it and say what came of it."""
        self._in_flight = None
        try:
            output = self._step_runner.finish(step)
        except Exception as error:
            self.fail_step(error)
            return
        self._failed_steps = 0
        self.complete_suffixes(step.batch, output)
        events = self._scheduler.process_result(output.result, self._clock())
        self.remember_rests(events)
        self.send_events(events, output)
        self._profiler.lap("commit")

    def receive(self) -> None:
        """Handle every waiting message. Without work it sleeps until one comes, or a heartbeat or lease is due."""
        if self._clock() >= self._next_heartbeat:
            self.send_stats()
        timeout = 0.0
        if self._scheduler.is_idle:
            deadline = self._scheduler.leases.next_deadline()
            due = self._next_heartbeat if deadline is None else min(deadline, self._next_heartbeat)
            timeout = max(0.0, due - self._clock())
        messages = self._inbox.poll(timeout)
        if timeout:
            self._profiler.lap("idle")
        for message in messages:
            match message:
                case GenerateRequest():
                    self.add(message)
                case AbortRequest(rid=None):
                    self.send_events(self._scheduler.abort_all(self._clock(), "aborted: all requests were"))
                case AbortRequest(rid=str(rid)):
                    self.send_events(self._scheduler.abort(rid, self._clock()))
                case ReleaseRequest():
                    self.reply(message.call_id, self._scheduler.release(message.rid))
                case LoadItemTrie():
                    self.load_item_trie(message)
                case DeleteItemTrie():
                    self.reply(message.call_id, self._item_tries.delete(message.name))
                case ControlRequest():
                    self.control(message)

    def add(self, message: GenerateRequest) -> None:
        suffix = unpack_ids(message.input_ids)
        prompt_ids = suffix
        if message.continuation is not None:
            prompt_ids = self._suffixes.complete(message.continuation, suffix)
        try:
            requests = self._scheduler.add(self.spec(message, prompt_ids), self._clock())
        except RequestRefused as refusal:
            self.refuse(message.rid, refusal)
            return
        self._suffixes.take_name(message.rid)
        if message.continuation is not None:
            self._suffixes.open(message.rid, message.continuation, suffix)
        for request in requests:
            self._outputs.open(request, message)

    def spec(self, message: GenerateRequest, prompt_ids: np.ndarray) -> RequestSpec:
        """The scheduler's view of a message. Raises RequestRefused for an item trie that is not loaded."""
        came = message.continuation
        continuation = None
        if came is not None:
            fallback = unpack_ids(came.fallback_ids) if came.fallback_ids is not None else None
            continuation = ContinuationSpec(came.parent_rid, came.index, came.at, came.keep_parent, fallback)
        options = LogprobOptions(message.logprob_start_len, message.top_logprobs_num)
        trie_name = message.sampling.item_trie
        return RequestSpec(
            rid=message.rid,
            prompt_ids=prompt_ids,
            sampling=message.sampling,
            namespace=message.namespace,
            logprobs=options if message.return_logprob else None,
            continuation=continuation,
            retain_ttl=message.retain_ttl if message.retain_ttl is not None else self._default_retain_ttl,
            retain_n=message.retain_n,
            item_trie=None if trie_name is None else self._item_tries.get(trie_name),
        )

    def complete_suffixes(self, batch: ScheduleBatch, output: StepOutput) -> None:
        """Where a stop string begins inside a token, what the client saw of that token goes before the suffixes of the
        children, also of those that wait already."""
        for row, match in output.result.stop_matches.items():
            if not match.rest:
                continue
            parent, token_id = batch.requests[row], int(output.result.next_ids[row])
            if parent.finish is not None or parent.sampling.no_stop_trim:
                continue
            if self._scheduler.ends_by_id(parent, token_id):
                continue  # a stop id goes before a stop string, and it cuts no token
            self._suffixes.remember(parent.key, match.rest)
            for child in self._scheduler.children_waiting_for(parent.rid, parent.index):
                child.spec = dataclasses.replace(child.spec, prompt_ids=self._suffixes.ids(child.rid))
        self._suffixes.prune(self._scheduler.is_on_record)

    def remember_rests(self, events: list[RequestEvent]) -> None:
        """The same for beam searches, whose sequences have their numbers only now; no child of theirs waits already."""
        for event in events:
            if event.request.beams is not None and event.finish is not None:
                for index, hypothesis in enumerate(event.request.beams.results):
                    if hypothesis.rest:
                        self._suffixes.remember((event.request.rid, index), hypothesis.rest)

    def refuse(self, rid: str, refusal: RequestRefused) -> None:
        self._outbox.send(
            RequestError(
                rid=rid, status=refusal.status, message=refusal.message, code=refusal.code, param=refusal.param
            )
        )

    def send_events(self, events: list[RequestEvent], output: StepOutput | None = None) -> None:
        """Tell the clients; requests that ended are forgotten by everything that kept state for them."""
        message = self._outputs.build([event for event in events if event.refusal is None], output, self._clock())
        if message is not None:
            self._outbox.send(message)
        refused = [event for event in events if event.refusal is not None]
        self._outputs.discard(refused)
        for rid, refusal in {event.request.rid: event.refusal for event in refused}.items():
            assert refusal is not None
            self.refuse(rid, refusal)
        for event in events:
            if event.finish is not None:
                self._step_runner.forget(event.request)
                self._suffixes.close(event.request.rid)

    def fail_step(self, error: Exception) -> None:
        """A forward raised: its requests end with the reason, the others go on."""
        logger.exception("a step failed; its requests end with an error")
        self._failed_steps += 1
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise error
        reason = f"the forward step failed: {type(error).__name__}: {error}"
        self.fail(self._scheduler.fail_step(self._clock(), reason), reason, "forward_failed")

    def fail(self, events: list[RequestEvent], reason: str, code: str) -> None:
        """Answer ended requests with a 500, and children that waited for them with their refusal."""
        self._outputs.discard(events)
        refusals = {event.request.rid: event.refusal for event in events}
        for event in events:
            self._step_runner.forget(event.request)
            self._suffixes.close(event.request.rid)
        for rid, refusal in refusals.items():
            self.refuse(rid, refusal or RequestRefused(reason, status=500, code=code))

    def load_item_trie(self, message: LoadItemTrie) -> None:
        try:
            self._item_tries.put(message.name, unpack_trie(message))
        except ItemTrieError as error:
            self.reply(message.call_id, str(error), ok=False)
            return
        self.reply(message.call_id, None)

    def control(self, message: ControlRequest) -> None:
        match message.verb:
            case "flush_cache":
                flushed = self._scheduler.flush_cache()
                reason = None if flushed else "requests are running; the cache is flushed only when none is"
                self.reply(message.call_id, reason, ok=flushed)
            case "info":
                self.reply(message.call_id, {**self._info, "stats": msgspec.to_builtins(self._scheduler.stats())})
            case "item_tries":
                self.reply(message.call_id, self._item_tries.describe())
            case "start_profile":
                self.start_profile(message.call_id)
            case "stop_profile":
                self.stop_profile(message.call_id)
            case verb:
                known = "flush_cache, info, item_tries, start_profile, stop_profile"
                self.reply(message.call_id, f"unknown control verb {verb!r}; known: {known}", ok=False)

    def start_profile(self, call_id: int) -> None:
        if self._profiler.recording:
            self.reply(call_id, "steps are being profiled already; stop_profile ends that", ok=False)
            return
        self._profiler.start()
        self.reply(call_id, None)

    def stop_profile(self, call_id: int) -> None:
        if not self._profiler.recording:
            self.reply(call_id, "no steps are being profiled; start_profile begins that", ok=False)
            return
        self.reply(call_id, self._profiler.stop())

    def reply(self, call_id: int, payload: object, *, ok: bool = True) -> None:
        self._outbox.send(ControlReply(call_id=call_id, ok=ok, payload=msgspec.json.encode(payload)))

    def send_stats(self) -> None:
        self._next_heartbeat = self._clock() + HEARTBEAT_S
        damaged = self._scheduler.self_check(self._clock())
        if damaged:
            self.fail(damaged, "the KV cache was found damaged and has been reset; send it again", "kv_cache_damaged")
        self._outbox.send(msgspec.convert(msgspec.to_builtins(self._scheduler.stats()), WorkerStats))
