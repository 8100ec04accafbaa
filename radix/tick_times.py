"""When the accesses happened that a cache counts: from ticks to seconds, in bounded memory."""

from __future__ import annotations

from array import array

import numpy as np

STEP = 0.01
"""Distance in the logarithm of an age: entries that are closer to each other than this become one."""

FINEST_S = 0.01
"""Two times that are closer to each other count as one."""


class TickTimes:
    """A list of (tick, seconds), which gets coarser towards the past: a time is right to within 2 % of its age, and
    `FINEST_S`."""

    MAX_ENTRIES = 4096
    """A month takes some 2,000 after a thinning."""

    def __init__(self) -> None:
        self._ticks = array("q")
        self._seconds = array("d")

    @classmethod
    def unpacked(cls, ticks: bytes, seconds: bytes) -> TickTimes:
        """The inverse of `packed`."""
        times = cls()
        times._ticks.frombytes(ticks)
        times._seconds.frombytes(seconds)
        return times

    def packed(self) -> tuple[bytes, bytes]:
        """(int64 ticks, float64 seconds)"""
        return self._ticks.tobytes(), self._seconds.tobytes()

    def __len__(self) -> int:
        return len(self._ticks)

    def record_tick(self, tick: int, now: float) -> None:
        """The ticks after this one happen now, until the next call."""
        ticks, seconds = self._ticks, self._seconds
        if ticks and ticks[-1] == tick:
            seconds[-1] = now
            return
        ticks.append(tick)
        seconds.append(now)
        if len(ticks) > self.MAX_ENTRIES:
            self._thin(now)

    def seconds_at(self, ticks: np.ndarray) -> np.ndarray:
        """float64 [n]: when the ticks, of any number type [n], happened. A tick before the oldest note
        gets the time of that note."""
        index = np.searchsorted(np.frombuffer(self._ticks, dtype=np.int64), ticks, side="left") - 1
        return np.frombuffer(self._seconds, dtype=np.float64)[np.maximum(index, 0)]

    def tick_by(self, seconds: float) -> int:
        """The latest tick that is known to have happened by this time; 0 if none is."""
        index = int(np.searchsorted(np.frombuffer(self._seconds, dtype=np.float64), seconds, side="right")) - 1
        return self._ticks[index] if index >= 0 else 0

    def _thin(self, now: float) -> None:
        ages = now - np.frombuffer(self._seconds, dtype=np.float64)
        steps = np.log(ages + FINEST_S) // STEP
        kept = np.flatnonzero(np.diff(steps, prepend=np.inf)).tolist()
        self._ticks = array("q", [self._ticks[i] for i in kept])
        self._seconds = array("d", [self._seconds[i] for i in kept])
