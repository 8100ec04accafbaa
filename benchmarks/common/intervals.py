"""Confidence intervals of means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import stdev

_FEW = (12.706, 4.303, 3.182, 2.776)
"""97.5 % quantiles of Student's t with 1 to 4 degrees of freedom."""


def student(degrees: int) -> float:
    """The 97.5 % quantile of Student's t: from 5 degrees of freedom up Cornish and Fisher's series, good to 1 %."""
    if degrees <= len(_FEW):
        return _FEW[degrees - 1]
    z = 1.959964
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return z + sum(term / degrees ** (i + 1) for i, term in enumerate(terms))


def half_width(values: Sequence[float]) -> float:
    """Half of the 95 % confidence interval of the mean; infinite for a single value."""
    if len(values) < 2:
        return math.inf
    return student(len(values) - 1) * stdev(values) / math.sqrt(len(values))
