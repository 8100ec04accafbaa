"""The worker's side of live reports: its state twice a second, and walks over the tree in slices, one per turn.

    WatchRequests ──▶ until its deadline: lives are recorded, reports are sent in parts  (renewed while a page is open)
    WalkTree ──────▶ a walk, if none is under way; its rows are sent in chunks

A turn sends one part of a report, or walks as far as the budget allows. With no page open it costs one comparison.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence

from ...radix.snapshot import TreeWalk
from ...scheduler.batch import ScheduleBatch
from ...scheduler.live_view.recorder import MAX_LIVES, LifeRecorder
from ...scheduler.live_view.snapshots import jobs_now, leases_now, load_now, requests_now
from ...scheduler.request import Request
from ...scheduler.scheduler import Scheduler
from ..channels import Sender
from ..messages import TreeRows, WalkEnd, WalkTree, WatchReport, WatchRequests

REPORT_S = 0.5
"""From one report to the next while something happens; `QUIET_S` while nothing does."""

QUIET_S = 5.0

LIVES_IN_PART = 32
PARTS_WITH_LIVES = 2 * MAX_LIVES // LIVES_IN_PART + 1
"""Most parts of a report with lives; the rest follow in the next report."""

ROWS_IN_CHUNK = 1000

LEAST_STEPS, MOST_STEPS = 16, 1024
"""Bounds of a walk's steps in one turn."""

SHARE = 0.005
"""Average share of a core for walks. Reports, and turns of a loop that would have slept, come on top; together they
stay under 1 %."""

SAVED_S = 0.010
"""The bucket's size: enough to walk a small tree at once."""

SLICE_S = 150e-6
"""Target length of a turn's slice."""

BURST_S = 0.002
"""After the bucket is empty, slices wait until this much is saved again: waking the loop for each slice would cost more
than the walk itself."""


class WalkBudget:
    """CPU time for walks: a token bucket over the loop's time. Times in seconds."""

    def __init__(self) -> None:
        self._saved = SAVED_S
        self._is_spending = True
        self._filled_at: float | None = None

    def fill(self, now: float) -> bool:
        """Add the time that has passed; True if a slice may be spent."""
        if self._filled_at is not None:
            self._saved = min(SAVED_S, self._saved + SHARE * max(0.0, now - self._filled_at))
        self._filled_at = now
        self._is_spending = self._saved >= (SLICE_S if self._is_spending else BURST_S)
        return self._is_spending

    def spend(self, seconds: float) -> None:
        """The balance may go negative, which lengthens the wait."""
        self._saved -= max(0.0, seconds)

    def wait(self) -> float:
        """Seconds from the last `fill` until a slice may be spent."""
        is_spending = self._is_spending and self._saved >= SLICE_S
        return 0.0 if is_spending else max(0.0, BURST_S - self._saved) / SHARE


class LiveReporter:
    """Sends reports and walks. Called by the event loop once a turn, after the step was launched."""

    def __init__(
        self,
        scheduler: Scheduler,
        outbox: Sender,
        clock: Callable[[], float],
        cpu_clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """clock: the loop's, in seconds. cpu_clock: measures slices of walks."""
        self._scheduler = scheduler
        self._outbox = outbox
        self._cpu_clock = cpu_clock
        self._began = clock()
        self._budget = WalkBudget()
        self._recorder: LifeRecorder | None = None
        self._until = -math.inf
        self._report: Iterator[WatchReport] | None = None
        self._reported = -math.inf
        self._is_quiet = False
        """True if nothing has happened since the last report."""
        self._is_new = False
        """True until the first report of this recording has been sent."""
        self._walk: TreeWalk | None = None
        self._walk_began = 0.0
        self._rows_sent = 0
        self._step_s = 1.5e-6
        """Moving average of a walk step's CPU time."""
        self._now = self._began

    # -- calls of the loop --------------------------------------------------------------------------------------------

    def handle_message(self, message: WatchRequests | WalkTree, now: float) -> None:
        if isinstance(message, WalkTree):
            if self._walk is None:
                self._walk = self._scheduler.walk_tree(with_heads=message.with_heads)
                self._walk_began, self._rows_sent = now, 0
            return
        self._until = now + message.seconds
        if self._recorder is None:
            self._recorder = LifeRecorder(self._scheduler, self._began)
            self._recorder.follow_live_requests(now)
            self._reported, self._is_new = -math.inf, True

    def requests_added(self, requests: Sequence[Request], now: float) -> None:
        """Follow requests that the scheduler has accepted."""
        if self._recorder is not None:
            self._recorder.record_arrivals(requests, now)
            self._is_quiet = False

    def request_refused(self, rid: str, now: float) -> None:
        """Record that a request was refused, or ends with an error in this turn."""
        if self._recorder is not None:
            self._recorder.record_refusal(rid, now)
            self._is_quiet = False

    def request_released(self) -> None:
        """Record that a request has ended in this turn."""
        if self._recorder is not None:
            self._recorder.note_end()

    def report_turn(self, ended: Sequence[ScheduleBatch], launched: ScheduleBatch | None, now: float) -> None:
        """Record a turn, and do a slice of the work that is due. ended: steps that were committed, or failed."""
        if self._recorder is None and self._walk is None:
            return
        self._now = now
        if self._recorder is not None:
            if now >= self._until:
                self._recorder = self._report = None
            else:
                self._record(self._recorder, ended, launched, now)
        if self._report is not None:
            self._send_part(next(self._report))
        elif self._walk is not None and self._budget.fill(now):
            began = self._cpu_clock()
            self._walk_on(self._walk, now)
            self._budget.spend(self._cpu_clock() - began)

    @property
    def due(self) -> float:
        """Time of the next turn that the loop must take, if it has no other work."""
        if self._report is not None:
            return self._now
        walk = math.inf if self._walk is None else self._now + self._budget.wait()
        return walk if self._recorder is None else min(walk, self._until, self._next_report)

    # -- reports ------------------------------------------------------------------------------------------------------

    @property
    def _next_report(self) -> float:
        return self._reported + (QUIET_S if self._is_quiet else REPORT_S)

    def _record(
        self, recorder: LifeRecorder, ended: Sequence[ScheduleBatch], launched: ScheduleBatch | None, now: float
    ) -> None:
        if recorder.record_turn(ended, launched, now) or ended or launched is not None:
            self._is_quiet = False
        if self._report is None and now >= self._next_report:
            self._report = self._parts(recorder, now)
            self._reported, self._is_quiet = now, True

    def _parts(self, recorder: LifeRecorder, now: float) -> Iterator[WatchReport]:
        """Yield the parts of one report. Each is made in a turn of its own, and shows the state in that turn."""
        scheduler = self._scheduler
        running, waiting = requests_now(scheduler, self._now)
        is_first, self._is_new = self._is_new, False
        yield WatchReport(t=self._t, is_first=is_first, load=load_now(scheduler), running=running, waiting=waiting)
        yield WatchReport(t=self._t, leases=leases_now(scheduler, self._now), num_leases=len(scheduler.live_leases()))
        jobs, num_jobs = jobs_now(scheduler, self._now)
        yield WatchReport(t=self._t, jobs=jobs, num_jobs=num_jobs)
        recorder.refresh(self._now)
        for _ in range(PARTS_WITH_LIVES):  # lives keep changing meanwhile
            if not (lives := recorder.take_lives(LIVES_IN_PART)):
                break
            yield WatchReport(t=self._t, lives=lives)
        yield WatchReport(t=self._t, is_last=True)

    @property
    def _t(self) -> float:
        return self._now - self._began

    # -- a turn's share ------------------------------------------------------------------------------------------------

    def _send_part(self, part: WatchReport) -> None:
        self._outbox.send(part)
        if part.is_last:
            self._report = None

    def _walk_on(self, walk: TreeWalk, now: float) -> None:
        steps = max(LEAST_STEPS, min(MOST_STEPS, int(SLICE_S / self._step_s)))
        began = self._cpu_clock()
        is_over = walk.visit_nodes(steps)
        self._step_s += 0.2 * ((self._cpu_clock() - began) / steps - self._step_s)
        self._step_s = max(self._step_s, 1e-7)
        if not is_over and walk.nodes - self._rows_sent < ROWS_IN_CHUNK:
            return
        found, end = walk.take_rows(), None
        if is_over:
            ticks, seconds = self._scheduler.packed_tick_times()
            end = WalkEnd(
                began=self._walk_began - self._began,
                ended=now - self._began,
                complete=walk.complete,
                ticks=ticks,
                seconds=seconds,
                ended_at=now,
            )
            self._walk = None
        self._outbox.send(
            TreeRows(
                is_first=self._rows_sent == 0, rows=found.rows, heads=found.heads, names=tuple(found.names), end=end
            )
        )
        self._rows_sent = walk.nodes
