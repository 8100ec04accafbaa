"""How long the pool takes to fill, as measured from steps."""

from __future__ import annotations

import pytest

from baton.scheduler.policies.fill_time import ENOUGH_TOKENS, START_S, WINDOW_TOKENS, FillTime


def test_fill_time_has_default_until_enough_is_measured() -> None:
    fill = FillTime(10_000)
    fill.record_step(ENOUGH_TOKENS - 1, 0.0, 5.0)
    assert fill.seconds == START_S and fill.tokens_per_s is None
    fill.record_step(1, 5.0, 5.0)
    assert fill.seconds == pytest.approx(10_000 * 5.0 / ENOUGH_TOKENS)
    assert fill.tokens_per_s == pytest.approx(ENOUGH_TOKENS / 5.0)


def test_overlapped_steps_are_timed_from_previous_result() -> None:
    plain, overlapped = FillTime(1000), FillTime(1000)
    for number in range(4):
        plain.record_step(1000, 2.0 * number, 2.0 * number + 2.0)
        overlapped.record_step(1000, max(0.0, 2.0 * number - 1.9), 2.0 * number + 2.0)
    assert plain.seconds == overlapped.seconds == pytest.approx(2.0)


def test_decodes_and_idle_time_do_not_affect_fill_time() -> None:
    fill = FillTime(1000)
    fill.record_step(4000, 0.0, 1.0)
    fill.record_step(0, 1.0, 50.0)
    fill.record_step(4000, 100.0, 101.0)
    assert fill.seconds == pytest.approx(0.25)


def test_old_measurements_fade() -> None:
    fill = FillTime(1000)
    now = 0.0
    for seconds in (1.0, 0.1):
        for _ in range(20):
            fill.record_step(WINDOW_TOKENS // 2, now, now + seconds)
            now += seconds
    assert fill.seconds == pytest.approx(1000 * 0.1 / (WINDOW_TOKENS // 2), rel=0.01)


def test_fill_time_counts_are_halved_beyond_window() -> None:
    window, fill = WINDOW_TOKENS, FillTime(WINDOW_TOKENS)
    fill.record_step(window, 0.0, 8.0)  # just full
    fill.record_step(window // 2, 8.0, 9.0)
    assert fill.seconds == pytest.approx(9.0 / 1.5)
    fill.record_step(window // 4, 9.0, 9.5)  # the 9 s count half now
    assert fill.seconds == pytest.approx((4.5 + 0.5) / (0.75 + 0.25))


def test_fixed_fill_time_overrides_measurement() -> None:
    fill = FillTime(1000, fixed=3.0)
    fill.record_step(1_000_000, 0.0, 99.0)
    assert fill.seconds == 3.0
