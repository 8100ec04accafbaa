"""What the worker has reported, in the HTTP process: the newest of everything, and the lives of late."""

from __future__ import annotations

from ...scheduler.watching.life import JobNow, LeaseNow, Life, LoadNow, RunningNow, WaitingNow
from ..messages import WatchReport

MAX_LIVES = 200
"""Kept; the one that ended longest ago goes first."""


class Overview:
    """Owns the lives. ``version`` grows with each whole report."""

    def __init__(self) -> None:
        self.version = 0
        self.t = 0.0
        """Of the last report, in seconds since the worker started."""
        self.load: LoadNow | None = None
        self.running: list[RunningNow] = []
        self.waiting: list[WaitingNow] = []
        self.leases: list[LeaseNow] = []
        self.num_leases = 0
        self.jobs: list[JobNow] = []
        self.num_jobs = 0
        self._lives: dict[tuple[str, int], tuple[Life, int]] = {}
        """With the version that brought it; the one that changed last at the end."""

    def merge(self, report: WatchReport) -> None:
        """Take a part of a report."""
        self.t = report.t
        if report.is_first:  # the worker has not recorded for a while: what was open then has gone on unseen
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
        """Those that are new, or have changed, since ``version``."""
        return [life for life, brought in self._lives.values() if brought > version]


def is_open(life: Life) -> bool:
    """Something of it goes on."""
    return life.end is None or any(end is None for _, _, end, _ in life.phases)
