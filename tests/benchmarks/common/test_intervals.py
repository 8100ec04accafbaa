"""Confidence intervals."""

from __future__ import annotations

import math

import pytest

from benchmarks.common.intervals import half_width, student


@pytest.mark.parametrize(
    ("degrees", "quantile"), [(1, 12.706), (4, 2.776), (5, 2.571), (9, 2.262), (19, 2.093), (60, 2.000)]
)
def test_student_t_quantiles(degrees: int, quantile: float) -> None:
    assert student(degrees) == pytest.approx(quantile, rel=0.01)


def test_half_width_is_that_of_the_mean() -> None:
    assert half_width([1.0, 3.0]) == pytest.approx(12.706), "a standard error of 1"
    assert math.isinf(half_width([1.0]))
