"""Counts of the last minutes, from counts that only grow: a snapshot every few seconds, and the difference to it."""

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
        """Is it time for the next snapshot?"""
        return not self._times or now >= self._times[-1] + SLOT_S

    def add_snapshot(self, totals: CacheTotals, now: float) -> None:
        """Its windowed counts count; the others may be left out."""
        self._times.append(now)
        self._snapshots.append(totals)
        if len(self._times) > self.MAX_SNAPSHOTS:
            del self._times[0], self._snapshots[0]

    def last(self, seconds: int, totals: CacheTotals, now: float) -> WindowStats:
        """The last ``seconds``, or what there was of them."""
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
