"""Live runs beside simulated ones: what the comparison reads, and what it says."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.agents.validate_simulator import calibrate, row, show, simulated
from tests.doubles.benchmark_runs import run_benchmark

TOY_MODEL = Path(__file__).parents[3] / "examples" / "toy_model"
COSTS = {"fixed_s": 0.004, "prompt_token_s": 0.001, "decode_row_s": 0.0007, "context_token_s": 0.0}


def trace(file: Path, jobs: int) -> Path:
    """Jobs that come close together, two turns each, with tools of 2 s."""
    turns = [
        {"prompt_tokens": 200, "output_tokens": 8, "tool": "ls", "tool_s": 2.0},
        {"prompt_tokens": 240, "output_tokens": 8},
    ]
    lines = [{"job_id": f"job{number}", "arrival": 0.1 * number, "turns": turns} for number in range(jobs)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    file = tmp_path / "costs.json"
    file.write_text(json.dumps(COSTS))
    return file


def test_simulated_replay_uses_the_given_policy_and_pool_size(tmp_path: Path, costs: Path) -> None:
    seen = trace(tmp_path / "seen.jsonl", 12)
    hits = {}
    for policy, pool in (("fcfs", 1000), ("handoff", 1000), ("fcfs", 8192)):
        figures = simulated(argparse.Namespace(rows=8, pool_tokens=pool), policy, seen, costs)
        hits[policy, pool] = figures["hit_rate"]
        assert figures["duration_s"]["mean"] > 2.0 + 0.2
    assert hits["fcfs", 8192] > hits["handoff", 1000] > hits["fcfs", 1000]
    assert hits["fcfs", 8192] == pytest.approx(207 / 440, abs=0.01)


def test_report_compares_live_and_simulated_figures(capsys: pytest.CaptureFixture[str]) -> None:
    lived: dict[str, Any] = {"jobs": 7, "jobs_failed": 0, "cached_tokens": 30, "prompt_tokens": 60}
    lived |= {f"{kind}_{name}_s": 4.0 for kind in ("avg", "p95") for name in ("duration", "service")}
    played = {name: {"mean": 5.0, "p95": 3.0} for name in ("duration_s", "service_s")} | {"hit_rate": 0.25}
    found = row("handoff", 1, lived, played)
    assert (found["duration live"], found["duration simulated"]) == (4.0, 5.0)
    assert (found["p95 service live"], found["p95 service simulated"]) == (4.0, 3.0)
    assert (found["hits live"], found["hits simulated"]) == (0.5, 0.25)
    show([found, found | {"duration simulated": 3.8}])
    said = capsys.readouterr().out
    assert "+25.0%" in said and "-25.0%" in said
    assert "differ by 15.0 % on average, 25.0 % at most" in said


def test_calibration_scales_costs_to_match_target_service_time(tmp_path: Path, costs: Path) -> None:
    seen, scaled = trace(tmp_path / "seen.jsonl", 6), tmp_path / "scaled.json"
    args = argparse.Namespace(rows=8, pool_tokens=8192)

    def service(file: Path) -> float:
        return simulated(args, "fcfs", seen, file)["service_s"]["mean"]

    target = 1.7 * service(costs)
    factor = calibrate(costs, target, service, scaled)
    assert service(scaled) == pytest.approx(target, rel=0.05) and 1.2 < factor < 2.2
    assert json.loads(scaled.read_text()) == pytest.approx({name: cost * factor for name, cost in COSTS.items()})


@pytest.mark.slow
@pytest.mark.process
def test_validation_covers_live_runs_of_two_policies(tmp_path: Path, costs: Path) -> None:
    words = ["--model", str(TOY_MODEL), "--workload", "toy", "--policies", "fcfs", "handoff", "--jps", "2"]
    words += ["--duration", "3", "--token-scale", "1", "--time-scale", "0.05", "--costs", str(costs)]
    done = run_benchmark("agents.validate_simulator", *words, out=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert [found["policy"] for found in rows] == ["fcfs", "handoff"]
    assert all(found["jobs"] > 2 and found["failed"] == 0 and found["duration simulated"] > 0 for found in rows)
