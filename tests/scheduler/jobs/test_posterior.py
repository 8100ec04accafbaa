"""The normal-inverse-gamma model of log durations, and Student's t, against tables and limits."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from baton.scheduler.jobs.posterior import SHORTEST_S, START_MEDIAN_S, LogNormal, student_t_quantiles

NOTHING = np.empty(0)


@pytest.mark.parametrize(
    ("freedom", "probability", "expected"),
    [
        (1, 0.975, 12.706), (2, 0.975, 4.303), (4, 0.95, 2.132), (5, 0.975, 2.571), (3, 0.995, 5.841),
        (4, 0.9995, 8.610), (10, 0.975, 2.228), (30, 0.99, 2.457), (120, 0.975, 1.980), (1e6, 0.975, 1.960),
        (260, 0.5, 0.0),
    ],
)  # fmt: skip
def test_quantiles_of_student_t_as_in_tables(freedom: float, probability: float, expected: float) -> None:
    upper, lower = student_t_quantiles(np.array([probability, 1.0 - probability]), freedom)
    assert upper == pytest.approx(expected, abs=6e-4) and lower == pytest.approx(-upper, abs=1e-9)


def test_one_by_one_is_all_at_once() -> None:
    seconds = np.exp(np.random.default_rng(0).normal(1.0, 0.7, 9))
    prior = LogNormal(0.3, 1.5, 2.0, 0.8)
    step = prior
    for one in seconds:
        step = step.after(np.array([one]))
    once = prior.after(seconds)
    assert (step.mean, step.weight, step.shape, step.rate) == pytest.approx(
        (once.mean, once.weight, once.shape, once.rate)
    )


def test_closed_form_by_hand() -> None:
    posterior = LogNormal(0.0, 1.0, 2.0, 1.0).after(np.exp([1.0, 3.0]))
    # Average 2, squares around it 2; the prior's mean is 2 away and weighs 1 · 2 / 3.
    assert (posterior.mean, posterior.weight, posterior.shape) == pytest.approx((4.0 / 3.0, 3.0, 3.0))
    assert posterior.rate == pytest.approx(1.0 + (2.0 + 4.0 * 2.0 / 3.0) / 2.0)


def test_many_samples_give_the_law_itself() -> None:
    seconds = np.exp(np.random.default_rng(1).normal(2.0, 0.5, 50_000))
    posterior = LogNormal.prior(NOTHING).after(seconds)
    for q in (0.05, 0.5, 0.9):
        assert posterior.quantile(q) == pytest.approx(math.exp(2.0 + 0.5 * NormalDist().inv_cdf(q)), rel=0.02)


def test_few_samples_leave_a_wide_tail() -> None:
    prior = LogNormal.prior(NOTHING)
    highs = [prior.after(np.full(count, 5.0)).quantile(0.95) / 5.0 for count in (1, 3, 10, 100)]
    assert highs == sorted(highs, reverse=True) and highs[0] > 3.0 and highs[-1] < 1.5


def test_prior_predicts_what_all_tools_showed() -> None:
    seconds = np.exp(np.random.default_rng(2).normal(1.5, 1.2, 40_000))
    prior = LogNormal.prior(seconds)
    assert prior.quantile(0.5) == pytest.approx(math.exp(1.5), rel=0.02)
    # A t distribution of 4 degrees has twice the variance of its squared scale, which is the rate here.
    assert 2.0 * prior.rate == pytest.approx(1.2**2, rel=0.02) and (prior.weight, prior.shape) == (1.0, 2.0)


def test_nothing_seen() -> None:
    prior = LogNormal.prior(NOTHING)
    assert prior.quantile(0.5) == pytest.approx(START_MEDIAN_S) and prior.after(NOTHING) is prior
    # The spread counts the distance from the start, too: a single odd tool is no certainty.
    odd = LogNormal.prior(np.array([1000.0]))
    assert odd.rate > prior.rate and odd.mean == pytest.approx(math.log(1000.0) / 5.0)


def test_zero_counts_as_a_millisecond() -> None:
    prior = LogNormal.prior(NOTHING)
    assert prior.after(np.zeros(3)) == prior.after(np.full(3, SHORTEST_S))


def test_far_quantiles_stay_finite() -> None:
    wild = LogNormal(0.0, 1.0, 0.5, 1e6)
    assert np.isfinite(wild.quantiles(np.array([1e-9, 1.0 - 1e-9]))).all()
    assert np.isfinite([wild.draw_median(np.random.default_rng(seed)) for seed in range(200)]).all()


def test_draws_follow_the_posterior_of_the_median() -> None:
    posterior = LogNormal.prior(NOTHING).after(np.array([2.0, 3.0, 8.0]))
    rng = np.random.default_rng(3)
    draws = np.log([posterior.draw_median(rng) for _ in range(20_000)])
    levels = np.array([0.1, 0.5, 0.9])
    scale = math.sqrt(posterior.rate / (posterior.shape * posterior.weight))
    expected = posterior.mean + scale * student_t_quantiles(levels, 2.0 * posterior.shape)
    assert np.quantile(draws, levels) == pytest.approx(expected, abs=0.03)
    assert np.log(posterior.draw_median(np.random.default_rng(3))) == draws[0]
