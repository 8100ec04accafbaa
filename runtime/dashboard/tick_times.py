"""When the cache's ticks were: it counts accesses, and people want seconds."""

from __future__ import annotations

import numpy as np

MAX_SAMPLES = 2048
"""Kept; of older ones every other goes when there are more."""


class TickTimes:
    """Samples of (time, tick), both growing."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._ticks: list[int] = []

    def note(self, now: float, tick: int) -> None:
        """``tick`` is the newest at ``now``."""
        if self._ticks and tick <= self._ticks[-1]:
            return
        if len(self._ticks) == MAX_SAMPLES:
            half = MAX_SAMPLES // 2
            self._times[:half], self._ticks[:half] = self._times[:half:2], self._ticks[:half:2]
        self._times.append(now)
        self._ticks.append(tick)

    def packed(self) -> tuple[bytes, bytes]:
        """(float64 times, int64 ticks)."""
        return np.array(self._times, dtype=np.float64).tobytes(), np.array(self._ticks, dtype=np.int64).tobytes()
