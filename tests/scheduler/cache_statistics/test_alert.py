"""The log says once that the cache finds too little, and once that it finds enough again."""

from __future__ import annotations

import logging

import pytest

from baton.scheduler.cache_statistics.alert import MIN_PROMPTS, HitRateAlert
from baton.scheduler.cache_statistics.cache_stats import HitTokens, WindowStats


def window(percent: int, *, prompts: int = MIN_PROMPTS, covered: float = 300.0) -> WindowStats:
    hits = HitTokens(match=10 * percent)
    return WindowStats(300, covered_s=covered, prompts=prompts, query_tokens=1000 if prompts else 0, hits=hits)


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "baton.scheduler.cache_statistics.alert")


def test_once_for_each_excursion(caplog: pytest.LogCaptureFixture) -> None:
    alert, seen = HitRateAlert(0.5), []
    # It recovers at 55 %: half of the way would be flapping.
    for percent in (60, 49, 30, 50, 54, 49, 55, 54, 50, 49, 80):
        alert.judge(window(percent))
        seen.append(alert.active)
    assert seen == [False, True, True, True, True, True, False, False, False, True, False]
    assert [line.levelname for line in caplog.records] == ["WARNING", "INFO", "WARNING", "INFO"]
    assert "0.490 of 1000 prompt tokens in the last 300 s, less than --hit-rate-alert 0.5;" in caplog.messages[0]


def test_too_few_prompts_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    alert = HitRateAlert(0.5)
    alert.judge(window(10, prompts=MIN_PROMPTS - 1))
    assert not alert.active
    alert.judge(window(10))
    alert.judge(window(90, prompts=MIN_PROMPTS - 1))
    assert alert.active
    alert.judge(window(0, prompts=0))
    assert not alert.active, "nobody asks any more"
    assert len(caplog.messages) == 1


def test_a_window_that_is_not_full_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    alert = HitRateAlert(0.5)
    alert.judge(window(0, covered=299.0))
    assert not alert.active and not caplog.messages


@pytest.mark.parametrize("threshold", [0.9, 0.99])
def test_a_high_threshold_can_be_met_again(threshold: float) -> None:
    alert = HitRateAlert(threshold)
    alert.judge(window(50))
    assert alert.active
    alert.judge(window(100))
    assert not alert.active


def test_it_is_off_by_default(caplog: pytest.LogCaptureFixture) -> None:
    alert = HitRateAlert(0.0)
    alert.judge(window(0))
    assert not alert.active and not caplog.messages
