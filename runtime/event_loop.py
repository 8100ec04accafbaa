"""THE loop. A worker does nothing else: take messages, form a step, run it, commit it, say what came of it.

Read `EventLoop.run` top to bottom; everything else in this file is one of its verbs.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import msgspec

from ..scheduler.batch import RequestEvent
from ..scheduler.request import LogprobOptions, RequestSpec
from ..scheduler.scheduler import RequestRefused, Scheduler
from .channels import Receiver, Sender
from .executor import Executor, StepOutput
from .messages import (
    AbortRequest,
    ControlReply,
    ControlRequest,
    GenerateRequest,
    RequestError,
    ToWorker,
    WorkerStats,
    unpack_ids,
)
from .outputs import OutputBuilder

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
"""Stats are sent this often, busy or idle; an idle loop sleeps this long at most."""

MAX_FAILED_STEPS = 3
"""So many failed steps in a row mean that the device, not a request, is broken."""


class EventLoop:
    """The plain loop: one step at a time, nothing in flight between turns."""

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        inbox: Receiver[ToWorker],
        outbox: Sender,
        info: dict,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._inbox = inbox
        self._outbox = outbox
        self._info = info
        self._clock = clock
        self._outputs = OutputBuilder()
        self._next_heartbeat = 0.0
        self._failed_steps = 0

    def run(self, stop: threading.Event) -> None:
        """Serve until ``stop`` is set."""
        while not stop.is_set():
            self.receive()
            batch = self._scheduler.next_batch(self._clock())
            if batch is None:
                continue
            try:
                output = self._executor.run(batch)
            except Exception as error:
                self.fail_step(error)
                continue
            self._failed_steps = 0
            events = self._scheduler.process_result(output.result, self._clock())
            self.send_events(events, output)

    def receive(self) -> None:
        """Handle every waiting message; sleeps until one comes, or the next heartbeat is due, if there is no work."""
        if self._clock() >= self._next_heartbeat:
            self.send_stats()
        timeout = max(0.0, self._next_heartbeat - self._clock()) if self._scheduler.is_idle else 0.0
        for message in self._inbox.poll(timeout):
            match message:
                case GenerateRequest():
                    self.add(message)
                case AbortRequest(rid=None):
                    self.send_events(self._scheduler.abort_all(self._clock(), "aborted: all requests were"))
                case AbortRequest(rid=str(rid)):
                    self.send_events(self._scheduler.abort(rid, self._clock()))
                case ControlRequest():
                    self.control(message)

    def add(self, message: GenerateRequest) -> None:
        spec = RequestSpec(
            rid=message.rid,
            prompt_ids=unpack_ids(message.input_ids),
            sampling=message.sampling,
            namespace=message.namespace,
            logprobs=LogprobOptions(message.logprob_start_len, message.top_logprobs_num)
            if message.return_logprob
            else None,
        )
        try:
            requests = self._scheduler.add(spec, self._clock())
        except RequestRefused as refusal:
            self._outbox.send(
                RequestError(
                    rid=message.rid,
                    status=refusal.status,
                    message=str(refusal),
                    code=refusal.code,
                    param=refusal.param,
                )
            )
            return
        for request in requests:
            self._outputs.open(request, message)

    def send_events(self, events: list[RequestEvent], output: StepOutput | None = None) -> None:
        """Tell the clients; requests that ended are forgotten by everything that kept state for them."""
        message = self._outputs.build(events, output)
        if message is not None:
            self._outbox.send(message)
        for event in events:
            if event.finish is not None:
                self._executor.forget(event.request)

    def fail_step(self, error: Exception) -> None:
        """A forward raised: its requests end with the reason, the others go on."""
        logger.exception("a step failed; its requests end with an error")
        self._failed_steps += 1
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise error
        reason = f"the forward step failed: {type(error).__name__}: {error}"
        events = self._scheduler.fail_step(self._clock(), reason)
        self._outputs.discard(events)
        for event in events:
            self._executor.forget(event.request)
        for rid in dict.fromkeys(event.request.rid for event in events):
            self._outbox.send(RequestError(rid=rid, status=500, message=reason, code="forward_failed"))

    def control(self, message: ControlRequest) -> None:
        if message.verb == "flush_cache":
            flushed = self._scheduler.flush_cache()
            payload: object = None if flushed else "requests are running; the cache is flushed only when none is"
            reply = ControlReply(call_id=message.call_id, ok=flushed, payload=msgspec.json.encode(payload))
        elif message.verb == "info":
            info = {**self._info, "stats": msgspec.to_builtins(self._scheduler.stats())}
            reply = ControlReply(call_id=message.call_id, payload=msgspec.json.encode(info))
        else:
            payload = f"unknown control verb {message.verb!r}; known: flush_cache, info"
            reply = ControlReply(call_id=message.call_id, ok=False, payload=msgspec.json.encode(payload))
        self._outbox.send(reply)

    def send_stats(self) -> None:
        self._next_heartbeat = self._clock() + HEARTBEAT_S
        self._outbox.send(msgspec.convert(msgspec.to_builtins(self._scheduler.stats()), WorkerStats))
