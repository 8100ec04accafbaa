"""How fast copies are, as measured from them."""

from __future__ import annotations

import pytest

from baton.scheduler.memory.transfer_rates import ENOUGH_TOKENS, HALF_LIFE_TOKENS, CopyRate


def test_copy_rate_is_unknown_until_enough_is_measured() -> None:
    rate = CopyRate()
    rate.record_copy(ENOUGH_TOKENS - 1, 1.0)
    assert rate.tokens_per_s is None
    rate.record_copy(1, 1.0)
    assert rate.tokens_per_s == pytest.approx(ENOUGH_TOKENS / 2, rel=0.02)
    assert rate.seconds == 2.0


def test_copy_rate_weights_copies_by_size() -> None:
    rate = CopyRate()
    rate.record_copy(10_000, 1.0)
    for _ in range(10):
        rate.record_copy(1, 0.001)  # a tenth of the speed
    assert rate.tokens_per_s == pytest.approx(10_010 / 1.01, rel=1e-3)


def test_old_measurements_fade() -> None:
    rate = CopyRate()
    rate.record_copy(HALF_LIFE_TOKENS, 1.0)
    rate.record_copy(HALF_LIFE_TOKENS, 2.0)
    assert rate.tokens_per_s == pytest.approx(HALF_LIFE_TOKENS * 1.5 / 2.5)
    for _ in range(20):
        rate.record_copy(HALF_LIFE_TOKENS, 2.0)
    assert rate.tokens_per_s == pytest.approx(HALF_LIFE_TOKENS / 2, rel=1e-4)


def test_copies_without_duration_are_ignored() -> None:
    rate = CopyRate()
    rate.record_copy(10 * ENOUGH_TOKENS, 0.0)
    assert rate.tokens_per_s is None
    rate.record_copy(ENOUGH_TOKENS, 0.5)
    assert rate.tokens_per_s == pytest.approx(2 * ENOUGH_TOKENS)
