"""Draft lengths: accept rates, the measured cost of a step, and the lengths chosen from both."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from baton.scheduler.speculation.draft_length import (
    GUESSED_SLOPE,
    KEPT,
    MAX_TOKENS,
    MEMORY,
    AcceptRate,
    StepCost,
    best_lengths,
)


def costing(first: float, each_more: float) -> StepCost:
    """Steps of one token take ``first``, each token more ``each_more``."""
    cost = StepCost()
    for tokens in (1, 2, 4, 8, 16, 64, 256):
        for _ in range(4):
            cost.record_step(tokens, first + each_more * (tokens - 1))
    return cost


def speed(rates: list[float], lengths: tuple[int, ...], rows: int, cost: StepCost) -> float:
    gained = sum(rate**k for rate, length in zip(rates, lengths) for k in range(1, length + 1))
    return (rows + gained) / float(cost.estimate(np.array([rows + sum(lengths)]))[0])


def test_draft_length_falls_with_token_cost() -> None:
    free, dear = costing(10.0, 0.01), costing(10.0, 9.0)
    assert best_lengths([0.9], [16], 1, 63, free) == [16]
    assert best_lengths([0.9], [16], 1, 63, dear) == [0]
    assert best_lengths([0.05], [16], 1, 63, costing(10.0, 2.0)) == [0]


def test_likelier_drafts_are_longer() -> None:
    unlikely, likely = best_lengths([0.3, 0.9], [16, 16], 2, 62, costing(10.0, 0.5))
    assert unlikely < likely


def test_a_full_batch_drafts_less() -> None:
    """What one token more costs is the same, but it brings no more either."""
    cost = costing(10.0, 1.0)
    (alone,) = best_lengths([0.7], [16], 1, 1000, cost)
    (beside_others,) = best_lengths([0.7], [16], 100, 1000, cost)
    assert alone > 2 and beside_others == 0


@pytest.mark.parametrize("each_more", [0.1, 0.6, 1.5])
@pytest.mark.parametrize("rates", [[0.8], [0.5, 0.95], [0.3, 0.6, 0.9]])
def test_best_draft_lengths_are_near_optimal(rates: list[float], each_more: float) -> None:
    cost, longest = costing(10.0, each_more), [8] * len(rates)
    found = tuple(best_lengths(rates, longest, len(rates), 63, cost))
    best = max(speed(rates, lengths, len(rates), cost) for lengths in itertools.product(range(9), repeat=len(rates)))
    assert speed(rates, found, len(rates), cost) > 0.93 * best


def test_total_draft_length_is_limited_by_room() -> None:
    lengths = best_lengths([0.9, 0.9, 0.9], [16, 16, 16], 3, 10, costing(10.0, 0.01))
    assert 0 < sum(lengths) <= 10


def test_accept_rate_counts_only_verified_tokens() -> None:
    rate = AcceptRate(1.0)
    rate.record_draft(3, 8)  # four were put to the test
    assert rate.estimate(0.5, 0.0) == 0.75
    rate.record_draft(4, 4)
    assert rate.estimate(0.5, 0.0) == 7 / 8
    assert rate.estimate(0.0, 8.0) == 7 / 16


def test_accept_rate_follows_recent_results() -> None:
    rate = AcceptRate(KEPT)
    for _ in range(30):
        rate.record_draft(8, 8)
    for _ in range(20):
        rate.record_draft(0, 8)
    assert rate.estimate(0.9, 2.0) < 0.35


def estimate(cost: StepCost, *tokens: int) -> list[float]:
    return cost.estimate(np.array(tokens)).tolist()


class TestStepCost:
    def test_unmeasured_token_cost_is_small_but_not_zero(self) -> None:
        one, two, hundred = estimate(StepCost(), 1, 2, 100)
        assert one < two < 1.1 * one and hundred > 4 * one

    def test_step_cost_interpolates_linearly(self) -> None:
        cost = StepCost()
        for _ in range(5):
            cost.record_step(1, 0.010)
            cost.record_step(9, 0.030)
        np.testing.assert_allclose(estimate(cost, 1, 5, 9), [0.010, 0.020, 0.030])
        np.testing.assert_allclose(estimate(cost, 19), [0.030 + 10 * GUESSED_SLOPE * 0.010])

    def test_step_cost_follows_measurements_but_not_outliers(self) -> None:
        cost = StepCost()
        for _ in range(10):
            cost.record_step(4, 0.010)
        cost.record_step(4, 5.0)
        assert estimate(cost, 4)[0] < 0.012
        for _ in range(100):
            cost.record_step(4, 0.020)
        assert 0.0195 < estimate(cost, 4)[0] < 0.0205

    def test_more_tokens_never_cost_less(self) -> None:
        cost = StepCost()
        for tokens, seconds in ((1, 0.010), (2, 0.050), (8, 0.020)):
            cost.record_step(tokens, seconds)
        assert estimate(cost, 1, 2, 8) == [0.010, 0.020, 0.020]

    def test_stale_step_costs_are_forgotten(self) -> None:
        cost = StepCost()
        cost.record_step(16, 1.0)
        for _ in range(2 * MEMORY):
            cost.record_step(1, 0.010)
        assert estimate(cost, 16)[0] < 0.020

    def test_untimed_and_oversized_steps_are_ignored(self) -> None:
        cost = StepCost()
        cost.record_step(1, 0.0)
        cost.record_step(MAX_TOKENS + 1, 1.0)
        assert estimate(cost, 1) == estimate(StepCost(), 1)
        cost.record_step(MAX_TOKENS, 2.0)
        assert estimate(cost, MAX_TOKENS) == [2.0]
