"""How values are spread over buckets: a histogram in the sense of Prometheus."""

from __future__ import annotations

import numpy as np

SECONDS = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0, 14400.0, 86400.0)
"""Upper bounds, for times that KV stays or rests."""


class Spread:
    """Counts weighted values by bucket. A value on a bound belongs below it; one bucket more is above all bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = np.array(bounds)
        self.counts = [0] * (len(bounds) + 1)
        """Weights by bucket, not cumulative."""
        self.sum = 0.0
        """The sum of the values, each times its weight."""

    def add_values(self, values: np.ndarray, weights: np.ndarray) -> None:
        """values: float64 [n]. weights: whole numbers as float64 [n]."""
        buckets = np.searchsorted(self._bounds, values, side="left")
        added = np.bincount(buckets, weights=weights, minlength=len(self.counts))
        self.counts = [old + int(new) for old, new in zip(self.counts, added)]
        self.sum += float(values @ weights)
