"""Times to live, against slow twins that follow the definitions."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.scheduler.jobs.ttl import best_ttl

SETS = [
    [1.0],
    [0.0],
    [0.0, 0.0, 5.0],
    [2.0, 2.0, 2.0],
    [0.1, 0.1, 60.0],
    [0.4, 8.0, 120.0, 0.3, 0.5, 300.0],
    *([random.Random(seed).lognormvariate(0.0, 2.0) for _ in range(2 + 5 * seed)] for seed in range(8)),
]


def slow_index(durations: list[float], age: float) -> float:
    """Gittins' index by its definition, over every τ at which the ratio can be greatest."""
    left = [d - age for d in durations if d > age]
    best = 0.0
    for tau in left:
        back = sum(d <= tau for d in left) / len(left)
        held = sum(min(d, tau) for d in left) / len(left)
        best = max(best, back / held)
    return best


@pytest.mark.parametrize("break_even", [0.3, 2.2, 9.0, 1000.0])
@pytest.mark.parametrize("durations", SETS)
def test_the_first_crossing(durations: list[float], break_even: float) -> None:
    ages = sorted({0.0, *durations})
    expected = next(age for age in ages if slow_index(durations, age) <= 1 / break_even)
    assert best_ttl(np.sort(np.array(durations)), break_even) == pytest.approx(expected)


def test_until_then_the_index_never_falls_below_the_threshold() -> None:
    durations = np.sort(np.random.default_rng(5).lognormal(0.0, 1.5, 60))
    ttl = best_ttl(durations, 9.0)
    assert 0 < ttl < durations[-1]
    for age in np.linspace(0.0, ttl * 0.9999, 400):
        assert slow_index(durations.tolist(), float(age)) > 1 / 9.0


@pytest.mark.parametrize("break_even", [0.3, 2.2, 9.0, 1000.0])
@pytest.mark.parametrize("durations", SETS)
def test_the_time_with_the_greatest_gain(durations: list[float], break_even: float) -> None:
    def gain(tau: float) -> float:
        back = sum(d <= tau for d in durations) / len(durations)
        return back - sum(min(d, tau) for d in durations) / len(durations) / break_even if tau or back else 0.0

    ttl = best_ttl(np.sort(np.array(durations)), break_even)
    assert max(gain(ttl), 0.0) == pytest.approx(max(0.0, *map(gain, durations)))


def test_weights_count_as_repetitions() -> None:
    durations, times = np.array([1.0, 1.5, 4.0, 9.0]), [4, 1, 2, 1]
    repeated, weights = np.repeat(durations, times), np.array(times, dtype=float)
    for break_even in (0.5, 3.0, 9.0):
        assert best_ttl(durations, break_even, weights) == best_ttl(repeated, break_even)


def test_a_cap_does_not_draw_the_lease_to_itself() -> None:
    durations = np.array([0.1] * 50 + [60.0] * 50)
    assert best_ttl(durations, 9.0) == 0.1
    assert slow_index(durations.tolist(), 59.9) > 1 / 9.0, "it rises again, after the first crossing"
    assert best_ttl(durations, 61.0) == 60.0


def test_of_nothing_nothing_is_known() -> None:
    assert best_ttl(np.empty(0), 9.0) == 0.0


def test_where_computing_costs_nothing_nothing_is_kept() -> None:
    assert best_ttl(np.array([0.0, 1.0]), 0.0) == 0.0
