"""The HTTP process's side of live reports: asks the worker for reports and walks, and assembles the answers."""

from __future__ import annotations

import asyncio
import time

from ...scheduler.live_view.reports import JobNow, LeaseNow, Life, LoadNow, RunningNow, WaitingNow
from ...scheduler.outcome import RequestRefused
from ..channels import Sender
from ..control_client import Availability
from ..messages import TreeRows, WalkTree, WatchReport, WatchRequests
from .snapshot import Snapshot, SnapshotBuilder

MAX_LIVES = 200
"""Lives that are kept; the one that ended longest ago is dropped first."""


class Overview:
    """The newest state of the worker, and the lives of its requests. ``version`` grows with each whole report."""

    def __init__(self) -> None:
        self.version = 0
        self.t = 0.0
        """Time of the last report, in seconds since the worker started."""
        self.load: LoadNow | None = None
        self.running: list[RunningNow] = []
        self.waiting: list[WaitingNow] = []
        self.leases: list[LeaseNow] = []
        self.num_leases = 0
        self.jobs: list[JobNow] = []
        self.num_jobs = 0
        self._lives: dict[tuple[str, int], tuple[Life, int]] = {}
        """Each life with the version of its last change; the one that changed last is at the end."""

    def merge_report(self, report: WatchReport) -> None:
        """Merge a part of a report into the state."""
        self.t = report.t
        if report.is_first:  # the worker did not record for a while: lives that were open are out of date
            self._lives = {key: kept for key, kept in self._lives.items() if not is_open(kept[0])}
        if report.load is not None:
            self.load = report.load
        self.running = self.running if report.running is None else report.running
        self.waiting = self.waiting if report.waiting is None else report.waiting
        if report.leases is not None:
            self.leases, self.num_leases = report.leases, report.num_leases
        if report.jobs is not None:
            self.jobs, self.num_jobs = report.jobs, report.num_jobs
        for life in report.lives:
            self._lives.pop((life.rid, life.index), None)
            self._lives[life.rid, life.index] = life, self.version + 1
        while len(self._lives) > MAX_LIVES:
            self._drop()
        self.version += report.is_last

    def _drop(self) -> None:
        ended = (key for key, (life, _) in self._lives.items() if life.end is not None)
        del self._lives[next(ended, next(iter(self._lives)))]

    def lives_since(self, version: int) -> list[Life]:
        """Lives that are new, or have changed, since ``version``."""
        return [life for life, brought in self._lives.values() if brought > version]


def is_open(life: Life) -> bool:
    """True if the life, or a phase of it, has not ended."""
    return life.end is None or any(end is None for _, _, end, _ in life.phases)


WATCH_S = 4.0
"""The worker stops reporting after this long without a renewal. `RENEW_S` leaves room for a loop that is late."""

RENEW_S = 1.0

WALK_S = 180.0
"""The longest wait for a walk, in seconds: a quarter of a million nodes take a minute or two."""


class LiveReportClient:
    """Requests reports and walks. Runs on the TokenizerManager's loop, which passes it the worker's messages."""

    def __init__(self, sender: Sender, availability: Availability) -> None:
        self._sender = sender
        self._availability = availability
        self.overview = Overview()
        self._reported = asyncio.Event()
        self._builder = SnapshotBuilder()
        self._walk: asyncio.Future[Snapshot] | None = None
        self._heard_at = time.monotonic()

    @property
    def t(self) -> float:
        """Seconds since the worker started, estimated from its last report."""
        return self.overview.t + time.monotonic() - self._heard_at

    def request_reports(self) -> None:
        """Ask the worker for reports during the next `WATCH_S` seconds. Raises RequestRefused."""
        self._availability.require_ready()
        self._sender.send(WatchRequests(seconds=WATCH_S))

    async def wait_report(self) -> None:
        """Wait until a whole report has arrived since the last call. For one task only."""
        await self._reported.wait()
        self._reported.clear()

    async def wait_closed(self) -> None:
        """Wait until the server ends."""
        await self._availability.wait_closed()

    async def walk_tree(self, *, with_heads: bool) -> Snapshot:
        """A snapshot of the tree, from the walk under way or a new one. Raises RequestRefused."""
        self._availability.require_ready()
        if self._walk is None:
            self._walk = asyncio.get_running_loop().create_future()
        self._sender.send(WalkTree(with_heads=with_heads))  # ignored by a worker that is walking already
        try:
            return await asyncio.wait_for(asyncio.shield(self._walk), WALK_S)
        except TimeoutError:
            raise RequestRefused(
                f"the worker did not walk its whole cache within {WALK_S:g} s", code="timeout"
            ) from None

    # -- calls of the manager --------------------------------------------------------------------------------------

    def worker_started(self) -> None:
        """Start the clock of a worker that has just become ready."""
        self._heard_at = time.monotonic()

    def take_message(self, message: WatchReport | TreeRows) -> None:
        if isinstance(message, WatchReport):
            self.overview.merge_report(message)
            self._heard_at = time.monotonic()
            if message.is_last:
                self._reported.set()
        elif (snapshot := self._builder.add_rows(message)) is not None:
            walk, self._walk = self._walk, None
            if walk is not None and not walk.done():
                walk.set_result(snapshot)

    def fail_all(self, error: RequestRefused) -> None:
        """Raise ``error`` in every call that waits for a walk."""
        walk, self._walk = self._walk, None
        if walk is not None and not walk.done():
            walk.set_exception(error)
            walk.exception()  # marks it as retrieved: the waiting call may be gone
