"""How many units were last used after a given time: a Fenwick tree over times (Fenwick, 1994).

This is what makes reuse distances cheap: Bennett and Kruskal (1975) count with it the distinct items since an access.
"""

from __future__ import annotations

from array import array


class Recency:
    """Units by the time of their last use. Times are whole numbers from 0 to below ``capacity``. Both calls take
    O(log capacity)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = 1 << max(1, (capacity - 1).bit_length())
        self.total = 0
        """Units of all times."""
        self._sums = array("q", bytes(8 * (self.capacity + 1)))

    def add(self, time: int, units: int) -> None:
        """More units, or fewer where negative, have this time."""
        self.total += units
        sums, capacity, place = self._sums, self.capacity, time + 1
        while place <= capacity:
            sums[place] += units
            place += place & -place

    def after(self, time: int) -> int:
        """Units that were last used later than ``time``."""
        sums, place, found = self._sums, time + 1, 0
        while place:
            found += sums[place]
            place &= place - 1
        return self.total - found
