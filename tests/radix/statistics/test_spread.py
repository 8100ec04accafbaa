"""Weights land in the bucket of their value."""

from __future__ import annotations

import numpy as np

from baton.radix.statistics.spread import Spread


def test_a_value_on_a_bound_belongs_below_it() -> None:
    spread = Spread((1.0, 10.0))
    spread.add_values(np.array([0.0, 1.0, 1.5, 10.0, 10.5, 99.0]), np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0]))
    assert spread.counts == [3, 12, 48]
    assert spread.sum == 2 + 6 + 80 + 168 + 99 * 32
    spread.add_values(np.array([5.0]), np.array([100.0]))
    assert spread.counts == [3, 112, 48]
