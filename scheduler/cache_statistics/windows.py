"""Counts over recent windows, as differences between snapshots of growing counts taken every few seconds."""

from __future__ import annotations

from bisect import bisect_right

from .cache_stats import CacheTotals, WindowStats

SLOT_S = 5.0
WINDOWS_S = (60, 300, 900)


class RollingWindows:
    """The snapshots of the longest window."""

    MAX_SNAPSHOTS = int(WINDOWS_S[-1] / SLOT_S) + 2

    def __init__(self) -> None:
        self._times: list[float] = []
        self._snapshots: list[CacheTotals] = []

    def __len__(self) -> int:
        return len(self._times)

    def clear(self) -> None:
        self._times.clear()
        self._snapshots.clear()

    def is_due(self, now: float) -> bool:
        """True if the next snapshot is due."""
        return not self._times or now >= self._times[-1] + SLOT_S

    def add_snapshot(self, totals: CacheTotals, now: float) -> None:
        """Add a snapshot; only the counts that `last` reports are needed."""
        self._times.append(now)
        self._snapshots.append(totals)
        if len(self._times) > self.MAX_SNAPSHOTS:
            del self._times[0], self._snapshots[0]

    def last(self, seconds: int, totals: CacheTotals, now: float) -> WindowStats:
        """Counts of the last ``seconds``, or since the first snapshot if that is later."""
        if not self._times:
            return WindowStats(seconds)
        index = max(0, bisect_right(self._times, now - seconds) - 1)
        then = self._snapshots[index]
        return WindowStats(
            seconds,
            covered_s=now - self._times[index],
            prompts=totals.prompts - then.prompts,
            query_tokens=totals.query_tokens - then.query_tokens,
            hits=totals.hits - then.hits,
            evicted_tokens=totals.evicted_tokens - then.evicted_tokens,
        )
