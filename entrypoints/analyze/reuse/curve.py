"""How many units each size of cache finds, summed up over a log in bounded memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

STEPS = 32
"""Sizes for each doubling: 2 % from one to the next."""

_LARGEST = 1 << 46


def sizes() -> list[int]:
    """The sizes in units that a curve knows exactly, unless it is asked for others: one by one at first, then in steps
    of 2 %."""
    found, size = [0], 1.0
    while size < _LARGEST:
        if int(size) > found[-1]:
            found.append(int(size))
        size = max(size * 2 ** (1 / STEPS), found[-1] + 1 if size < STEPS else 0)
    return found


class Curve:
    """Hits by size of cache. A run of units has distances a + 1, a + 2, … b; a cache of g units has min(g, b) - min(g,
    a) of them. So a run is the difference of two ramps, and a sum of ramps is known by how many begin below g, and
    where."""

    def __init__(self, grid: Sequence[int]) -> None:
        """grid: sizes in units, growing."""
        self.grid = list(grid)
        self._begun = [0] * (len(grid) + 1)
        self._places = [0] * (len(grid) + 1)
        """Of the ramps between two sizes: how many begin there less how many end, and the sums of where."""
        self.units = 0
        """Hits of an endless cache."""

    def add(self, above: int, units: int) -> None:
        """A run with distances above + 1 … above + units has been asked for."""
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
