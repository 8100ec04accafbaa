"""The report of the policy study."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from baton.entrypoints.simulate.cells import Cell, cells_of
from baton.entrypoints.simulate.runs import Plan
from benchmarks.agents.policy_study import Work, arms_at, at_load, best_times, plan_of, runs_of
from benchmarks.agents.study_report import Studied, against_best, compare, find, report, table, verdicts, worst_job

SERVICE = ("service_s", "mean")


def line(arm: str, seed: int, services: list[float], rate: float = 1.2) -> dict[str, Any]:
    """A run with jobs of this service time."""
    mean = sum(services) / len(services)
    spread = {"mean": mean, "p95": max(services)}
    has_host = "host" in arm or "lmcache" in arm
    plan = Plan(arm=arm, seed=seed, rate=rate, host_gb=100.0 if has_host else 0.0)
    figures = {"service_s": spread, "duration_s": spread}
    return {"plan": msgspec.to_builtins(plan), "figures": figures, "services_s": services}


def cell(**services: float) -> Cell:
    """One of two seeds; an arm's jobs take so long in the first, and twice as long in the second."""
    lines = [
        line(arm.replace("_", "-").replace("-host", "+host").replace("-at-", "@"), seed, [(seed + 1) * value] * 3)
        for arm, value in services.items()
        for seed in range(2)
    ]
    return cells_of(lines)[0]


def studied(*cells: Cell) -> Studied:
    return Studied("a card, some work", 1.0, list(cells))


def test_arm_lookup_ignores_pin_time_and_host_size() -> None:
    found = cell(fcfs=10.0, continuum_at_8=9.0, continuum_at_8_host=8.0, lmcache_like=7.0, handoff_no_pins=6.0)
    assert find(found, "continuum") == "continuum@8" and find(found, "continuum+host") == "continuum@8+host 100 GB"
    assert find(found, "lmcache-like") == "lmcache-like 100 GB" and find(found, "handoff") is None


def test_changes_are_paired_by_seed_against_baseline_and_best_rival() -> None:
    found = cell(fcfs=10.0, handoff=6.0, continuum=5.0, context_serve=8.0)
    (beside,) = compare([found], "handoff", "fcfs", SERVICE)
    assert beside.change.mean == pytest.approx(-0.4) and beside.change.half_width == pytest.approx(0.0)
    (best,) = against_best([found], "handoff", SERVICE)
    assert best.other == "continuum" and best.change.mean == pytest.approx(0.2)


def test_worst_job_slowdown_is_taken_over_all_seeds() -> None:
    lines = [line("fcfs", 0, [1.0, 2.0]), line("handoff", 0, [1.0, 2.0])]
    lines += [line("fcfs", 1, [1.0, 2.0]), line("handoff", 1, [3.5, 0.5])]
    assert worst_job(cells_of(lines)[0], "handoff") == 3.5


def test_verdicts_report_cells_within_tolerance_and_worst_case() -> None:
    good = cell(fcfs=10.0, handoff=9.0, continuum=9.5, context_serve=9.6, oracle=8.9)
    bad = cell(fcfs=10.0, handoff=10.5, continuum=9.0, context_serve=9.6, oracle=9.0)
    said = "\n".join(verdicts([studied(good, bad)]))
    assert "handoff beside fcfs: at most 1 % more in 1 of 2 cells; at worst +5.0" in said
    assert "handoff beside the best rival: at most 0.2 % more in 1 of 2 cells; at worst +16.7" in said
    assert "handoff beside oracle: at most 10 % more in 1 of 2 cells" in said
    assert "suffers most under handoff takes 1.05 times" in said


def test_rivals_are_compared_only_above_saturation() -> None:
    below = Studied("a card, some work", 2.0, [cell(fcfs=10.0, handoff=10.0, continuum=1.0)])
    assert "nothing to compare with the best rival" in "\n".join(verdicts([below]))


def test_report_table_has_one_row_per_load(tmp_path: Path) -> None:
    found = studied(cell(fcfs=10.0, continuum_at_cdf=9.0, handoff=5.0, handoff_host=4.0))
    rows = table(found).splitlines()
    assert rows[-1] == ("| 120 % | 1.2 | 2 | 15 | -10.0 ± 0.0 |  | -50.0 ± 0.0 |  |  |  | -60.0 ± 0.0 | 0.50 |")
    report([found], tmp_path)
    assert rows[-1] in (tmp_path / "study.md").read_text()
    runs = json.loads((tmp_path / "study.json").read_text())["runs"]
    assert len(runs) == 8 and runs[0]["figures"]["service_s"]["mean"] == 10.0


def test_each_rival_keeps_its_best_pin_time() -> None:
    tried = cell(continuum=9.0, continuum_at_8=7.0, context_serve=5.0, context_serve_at_8=6.0)
    assert best_times([tried]) == {"continuum": "continuum@8", "context-serve": "context-serve"}


def test_cell_runs_cover_arms_seeds_and_host_sizes() -> None:
    arms = arms_at(125, {"continuum": "continuum@8", "context-serve": "context-serve"})
    assert {"continuum@8", "continuum@8+host", "oracle", "oracle+host"} <= set(arms)
    assert "oracle" not in arms_at(100, {"continuum": "continuum", "context-serve": "context-serve"})
    plan = at_load(plan_of("A100-40", Work("agents", "heavy", 15.0, 60.0)), peak=2.0, load=50, minutes=15.0)
    assert (plan.rate, plan.num_jobs) == (1.0, 900)
    runs = runs_of(plan, ["fcfs", "lmcache-like", "handoff+host"], 2)
    assert [(run.arm, run.seed, run.host_gb) for run in runs[:3]] == [
        ("fcfs", 0, 0.0),
        ("lmcache-like", 0, 100.0),
        ("handoff+host", 0, 100.0),
    ]
    assert {run.seed for run in runs} == {0, 1}
