"""A histogram of weighted values of any size, in buckets a few percent wide."""

from __future__ import annotations

import math

_STEPS = 16
"""Buckets per doubling: 4 % wide."""


class Histogram:
    """A weighted histogram of values of at least 0."""

    def __init__(self) -> None:
        self._weights: dict[int, float] = {}
        self.total = 0.0

    def add_value(self, value: float, weight: float = 1.0) -> None:
        bucket = -(10**6) if value <= 1e-9 else math.ceil(math.log2(value) * _STEPS)
        self._weights[bucket] = self._weights.get(bucket, 0.0) + weight
        self.total += weight

    def buckets(self) -> list[tuple[float, float]]:
        """(largest value, weight) of each bucket, ascending."""
        return [(_value(bucket), self._weights[bucket]) for bucket in sorted(self._weights)]

    def quantile(self, share: float) -> float | None:
        """A value that this share of the weight does not exceed; None for an empty histogram."""
        left = share * self.total
        found = None
        for value, weight in self.buckets():
            found = value
            left -= weight
            if left <= 1e-9 * self.total:
                break
        return found


def _value(bucket: int) -> float:
    return 0.0 if bucket <= -(10**6) else 2 ** (bucket / _STEPS)
