from __future__ import annotations

import numpy as np

from baton.scheduler.speculation.step_cost import GUESSED_SLOPE, MAX_TOKENS, MEMORY, StepCost


def estimate(cost: StepCost, *tokens: int) -> list[float]:
    return cost.estimate(np.array(tokens)).tolist()


def test_before_anything_was_measured_tokens_are_cheap_but_not_free() -> None:
    one, two, hundred = estimate(StepCost(), 1, 2, 100)
    assert one < two < 1.1 * one and hundred > 4 * one


def test_lines_between_what_was_measured() -> None:
    cost = StepCost()
    for _ in range(5):
        cost.note(1, 0.010)
        cost.note(9, 0.030)
    np.testing.assert_allclose(estimate(cost, 1, 5, 9), [0.010, 0.020, 0.030])
    np.testing.assert_allclose(estimate(cost, 19), [0.030 + 10 * GUESSED_SLOPE * 0.010])


def test_a_mean_follows_what_is_measured_but_not_a_step_that_was_held_up() -> None:
    cost = StepCost()
    for _ in range(10):
        cost.note(4, 0.010)
    cost.note(4, 5.0)
    assert estimate(cost, 4)[0] < 0.012
    for _ in range(100):
        cost.note(4, 0.020)
    assert 0.0195 < estimate(cost, 4)[0] < 0.0205


def test_more_tokens_never_cost_less() -> None:
    cost = StepCost()
    for tokens, seconds in ((1, 0.010), (2, 0.050), (8, 0.020)):
        cost.note(tokens, seconds)
    assert estimate(cost, 1, 2, 8) == [0.010, 0.020, 0.020]


def test_what_was_not_measured_for_long_is_forgotten() -> None:
    cost = StepCost()
    cost.note(16, 1.0)
    for _ in range(2 * MEMORY):
        cost.note(1, 0.010)
    assert estimate(cost, 16)[0] < 0.020


def test_steps_without_a_time_and_huge_ones_do_not_count() -> None:
    cost = StepCost()
    cost.note(1, 0.0)
    cost.note(MAX_TOKENS + 1, 1.0)
    assert estimate(cost, 1) == estimate(StepCost(), 1)
    cost.note(MAX_TOKENS, 2.0)
    assert estimate(cost, MAX_TOKENS) == [2.0]
