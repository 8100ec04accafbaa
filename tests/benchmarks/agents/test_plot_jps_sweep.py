"""Curves over load, from made-up runs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.agents import plot_jps_sweep
from benchmarks.agents.job_runner import JobResult, TurnResult
from benchmarks.agents.plot_jps_sweep import curves, gains, same_work
from benchmarks.agents.run_report import SCHEMA, summarize

TURN = TurnResult(ttft=0.1, latency=0.2, prompt_tokens=10, output_tokens=5, cached_tokens=4, tool_s=0.5)
WORK: dict[str, Any] = {
    "workload": "mini",
    "turns": 1,
    "duration_s": 9.0,
    "time_scale": 1.0,
    "token_scale": 1.0,
    "seed": 0,
    "model": "some/model",
    "kv_usage": {"avg": 0.5, "max": 0.9},
    "machine": {"device": "a processor", "cores": 2, "commit": "abc"},
}


def run(policy: str, jps: float, seconds: float, number: int = 0, **other: Any) -> dict[str, Any]:
    results = [JobResult(number=each, turns=[TURN], duration=seconds) for each in range(3)] if seconds else []
    return {"schema": SCHEMA, "policy": policy, "jps": jps, "round": number, **WORK, **summarize(results), **other}


RUNS = [
    run("fcfs", 2.0, 10.0),
    run("fcfs", 1.0, 4.0),
    run("continuum", 1.0, 4.4),
    run("continuum", 2.0, 7.0),
    run("fcfs", 2.0, 12.0, 1),
    run("continuum", 2.0, 9.0, 1),
    run("lpm", 2.0, 22.0),
    run("lpm", 4.0, 0.0),
]


def test_curves_are_grouped_by_policy_and_load() -> None:
    found = curves(RUNS, "avg_duration_s")
    assert found == {
        "fcfs": {1.0: [4.0], 2.0: [10.0, 12.0]},
        "continuum": {1.0: [4.4], 2.0: [7.0, 9.0]},
        "lpm": {2.0: [22.0]},
    }
    assert list(found) == ["fcfs", "continuum", "lpm"] and list(found["fcfs"]) == [1.0, 2.0]


def test_gains_are_relative_to_the_baseline_policy() -> None:
    found = gains(curves(RUNS, "avg_duration_s"), "fcfs")
    assert found["continuum"] == {1.0: [pytest.approx(-10)], 2.0: [pytest.approx(30), pytest.approx(25)]}
    assert found["lpm"] == {2.0: [pytest.approx(-100)]}, "of the medians, where there are fewer rounds"
    with pytest.raises(ValueError, match="no run of the policy 'none'"):
        gains(curves(RUNS, "avg_duration_s"), "none")


def test_runs_are_grouped_by_identical_workload() -> None:
    others = [run("fcfs", 1.0, 2.0, workload="heavy"), run("fcfs", 1.0, 2.0, 1), run("fcfs", 1.0, 2.0, turns=3)]
    groups = same_work([*RUNS, *others])
    assert {name: len(group) for name, group in groups.items()} == {"mini_1": len(RUNS) + 1, "heavy": 1, "mini_3": 1}


@pytest.mark.parametrize("runs", [RUNS, RUNS[2:3]])
def test_sweep_writes_plot_and_prints_gains(
    runs: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, each in enumerate(runs):
        (tmp_path / f"{number}.json").write_text(json.dumps(each))
    monkeypatch.setattr(sys, "argv", ["plot", str(tmp_path), "--out", str(tmp_path / "out")])
    plot_jps_sweep.main()
    assert (tmp_path / "out" / "agents_mini.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert ("2 JPS  +27.5 %" in said) if len(runs) > 1 else ("no gains: fcfs was not run" in said)


def test_folder_without_runs_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["plot", str(tmp_path)])
    with pytest.raises(SystemExit):
        plot_jps_sweep.main()
    assert "no runs of benchmarks.agents.agent_jobs" in capsys.readouterr().err
