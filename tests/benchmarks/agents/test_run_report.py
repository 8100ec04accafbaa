"""The report of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.agents.agent_jobs import Policy, order, parse_arguments, read_policy
from benchmarks.agents.job_runner import JobResult, TurnResult
from benchmarks.agents.run_report import SCHEMA, read_runs, show, spread, summarize
from benchmarks.agents.usage_sampler import KV_USAGE, LEASED, gauge


def turn(**given: Any) -> TurnResult:
    fields: dict[str, Any] = {
        "ttft": 0.1,
        "latency": 0.3,
        "prompt_tokens": 100,
        "output_tokens": 10,
        "cached_tokens": 0,
    }
    return TurnResult(**fields | given)


def test_percentiles_are_interpolated() -> None:
    found = spread("duration", [1.0, 2.0, 3.0, 4.0])
    assert found == {
        "avg_duration_s": 2.5,
        "p50_duration_s": 2.5,
        "p90_duration_s": pytest.approx(3.7),
        "p95_duration_s": pytest.approx(3.85),
        "p99_duration_s": pytest.approx(3.97),
    }
    assert set(spread("x", []).values()) == {None}


def test_run_summary_counts_jobs_tokens_and_errors() -> None:
    results = [
        JobResult(
            number=0,
            turns=[
                turn(tool_s=2.0, followed=True),
                turn(prompt_tokens=200, cached_tokens=50, reusable_tokens=109, ttft=0.2, followed=False),
            ],
            duration=3.0,
        ),
        JobResult(number=1, turns=[turn(tool_s=1.0, cached_tokens=40, latency=0.5, followed=True)], error="Gone: x"),
        JobResult(number=2),
        JobResult(number=3, turns=[turn(reusable_tokens=20, cached_tokens=90)], duration=1.0),
    ]
    found = summarize(results)
    counted = ("jobs", "jobs_done", "jobs_failed", "jobs_cut_off", "errors")
    assert [found[name] for name in counted] == [4, 2, 1, 1, {"Gone: x": 1}]
    assert found["job_durations"] == [3.0, 1.0] and found["job_service_times"] == [1.0, 1.0]
    assert found["avg_duration_s"] == 2.0 and found["avg_service_s"] == 1.0
    assert found["per_turn_avg_prompt_tokens"] == {"1": 100, "2": 200}
    assert found["per_turn_avg_cached_tokens"] == {"1": pytest.approx(130 / 3), "2": 50}
    assert found["per_turn_avg_ttft_ms"] == {"1": pytest.approx(100), "2": pytest.approx(200)}
    assert found["per_turn_avg_latency_ms"]["1"] == pytest.approx(1100 / 3)
    assert found["prompt_tokens"] == 500 and found["output_tokens"] == 40 and found["cached_tokens"] == 180
    assert found["reusable_tokens"] == 129 and found["recomputed_tokens"] == 59
    assert found["followed"] == pytest.approx(2 / 3)


def test_summary_omits_cache_figures_the_server_does_not_report() -> None:
    found = summarize([JobResult(number=0, turns=[turn(cached_tokens=None, reusable_tokens=9)], duration=1.0)])
    assert found["cached_tokens"] is found["recomputed_tokens"] is found["followed"] is None
    assert found["per_turn_avg_cached_tokens"] == {}
    show([{"schema": SCHEMA, "policy": "a", "jps": 1, "round": 0, "kv_usage": None} | found])


def test_runs_are_read_from_files_and_folders(tmp_path: Path) -> None:
    run, other = {"schema": SCHEMA, "policy": "a", "jps": 1.0}, {"rounds": []}
    (tmp_path / "a.json").write_text(json.dumps(run))
    (tmp_path / "chat.json").write_text(json.dumps(other))
    assert read_runs([tmp_path]) == read_runs([tmp_path / "a.json"]) == [run]
    with pytest.raises(ValueError, match=r"chat\.json is no run"):
        read_runs([tmp_path / "chat.json"])


def test_policy_order_alternates_every_round() -> None:
    a, b = Policy("a"), Policy("b")
    assert list(order([a, b], [1.0, 2.0], 2)) == [
        (0, 1.0, a),
        (0, 1.0, b),
        (0, 2.0, a),
        (0, 2.0, b),
        (1, 1.0, b),
        (1, 1.0, a),
        (1, 2.0, b),
        (1, 2.0, a),
    ]


def test_policy_name_is_read_from_its_flags() -> None:
    assert read_policy("--page-size 16 --schedule-policy lpm") == Policy(
        "lpm", ("--page-size", "16", "--schedule-policy", "lpm")
    )
    assert read_policy("offload --host-cache-gb 1") == Policy("offload", ("--host-cache-gb", "1"))
    with pytest.raises(ValueError, match="has no name"):
        read_policy("--page-size 16")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--serve", "--schedule-policy lpm"], "--model"),
        (["--url", "x", "--jps", "0"], "--jps"),
        (["--url", "x", "--token-scale", "-1"], "--token-scale"),
        (["--serve", "--page-size 16", "--model", "x"], "has no name"),
        ([], "--url"),
    ],
)
def test_unmeasurable_arguments_are_refused(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(words)
    assert says in capsys.readouterr().err


def test_gauges_are_summed_over_labels() -> None:
    page = (
        "# HELP baton:kv_cache_usage_perc x\n# TYPE baton:kv_cache_usage_perc gauge\n"
        'baton:kv_cache_usage_perc{model_name="a b"} 0.25\nbaton:leased_tokens_high{m="a"} 9.0\n'
        'baton:leased_tokens{m="a"} 3.0\nbaton:leased_tokens{m="b"} 4.0\n'
    )
    assert gauge(page, KV_USAGE) == 0.25 and gauge(page, LEASED) == 7.0
    assert gauge("vllm:kv_cache_usage_perc 0.5\n", KV_USAGE) == 0.5
    assert gauge("", LEASED) is None
