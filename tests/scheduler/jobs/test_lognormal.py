"""What is believed of a tool's time."""

from __future__ import annotations

import math

import numpy as np
import pytest

from baton.scheduler.jobs.lognormal import LogNormalBelief, student_t_quantile


@pytest.mark.parametrize(
    ("share", "freedom", "expected"),
    [(0.5, 4, 0.0), (0.9, 4, 1.5332), (0.95, 4, 2.1318), (0.99, 4, 3.7469), (0.9, 10, 1.3722), (0.975, 30, 2.0423)],
)
def test_quantiles_are_those_of_the_tables(share: float, freedom: float, expected: float) -> None:
    assert student_t_quantile(share, freedom) == pytest.approx(expected, rel=0.01, abs=1e-9)
    assert student_t_quantile(1 - share, freedom) == pytest.approx(-expected, rel=0.01, abs=1e-9)


def test_one_update_is_that_of_the_formulas() -> None:
    belief = LogNormalBelief(mean=1.0, weight=2.0, shape=3.0, scale=4.0).after(np.exp([0.0, 2.0, 4.0]))
    assert belief.weight == 5.0 and belief.shape == 4.5
    assert belief.mean == pytest.approx((2 * 1.0 + 3 * 2.0) / 5)
    assert belief.scale == pytest.approx(4.0 + 8.0 / 2 + 2 * 3 * (2.0 - 1.0) ** 2 / (2 * 5))


def test_all_at_once_is_as_one_after_the_other() -> None:
    times = np.random.default_rng(1).lognormal(0.5, 1.0, 20)
    belief = LogNormalBelief()
    for time in times:
        belief = belief.after(np.array([time]))
    whole = LogNormalBelief().after(times)
    assert (belief.mean, belief.scale) == (pytest.approx(whole.mean), pytest.approx(whole.scale))


def test_with_many_durations_the_truth_comes_out() -> None:
    times = np.random.default_rng(2).lognormal(math.log(3.0), 0.7, 20_000)
    belief = LogNormalBelief().after(times)
    for share in (0.1, 0.5, 0.9):
        assert belief.quantile(share) == pytest.approx(float(np.quantile(times, share)), rel=0.05)
    rng = np.random.default_rng(3)
    drawn = [belief.draw(rng) for _ in range(4000)]
    assert float(np.median(drawn)) == pytest.approx(3.0, rel=0.1)


def test_a_prior_is_worth_a_few_durations() -> None:
    every = LogNormalBelief().after(np.full(1000, 0.1))
    prior = every.as_prior(2.0)
    assert prior.weight == 2.0 and prior.mean == pytest.approx(math.log(0.1), abs=0.01)
    assert prior.after(np.full(20, 30.0)).quantile(0.5) > 10.0


def test_no_time_at_all_and_times_without_end() -> None:
    assert LogNormalBelief().after(np.zeros(5)).quantile(0.5) < 0.1
    assert math.isfinite(LogNormalBelief(mean=1000.0).quantile(0.99))
