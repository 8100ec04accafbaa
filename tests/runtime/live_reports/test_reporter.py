"""The worker's side of watchers: reports and walks, within a budget of time."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from baton.radix.snapshot import ROW
from baton.radix.tick_times import TickTimes
from baton.runtime.live_reports.reporter import (
    BURST_S,
    MOST_STEPS,
    QUIET_S,
    REPORT_S,
    SAVED_S,
    SHARE,
    SLICE_S,
    LiveReporter,
    WalkBudget,
)
from baton.runtime.messages import WalkTree, WatchReport, WatchRequests
from tests.doubles.event_loop_rig import ask
from tests.doubles.kv_echo import prompt_of
from tests.doubles.watched_loop import WatchedLoop

# -- reports -----------------------------------------------------------------------------------------------------------


def test_a_report_lists_running_and_waiting_requests() -> None:
    loop = WatchedLoop()
    loop.say(ask("a", prompt_of(20, 1), 90, ignore_eos=True), ask("b", prompt_of(60, 2), 9, ignore_eos=True))
    loop.turns(2)
    loop.say(*(ask(f"w{number}", prompt_of(30, number), 90, ignore_eos=True) for number in range(10)))
    loop.turns(40)
    last = next(report for report in reversed(loop.reports) if report.load is not None)
    assert last.load is not None and last.running is not None and last.waiting is not None
    assert (last.load.running, last.load.waiting) == (len(last.running), len(last.waiting)) and last.load.waiting
    assert {request.phase for request in last.running} <= {"decode", "prefill"}
    first = next(request for request in last.running if request.rid == "a")
    assert (first.computed, first.total) == (20 + first.output - 1, 20 + first.output) and first.output > 10
    assert all(request.phase == "queued" and request.total == 30 and request.waited > 0 for request in last.waiting)
    load = last.load
    assert load.free + load.evictable + load.protected + load.private + load.quarantined == load.total == 512
    assert load.prompt_tokens >= 80 and load.output_tokens > 20 and load.queries >= 80


def test_first_report_of_a_watch_is_marked() -> None:
    """A client with lives of an earlier recording then knows that it has missed their ends."""
    loop = WatchedLoop(watched=False)
    loop.watch(seconds=30.0)
    loop.turns(60)
    assert [number for number, report in enumerate(loop.reports) if report.is_first] == [0]
    before = len(loop.reports)
    loop.watch()
    loop.turns(60)
    assert [number for number, report in enumerate(loop.reports) if report.is_first] == [0, before]


def test_reports_are_rare_while_idle() -> None:
    loop = WatchedLoop()
    loop.turns(10)
    loop.seconds_per_turn = 0.1
    count, began = sum(report.is_last for report in loop.reports), loop.now
    loop.turns(300)
    quiet = sum(report.is_last for report in loop.reports) - count
    assert quiet == math.floor((loop.now - began) / QUIET_S)
    loop.say(ask("a", prompt_of(20, 1), 90, ignore_eos=True))
    count, began = sum(report.is_last for report in loop.reports), loop.now
    loop.turns(40)
    assert sum(report.is_last for report in loop.reports) - count >= (loop.now - began) / REPORT_S - 2


def test_sleeping_loop_wakes_only_for_the_next_report() -> None:
    loop = WatchedLoop(watched=False)
    reporter = loop.loop._live_reports
    assert reporter.due == math.inf
    loop.watch()
    loop.turns(20)
    while not loop.reports[-1].is_last:
        assert reporter.due == loop.now, "there is more to tell, and time for it"
        loop.turns(1)
    assert reporter.due == pytest.approx(next(r for r in reversed(loop.reports) if r.load is not None).t + QUIET_S)
    loop.say(WatchRequests(seconds=1.0))
    assert reporter.due == loop.now + 1.0
    loop.turns(2)
    assert reporter.due == math.inf


# -- walks -------------------------------------------------------------------------------------------------------------


def rows_of(loop: WatchedLoop) -> np.ndarray:
    return np.frombuffer(b"".join(message.rows for message in loop.rows), dtype=ROW)


def filled(**options) -> WatchedLoop:
    loop = WatchedLoop(watched=False, **options)
    for number in range(12):
        loop.say(ask(f"r{number}", prompt_of(30, number), 2, ignore_eos=True))
        loop.turns(4)
    return loop


def test_tree_walk_without_request_watcher() -> None:
    loop = filled()
    loop.say(WalkTree(with_heads=True))
    loop.turns(5)
    (message,) = loop.rows
    assert message.is_first and message.end is not None and message.end.complete and message.names == ("",)
    rows = rows_of(loop)
    assert len(rows) == loop.scheduler._cache.total_nodes == 24, "a prompt and an output each"
    assert len(message.heads) == 4 * np.minimum(rows["tokens"], 16).sum() and not loop.reports
    times = TickTimes.unpacked(message.end.ticks, message.end.seconds)
    assert message.end.ended_at == message.end.ended == loop.now - 5
    used = np.sort(times.seconds_at(rows["used"])[rows["tokens"] == 30])
    assert np.all(np.diff(used) == 5), "one every five turns"


def test_concurrent_walk_requests_share_one_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.runtime.live_reports.reporter.MOST_STEPS", 6)
    monkeypatch.setattr("baton.runtime.live_reports.reporter.LEAST_STEPS", 6)
    monkeypatch.setattr("baton.runtime.live_reports.reporter.ROWS_IN_CHUNK", 6)
    loop = filled()
    loop.say(WalkTree())
    loop.say(WalkTree())
    loop.turns(10)
    assert [message.is_first for message in loop.rows] == [True, False, False, False]
    assert [message.end is not None for message in loop.rows] == [False, False, False, True]
    assert len(rows_of(loop)) == 24
    loop.say(WalkTree())
    loop.turns(10)
    assert len(rows_of(loop)) == 48, "the next one is a walk of its own"


def test_an_empty_tree() -> None:
    loop = WatchedLoop(watched=False)
    loop.say(WalkTree())
    loop.turns(2)
    (message,) = loop.rows
    assert message.rows == b"" and message.is_first and message.end is not None and message.end.complete


def test_flush_ends_tree_walk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("baton.runtime.live_reports.reporter.MOST_STEPS", 4)
    monkeypatch.setattr("baton.runtime.live_reports.reporter.LEAST_STEPS", 4)
    loop = filled()
    loop.say(WalkTree())
    assert loop.scheduler.flush_cache()
    loop.turns(3)
    (message,) = loop.rows
    assert message.end is not None and not message.end.complete and len(rows_of(loop)) == 4


# -- the budget --------------------------------------------------------------------------------------------------------


class SlowWalk:
    """Without end; each call takes ``call_s`` and each step of it ``step_s``, on a clock of its own."""

    nodes = 0

    def __init__(self, call_s: float, step_s: float = 0.0) -> None:
        self.call_s, self.step_s = call_s, step_s
        self.busy = 0.0
        self.steps: list[int] = []

    def visit_nodes(self, steps: int) -> bool:
        self.busy += self.call_s + steps * self.step_s
        self.steps.append(steps)
        return False

    def clock(self) -> float:
        return self.busy


def walked(walk: SlowWalk, seconds: float, turn_s: float) -> LiveReporter:
    loop = WatchedLoop(watched=False)
    reporter = LiveReporter(loop.scheduler, loop, loop.clock, walk.clock)  # type: ignore[arg-type]
    reporter._walk = walk  # type: ignore[assignment]
    for turn in range(int(seconds / turn_s)):
        before = len(walk.steps)
        reporter.report_turn([], None, turn * turn_s)
        assert len(walk.steps) <= before + 1, "a turn does one slice"
    return reporter


@pytest.mark.parametrize("turn_s", [0.001, 0.02, 0.5])
@pytest.mark.parametrize("call_s", [10e-6, 100e-6, 5e-3])
def test_walk_stays_within_its_time_share(call_s: float, turn_s: float) -> None:
    """Also where a slice takes much longer than planned."""
    seconds, walk = max(20.0, 100 * turn_s), SlowWalk(call_s)
    reporter = walked(walk, seconds, turn_s)
    assert walk.busy <= 1.001 * (SHARE * seconds + SAVED_S + call_s) and max(walk.steps) <= MOST_STEPS
    assert walk.busy > 0.85 * min(SHARE * seconds, call_s * seconds / turn_s)
    assert reporter.due <= seconds + (BURST_S + call_s) / SHARE, "and it goes on"


def test_the_pace_of_a_walk_follows_the_time_of_a_step() -> None:
    """A step that takes five times as long is taken a fifth as often in a turn."""
    for step_s in (1e-6, 5e-6):
        walk = SlowWalk(0.0, step_s)
        walked(walk, 200.0, 1.0)
        assert walk.steps[-1] == pytest.approx(SLICE_S / step_s, rel=0.05)


def test_walk_budget_fills_and_spends() -> None:
    budget = WalkBudget()
    assert budget.fill(0.0) and budget.wait() == 0.0
    budget.spend(SAVED_S - SLICE_S)
    assert budget.fill(0.0) and budget.wait() == 0.0, "to the last slice"
    budget.spend(SLICE_S)
    assert not budget.fill(0.0) and budget.wait() == pytest.approx(BURST_S / SHARE)
    assert not budget.fill(0.9 * BURST_S / SHARE) and budget.fill(1.1 * BURST_S / SHARE)
    budget.spend(1.1 * BURST_S)
    assert budget.wait() > 0.8 * BURST_S / SHARE, "who has spent it knows that before the next turn"
    budget.fill(1e9)
    budget.spend(SAVED_S)
    assert not budget.fill(1e9), "no more is saved than that"
    budget.spend(-5.0)
    assert not budget.fill(1e9), "a clock that goes back brings nothing"


def test_without_a_watcher_nothing_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn then looks at no request and no node, and sends nothing."""
    loop = filled()
    reporter = loop.loop._live_reports

    def fail(*_: object) -> Callable:
        raise AssertionError("a look")

    for name in ("requests_now", "load_now", "leases_now", "jobs_now", "LifeRecorder", "TreeWalk"):
        monkeypatch.setattr(f"baton.runtime.live_reports.reporter.{name}", fail)
    loop.say(ask("a", prompt_of(20, 1), 9))
    loop.turns(20)
    assert reporter.due == math.inf and not any(isinstance(message, WatchReport) for message in loop.sent)
