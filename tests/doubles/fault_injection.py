"""Makes the N-th call of a function inside scheduler, radix or memory_pool raise, wherever that is.

Python's trace hook sees every call; raising there is as if the called function had raised at once. So every point at
which one function calls another can fail, and what was half done by then stays half done.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, cast

import baton.memory_pool.allocator
import baton.radix.cache
import baton.scheduler.scheduler
from baton.runtime.outputs import OutputBuilder
from baton.runtime.text.continuation_suffixes import ContinuationSuffixes
from baton.scheduler.queues import LiveRequests
from baton.scheduler.scheduler import Scheduler
from tests.doubles.scheduler_harness import Harness

FOLDERS = tuple(
    str(Path(str(module.__file__)).resolve().parent)
    for module in (baton.scheduler.scheduler, baton.radix.cache, baton.memory_pool.allocator)
)


GUARDS = {
    function.__qualname__
    for function in (
        Scheduler.add_request,
        Scheduler.next_batch,
        Scheduler.process_result,
        Scheduler.fail_step,
        Scheduler.take_events,
        Scheduler._end_step,
        Scheduler._abort_and_take,
        Scheduler._abort_each,
        cast(property, Scheduler.is_idle).fget,
        OutputBuilder.build_outputs,
        OutputBuilder.take_failures,
        OutputBuilder.close_sample,
        LiveRequests.__len__,
        ContinuationSuffixes.close_suffix,
    )
    if function is not None
}
"""These catch what is raised below them and do little else, only read what is there, or pop a name from a dict."""


class InjectedFault(Exception):
    """What the call raised."""


class CallFaults:
    """Counts the calls below what it wraps; the one with the number ``at`` (from 0) raises, and no other."""

    def __init__(self, at: int, files: tuple[str, ...] = FOLDERS) -> None:
        """files: how the paths of what may fail begin."""
        self.at = at
        self.files = files
        self.calls = 0
        self.place: str | None = None
        """Where the fault was injected."""
        self._depth = 0
        self._is_ours: dict[str, bool] = {}

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            before = sys.gettrace()
            if self.place is None and self._depth == 1:
                sys.settrace(self._trace)
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if self._depth == 0:
                    sys.settrace(before)

        return counted

    def _trace(self, frame: FrameType, event: str, argument: object) -> None:
        if event != "call" or self.place is not None or frame.f_code.co_qualname in GUARDS:
            return
        if frame.f_code.co_flags & inspect.CO_GENERATOR:
            return  # to throw one away is a call too, and errors in it reach no caller
        name = frame.f_code.co_filename
        if name not in self._is_ours:
            self._is_ours[name] = str(Path(name).resolve()).startswith(self.files)
        if not self._is_ours[name]:
            return
        self.calls += 1
        if self.calls - 1 == self.at:
            self.place = f"{Path(name).name}:{frame.f_code.co_firstlineno} {frame.f_code.co_qualname}"
            raise InjectedFault(self.place)


def inject(harness: Harness, faults: CallFaults) -> None:
    """Have a call of the harness's scheduler fail. What the event loop guards is guarded as it does it."""
    scheduler: Any = harness.scheduler

    def guarded(function: Callable[..., Any], default: Any, *, again: bool = False) -> Callable[..., Any]:
        counted = faults.wrap(function)

        def call(*args: Any, **kwargs: Any) -> Any:
            for attempt in range(1 + again):
                try:
                    return counted(*args, **kwargs)
                except InjectedFault as error:
                    harness._take(scheduler.contain(error, [], harness.now))
                except Exception as error:
                    assert attempt, error  # the first attempt got that far
                    harness._take(scheduler.contain(error, [], harness.now))
            return default

        return call

    step = harness.step

    def turn() -> bool:
        before = faults.place
        return step() or faults.place != before  # a turn that failed does nothing, and the next one does

    harness.step = turn
    for name in ("add_request", "next_batch", "process_result", "fail_step", "time_out"):
        setattr(scheduler, name, faults.wrap(getattr(scheduler, name)))
    abort = faults.wrap(scheduler.abort_request)

    def abort_or_contain(rid: str, now: float) -> Any:
        try:
            return abort(rid, now)
        except InjectedFault as error:
            return scheduler.contain(error, scheduler.live_of(rid), now)

    scheduler.abort_request = abort_or_contain
    for name, default, again in (
        ("flush_cache", False, False),
        ("release_leases", False, False),
        ("record_tool_calls", None, False),
        ("prepare_turn", None, False),
        ("end_job", None, False),
        ("finish_copy", [], True),
        ("finish_block_order", None, True),
    ):
        setattr(scheduler, name, guarded(getattr(scheduler, name), default, again=again))
