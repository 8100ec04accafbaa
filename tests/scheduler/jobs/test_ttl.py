"""Times to live, against slow twins that follow the definitions."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.scheduler.jobs.ttl import cdf_ttl, gittins_rate, gittins_ttl

SETS = [
    [1.0],
    [0.0],
    [0.0, 0.0, 5.0],
    [2.0, 2.0, 2.0],
    [0.1, 0.1, 60.0],
    [0.4, 8.0, 120.0, 0.3, 0.5, 300.0],
    *([random.Random(seed).lognormvariate(0.0, 2.0) for _ in range(2 + 5 * seed)] for seed in range(8)),
]


def slow_rate(durations: list[float], age: float) -> float:
    """By the definition, over every τ at which the ratio can be greatest."""
    left = [d - age for d in durations if d > age]
    best = 0.0
    for tau in left:
        back = sum(d <= tau for d in left) / len(left)
        held = sum(min(d, tau) for d in left) / len(left)
        best = max(best, back / held)
    return best


@pytest.mark.parametrize("durations", SETS)
def test_the_rate_is_that_of_the_definition(durations: list[float]) -> None:
    array = np.sort(np.array(durations))
    for age in [0.0, 0.05, *durations, *(0.9 * d for d in durations)]:
        assert gittins_rate(array, age) == pytest.approx(slow_rate(durations, age))


@pytest.mark.parametrize("break_even", [0.3, 2.2, 9.0, 1000.0])
@pytest.mark.parametrize("durations", SETS)
def test_the_first_crossing(durations: list[float], break_even: float) -> None:
    ages = sorted({0.0, *durations})
    expected = next(age for age in ages if slow_rate(durations, age) <= 1 / break_even)
    assert gittins_ttl(np.sort(np.array(durations)), break_even) == pytest.approx(expected)


def test_between_two_durations_the_rate_never_falls_below_the_threshold() -> None:
    durations = np.sort(np.random.default_rng(5).lognormal(0.0, 1.5, 60))
    ttl = gittins_ttl(durations, 9.0)
    assert 0 < ttl < durations[-1]
    for age in np.linspace(0.0, ttl * 0.9999, 400):
        assert gittins_rate(durations, float(age)) > 1 / 9.0


@pytest.mark.parametrize("break_even", [0.3, 2.2, 9.0, 1000.0])
@pytest.mark.parametrize("durations", SETS)
def test_the_time_with_the_greatest_gain(durations: list[float], break_even: float) -> None:
    def gain(tau: float) -> float:
        back = sum(d <= tau for d in durations) / len(durations)
        return back - sum(min(d, tau) for d in durations) / len(durations) / break_even if tau or back else 0.0

    ttl = cdf_ttl(np.sort(np.array(durations)), break_even)
    assert max(gain(ttl), 0.0) == pytest.approx(max(0.0, *map(gain, durations)))


def test_weights_count_as_repetitions() -> None:
    durations, times = np.array([1.0, 1.5, 4.0, 9.0]), [4, 1, 2, 1]
    repeated, weights = np.repeat(durations, times), np.array(times, dtype=float)
    for break_even in (0.5, 3.0, 9.0):
        assert gittins_ttl(durations, break_even, weights) == gittins_ttl(repeated, break_even)
    for age in (0.0, 1.0, 1.2, 5.0, 9.0):
        assert gittins_rate(durations, age, weights) == pytest.approx(gittins_rate(repeated, age))
        assert gittins_rate(durations, age, weights, 2.0) == pytest.approx(gittins_rate(repeated, age, None, 2.0))


@pytest.mark.parametrize("durations", SETS)
@pytest.mark.parametrize("ahead", [0.01, 0.5, 100.0])
def test_the_rate_over_no_less_than_some_time(durations: list[float], ahead: float) -> None:
    for age in [0.0, *durations, *(0.9 * d for d in durations)]:
        left = [d - age for d in durations if d > age]
        best = max(
            (
                sum(d <= tau for d in left) / sum(min(d, tau) for d in left)
                for tau in [ahead, *left]
                if left and tau >= ahead
            ),
            default=0.0,
        )
        assert gittins_rate(np.sort(np.array(durations)), age, None, ahead) == pytest.approx(best)


def test_a_cap_does_not_draw_the_lease_to_itself() -> None:
    durations = np.array([0.1] * 50 + [60.0] * 50)
    assert gittins_ttl(durations, 9.0) == 0.1
    assert gittins_rate(durations, 59.9) > 1 / 9.0  # it rises again, after the first crossing
    assert gittins_ttl(durations, 61.0) == 60.0


def test_of_nothing_nothing_is_known() -> None:
    nothing = np.empty(0)
    assert cdf_ttl(nothing, 9.0) == gittins_ttl(nothing, 9.0) == gittins_rate(nothing, 1.0) == 0.0
