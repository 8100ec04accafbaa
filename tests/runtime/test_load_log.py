"""The lines about load: one per interval with work in it, none without, and totals."""

from __future__ import annotations

import logging

import pytest

from baton.runtime.load_log import LoadLog
from baton.scheduler.stats import SchedulerStats


def stats(steps: int, running: int = 0, waiting: int = 0) -> SchedulerStats:
    return SchedulerStats(
        num_running_reqs=running,
        num_queue_reqs=waiting,
        steps=steps,
        total_tokens=1000,
        free_tokens=200,
        evictable_tokens=300,
        computed_prompt_tokens=100 * steps,
        output_tokens=10 * steps,
        prefix_cache_queries=200 * steps,
        prefix_cache_hits=50 * steps,
    )


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


def test_line_per_interval_with_work(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = LoadLog(10.0)
    for second in range(60):  # idle
        log.add_report(stats(0), second)
    assert not lines(caplog)
    for second in range(60, 71):
        log.add_report(stats(second - 59, running=3, waiting=2), second)
    assert lines(caplog) == [
        "load: 3 running, 2 waiting; 110 prompt tokens/s, 11 output tokens/s; cache hit rate 25 %; KV pool 50 % in use"
    ]
    for second in range(71, 80):
        log.add_report(stats(11), second)
    assert not lines(caplog), "the interval has not ended"
    for second in range(80, 200):
        log.add_report(stats(11), second)
    assert not lines(caplog), "nothing was computed since"


def test_short_work_within_an_interval_is_told_at_its_end(caplog: pytest.LogCaptureFixture) -> None:
    """A request that begins and ends between two reports is work, too."""
    caplog.set_level(logging.INFO)
    log = LoadLog(5.0)
    log.add_report(stats(0), 0.0)
    log.add_report(stats(4), 1.0)
    for second in range(2, 30):
        log.add_report(stats(4), float(second))
    assert lines(caplog) == [
        "load: 0 running, 0 waiting; 80 prompt tokens/s, 8 output tokens/s; cache hit rate 25 %; KV pool 50 % in use"
    ]


def test_totals_alone(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    log = LoadLog(0.0)
    for second in range(100):
        log.add_report(stats(second * 100, running=1), second)
    assert not lines(caplog)
    log.log_totals()
    assert lines(caplog) == ["served: 990,000 prompt tokens computed, 99,000 output tokens, cache hit rate 25 %"]
    LoadLog(0.0).log_totals()
    assert lines(caplog) == ["served: 0 prompt tokens computed, 0 output tokens, cache hit rate -"]
