"""Hits of every cache size, summed over a log in bounded memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

STEPS = 32
"""Sizes per doubling: 2 % from one to the next."""

_LARGEST = 1 << 46


def sizes() -> list[int]:
    """The default grid of a curve, in units: every size at first, then in steps of 2 %."""
    found, size = [0], 1.0
    while size < _LARGEST:
        if int(size) > found[-1]:
            found.append(int(size))
        size = max(size * 2 ** (1 / STEPS), found[-1] + 1 if size < STEPS else 0)
    return found


class Curve:
    """Hits by cache size. A cache of g units has min(g, b) - min(g, a) units of a run with distances a + 1, a + 2, … b.
    A run is thus the difference of two ramps, and the sum of ramps at g follows from the number and the sum of the
    starts below g."""

    def __init__(self, grid: Sequence[int]) -> None:
        """grid: sizes in units, ascending."""
        self.grid = list(grid)
        self._begun = [0] * (len(grid) + 1)
        self._places = [0] * (len(grid) + 1)
        """Between two sizes of the grid: ramps that begin less ramps that end, and the sums of their places."""
        self.units = 0
        """Hits of an infinite cache."""

    def add_run(self, above: int, units: int) -> None:
        """Count a requested run with distances above + 1 … above + units."""
        if units <= 0:
            return
        self.units += units
        begin, end = above, above + units
        place = bisect_right(self.grid, begin)
        self._begun[place] += 1
        self._places[place] += begin
        place = bisect_right(self.grid, end)
        self._begun[place] -= 1
        self._places[place] -= end

    def hits(self) -> list[int]:
        """Units found by a cache of each size of the grid."""
        found, begun, places = [], 0, 0
        for size, more, where in zip(self.grid, self._begun, self._places):
            begun += more
            places += where
            found.append(begun * size - places)
        return found

    def least_size(self, hits: float, upto: int | None = None) -> int | None:
        """The smallest size of the grid, in units, that finds so many; None if none does, or none up to ``upto``."""
        for size, found in zip(self.grid, self.hits()):
            if upto is not None and size > upto:
                return None
            if found >= hits:
                return size
        return None
