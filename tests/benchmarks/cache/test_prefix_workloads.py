from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.cache.prefix_workloads import verdict
from benchmarks.cache.workloads import CHAT_TURNS, WORKLOADS, Workload
from tests.doubles.benchmark_runs import run_benchmark


@pytest.mark.slow
@pytest.mark.process
def test_measured_hit_rate_equals_attainable_hit_rate(tmp_path: Path) -> None:
    done = run_benchmark("cache.prefix_workloads", "--tiny", "--requests", "5", out=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "prefix_workloads.json").read_text())
    assert [row["workload"] for row in report["workloads"]] == [workload.name for workload in WORKLOADS]
    for row in report["workloads"]:
        assert row["hit_rate"] == row["attainable"], "the engine's cache finds what the analysis says it can"
        assert len(row["ttft"]["cache_s"]) == len(row["cpu"]["no_cache_s"]) == row["requests"] == 5
        assert row["workload"] in done.stdout
    rates = {row["workload"]: row["hit_rate"] for row in report["workloads"]}
    assert rates["random"] == 0.0 and rates["multi-turn chat"] > rates["RAG"] > rates["batch summarisation"] > 0
    assert set(report["cost_where_nothing_is_shared"]) == {"time to the first token", "whole time", "CPU time"}


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_workloads_are_deterministic_and_sized_as_requested(workload: Workload) -> None:
    def made(seed: int) -> list[list[list[int]]]:
        rng = np.random.default_rng(seed)
        return workload.make(rng, lambda count: rng.integers(0, 1000, count).tolist(), 20)

    talks = made(1)
    assert talks == made(1) != made(2)
    assert sum(map(len, talks)) == 20 and {len(talk) for talk in talks} <= {1, CHAT_TURNS}
    assert max(sum(map(len, talk)) + len(talk) * workload.answer for talk in talks) < 1024, "the tiny model's context"


@pytest.mark.parametrize(
    ("mean", "half_width", "word"),
    [
        (0.002, 0.005, "met"),
        (-0.05, 0.01, "met"),
        (0.01, 0.015, "met"),
        (0.001, 0.03, "undecided"),
        (0.012, 0.005, "undecided"),
        (0.03, 0.01, "missed"),
    ],
)
def test_zero_cost_verdict_allows_for_the_interval(mean: float, half_width: float, word: str) -> None:
    assert verdict({"mean": mean, "half_width": half_width}) == word
