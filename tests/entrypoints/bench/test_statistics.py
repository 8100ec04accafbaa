from __future__ import annotations

import json

import pytest

from baton.entrypoints.bench.apis import Answer
from baton.entrypoints.bench.load import Record, Run
from baton.entrypoints.bench.report import make_report, table
from baton.entrypoints.bench.statistics import by_turn, savings, summarize


def answer(
    started: float, *arrivals: float, tokens: int = 0, prompt: int = 10, cached: int | None = 4, path: str | None = None
) -> Answer:
    """Its last event is its end."""
    found = Answer(started, list(arrivals), arrivals[-1], "text", prompt, tokens or len(arrivals), cached)
    found.path = path
    return found


def test_times_are_measured_from_the_request_and_between_events() -> None:
    one = answer(1.0, 1.5, 1.6, 2.0)
    other = answer(2.0, 2.1, 2.5, tokens=5)
    summary = summarize(Run([Record(0, 0, one), Record(1, 0, other)], 1.0, 2.0), 2)
    assert summary["mean_ttft_ms"] == pytest.approx((500 + 100) / 2)
    assert summary["mean_itl_ms"] == pytest.approx((100 + 400 + 400) / 3)
    assert summary["median_itl_ms"] == pytest.approx(400)
    # Three tokens in half a second after the first event; five, of which four in 0.4 s.
    assert summary["mean_tpot_ms"] == pytest.approx((250 + 100) / 2)
    assert summary["mean_e2e_latency_ms"] == pytest.approx((1000 + 500) / 2)
    assert summary["request_throughput"] == 1.0 and summary["output_throughput"] == 4.0
    assert summary["input_throughput"] == 10.0 and summary["total_throughput"] == 14.0
    assert summary["tokens_per_event"] == 8 / 5
    assert summary["total_cached_tokens"] == 8


def test_percentiles_differ_from_the_mean() -> None:
    records = [Record(number, 0, answer(0.0, (number + 1) / 1000)) for number in range(101)]
    summary = summarize(Run(records, 0.0, 1.0), 101)
    assert summary["median_ttft_ms"] == pytest.approx(51) and summary["p99_ttft_ms"] == pytest.approx(100)
    skewed = [*records[:-1], Record(100, 0, answer(0.0, 10.0))]
    summary = summarize(Run(skewed, 0.0, 1.0), 101)
    assert summary["median_ttft_ms"] == pytest.approx(51) and summary["mean_ttft_ms"] == pytest.approx(149.01, abs=0.01)


def test_failed_requests_are_counted_and_left_out_of_the_times() -> None:
    failed = [Record(number, 0, Answer(0.0, [], 99.0), "refused") for number in (1, 2)]
    records = [Record(0, 0, answer(0.0, 0.1)), *failed, Record(3, 0, Answer(), "gone")]
    summary = summarize(Run(records, 0.0, 1.0), 6)
    assert (summary["completed"], summary["failed"], summary["not_sent"]) == (1, 3, 2)
    assert summary["errors"] == {"refused": 2, "gone": 1}
    assert summary["p99_e2e_latency_ms"] == pytest.approx(100) and summary["total_input_tokens"] == 10


def test_summary_without_an_answer_has_no_times() -> None:
    run = Run([Record(0, 0, Answer(), "gone")], 0.0, 0.0)
    summary = summarize(run, 1)
    assert summary["mean_ttft_ms"] is None and summary["request_throughput"] is None
    assert summary["tokens_per_event"] is None and summary["total_cached_tokens"] is None
    report = make_report({}, {"prefix": run}, 1, 1)
    json.dumps(report, allow_nan=False)
    assert "1 × gone" in table(report)


def test_answer_of_one_token_has_no_time_between_tokens() -> None:
    summary = summarize(Run([Record(0, 0, answer(0.0, 0.1))], 0.0, 1.0), 1)
    assert summary["mean_tpot_ms"] is None and summary["mean_itl_ms"] is None


def test_turns_are_separate_rows_without_failed_requests() -> None:
    records = [
        Record(0, 0, answer(0.0, 0.3, prompt=10, cached=0)),
        Record(0, 1, answer(1.0, 1.1, prompt=30, cached=20, path="handoff")),
        Record(1, 0, answer(0.0, 0.1, prompt=20, cached=0)),
        Record(1, 1, Answer(), "gone"),
    ]
    first, second = by_turn(records)
    assert (first["turn"], first["completed"], first["mean_input_tokens"]) == (1, 2, 15)
    assert first["mean_ttft_ms"] == pytest.approx(200) and first["paths"] == {}
    assert (second["turn"], second["completed"], second["mean_cached_tokens"]) == (2, 1, 20)
    assert second["mean_computed_tokens"] == 10 and second["paths"] == {"handoff": 1}


def test_savings_compare_the_turns_after_the_first() -> None:
    def run(cached: int, ttft: float) -> Run:
        first = Record(0, 0, answer(0.0, 9.0, prompt=1000, cached=0))
        return Run([first, Record(0, 1, answer(1.0, 1.0 + ttft, prompt=100, cached=cached))], 0.0, 2.0)

    found = savings(run(40, 0.4), run(90, 0.1))
    assert found is not None
    assert found["prefix"]["computed_tokens_per_request"] == 60
    assert found["continuation"]["computed_tokens_per_request"] == 10
    assert found["prefix"]["median_ttft_ms"] == pytest.approx(400)
    assert found["continuation"]["median_ttft_ms"] == pytest.approx(100)
    report = make_report({}, {"prefix": run(40, 0.4), "continuation": run(90, 0.1)}, 2, 2)
    assert "10.0 instead of 60.0 (-83%)" in table(report)


def test_no_savings_without_cached_tokens_or_later_turns() -> None:
    uncounted = Run([Record(0, 1, answer(0.0, 0.1, cached=None))], 0.0, 1.0)
    first_only = Run([Record(0, 0, answer(0.0, 0.1))], 0.0, 1.0)
    assert savings(uncounted, uncounted) is None and savings(first_only, first_only) is None


def test_table_says_nothing_of_cached_tokens_that_no_server_counted() -> None:
    counted = make_report({}, {"prefix": Run([Record(0, 0, answer(0.0, 0.1))], 0.0, 1.0)}, 1, 1)
    uncounted = make_report({}, {"prefix": Run([Record(0, 0, answer(0.0, 0.1, cached=None))], 0.0, 1.0)}, 1, 1)
    assert "cached" in table(counted) and "cached" not in table(uncounted)
