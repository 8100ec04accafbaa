"""Figures of a run, comparisons over seeds, and recommendations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from baton.entrypoints.simulate.cells import Cell, Estimate, cells_of, show
from baton.entrypoints.simulate.job_records import JobRecord, TurnRecord, completion_rate, spread, summarize
from baton.entrypoints.simulate.recommend import choose, recommend, say_states
from baton.entrypoints.simulate.runs import Plan
from tests.doubles.simulated import talk


def line(
    arm: str, seed: int, service: float, *, rate: float = 1.0, host: float = 0.0, refused: int = 0
) -> dict[str, Any]:
    plan = Plan(arm=arm, seed=seed, rate=rate, host_gb=host, gpu="A100-40")
    times = {"mean": service, "p95": 2 * service, "max": 3 * service}
    figures = {"service_s": times, "duration_s": times, "ttft_s": times, "jobs_refused": refused, "jobs": 300}
    figures |= {"completion_rate": rate, "hit_rate": 0.5, "recomputed_share": 0.25}
    leases = {"leases_handed_off": 7, "leases_expired": 8, "leases_broken": 9}
    return {"plan": msgspec.to_builtins(plan), "figures": figures, "scheduler": leases}


def cell(**services: Sequence[float]) -> Cell:
    """A cell with these service times, by arm and seed."""
    (found,) = cells_of([line(arm, seed, s) for arm, each in services.items() for seed, s in enumerate(each)])
    return found


def test_spread_matches_hand_computed_percentiles() -> None:
    found = spread([float(value) for value in range(101)])
    assert found == {"mean": 50.0, "p50": 50.0, "p90": 90.0, "p95": 95.0, "p99": 99.0, "max": 100.0}
    assert spread([]) == {}


def record(arrival: float, end: float, *turns: TurnRecord, refused: str = "") -> JobRecord:
    return JobRecord(talk("a", arrival, (1, 1, 2.0)), list(turns), end, refused)


def test_run_figures_match_hand_computed_values() -> None:
    first = TurnRecord(0.0, prompt=100, kept=0, first_token=1.0, end=2.0, output=5)
    later = TurnRecord(4.0, prompt=200, kept=104, first_token=7.0, end=9.0, found=80, from_host=30, output=6)
    retried = TurnRecord(1.0, prompt=100, kept=20, first_token=2.0, end=3.0, found=20, retractions=2, output=1)
    records = [record(0.0, 9.0, first, later), record(1.0, 5.0, retried), record(2.0, 3.0, refused="too long")]
    found = summarize(records, trim=0.0)
    assert (found["jobs"], found["jobs_done"], found["jobs_refused"], found["jobs_measured"]) == (3, 2, 1, 2)
    assert found["duration_s"]["mean"] == 6.5 and found["service_s"]["mean"] == 4.5
    assert found["ttft_s"]["mean"] == pytest.approx(5 / 3) and found["later_ttft_s"]["mean"] == 3.0
    assert found["recomputed_tokens"] == 24 and found["recomputed_share"] == pytest.approx(24 / 124)
    assert found["hit_rate"] == pytest.approx(100 / 400) and found["from_host_tokens"] == 30
    assert (found["output_tokens"], found["retracted_turns"]) == (12, 1)
    assert found["jobs_per_s"] == pytest.approx(2 / 9)


def test_first_and_last_jobs_are_trimmed() -> None:
    records = [record(float(n), n + float(n)) for n in range(10)]
    assert summarize(records, trim=0.2)["duration_s"]["mean"] == pytest.approx(4.5)
    assert summarize(records, trim=0.2)["jobs_measured"] == 6


def test_completion_rate_covers_the_second_half() -> None:
    records = [record(float(n), n + 2.0) for n in range(11)]  # from 5 to 10: those that ended at 6, 7, 8, 9 and 10
    assert completion_rate(records) == (1.0, 1.0)
    late = [record(float(n), n + 4.0) for n in range(10)] + [record(10.0, 99.0, refused="no")]
    assert completion_rate(late) == (1.0, 1.0)
    lost = [record(float(n), 100.0) for n in range(11)]
    assert completion_rate(lost) == (0.0, 0.0)


def test_estimate_reports_confidence_interval() -> None:
    assert Estimate.from_values([0.5]).percent() == "+50.0"
    found = Estimate.from_values([0.1, 0.2, 0.3])
    assert found.mean == pytest.approx(0.2) and found.half_width == pytest.approx(4.30 * 0.1 / 3**0.5)
    assert found.percent() == "+20.0 ± 24.8"


def test_changes_are_paired_by_seed() -> None:
    found = cell(fcfs=[10, 100], lpm=[9, 90, 5000])
    change = found.change("lpm", "fcfs", "service_s", "mean")
    assert change is not None and change.mean == pytest.approx(-0.1) and change.half_width < 1e-9
    assert found.change("lpm", "fcfs", "no such figure") is None


def test_runs_are_grouped_into_cells_by_all_but_arm_and_seed() -> None:
    lines = [line("fcfs", 0, 1), line("fcfs+host", 1, 1, host=50), line("fcfs", 0, 1, rate=2.0)]
    first, second = cells_of(lines)
    assert list(first.arms) == ["fcfs", "fcfs+host 50 GB"] and list(second.arms) == ["fcfs"]


def test_simplest_of_equally_good_arms_is_chosen() -> None:
    assert choose(cell(fcfs=[10, 11], lpm=[9.9, 10.9], handoff=[9.95, 10.8])).arm == "fcfs"
    choice = choose(cell(fcfs=[10, 11, 12], lpm=[8, 8.8, 9.6], handoff=[7.9, 8.7, 9.5]))
    assert choice.arm == "lpm" and choice.is_sure and choice.runner_up == "handoff"
    assert not choose(cell(fcfs=[10, 11, 12], lpm=[4, 13, 5])).is_sure
    refuses = [line("fcfs", 0, 10), line("lpm", 0, 5, refused=1), line("handoff", 0, 9)]
    assert choose(cells_of(refuses)[0]).arm == "handoff"


def test_recommendation_texts() -> None:
    def said(**services: Sequence[float]) -> str:
        return recommend([cell(**services)])[0]

    assert "stay with fcfs; nothing tried is more than 2 % better" in said(fcfs=[10, 11], lpm=[10, 11])
    assert "lpm; service time -20.0 ± 0.0 % against fcfs (2 seeds)" in said(fcfs=[10, 20], lpm=[8, 16])
    assert "(uncertain: the 95 % interval of 2 seeds includes 0)" in said(fcfs=[10, 10], lpm=[4, 9])
    assert "(one seed; run more --seeds to see how certain that is)" in said(fcfs=[10], lpm=[4])
    assert "next best: handoff, against which it is -25.0 ± 0.0 %" in said(fcfs=[10, 20], lpm=[6, 12], handoff=[8, 16])


def test_smallest_sufficient_host_tier_is_recommended() -> None:
    lines = [line("fcfs", 0, 10)]
    lines += [line("fcfs+host", 0, service, host=size) for size, service in ((10, 8), (50, 5.05), (200, 5))]
    words = recommend(cells_of(lines))
    assert any("host tier for fcfs+host: 50 GB is enough (10 GB 8 s, 50 GB 5.05 s, 200 GB 5 s)" in w for w in words)


def test_safest_arm_over_all_cells_is_recommended() -> None:
    """lpm is the best on average and loses once; the two others never do, one of them gains more."""
    services = {"fcfs": (10, 10), "lpm": (1, 12), "continuum": (10, 9.5), "handoff": (10.1, 9)}
    rates = (1.0, 2.0)
    lines = [line(arm, 0, s, rate=rate) for arm, each in services.items() for rate, s in zip(rates, each)]
    *_, last = recommend(cells_of(lines))
    assert last.startswith("over all 2 cells, handoff is the safest: -4.5 % on average, at worst +1.0 % (A100-40")
    assert "1 jobs/s" in last


def test_no_change_is_recommended_that_gains_nothing_over_all_cells() -> None:
    gain = {"fcfs": (10, 10), "lpm": (9.9, 9.8)}
    lines = [line(arm, 0, s, rate=rate) for arm, each in gain.items() for rate, s in zip((1.0, 2.0), each)]
    *_, last = recommend(cells_of(lines))
    assert last.startswith("over all 2 cells, stay with fcfs; lpm is the safest of the others: -1.5 % on average")


@pytest.mark.parametrize("trace", ["", "agents.jsonl"])
def test_number_of_states_is_qualified_for_traces(trace: str) -> None:
    plan = msgspec.to_builtins(Plan(arm="fcfs", gpu="H100", trace=trace))
    said = say_states({"plan": plan, "states": 5, "tried": [(4, 0.25), (5, 0.0), (96, 0.0)]})
    assert "no_state: with 4 states 25.0 %, with 5 states 0.0 %, with a state for every place 0.0 %" in said
    assert ("A trace shows neither edits" in said) == bool(trace)


def test_results_table_is_grouped_by_cell(capsys: pytest.CaptureFixture[str]) -> None:
    show([cell(fcfs=[10, 20], lpm=[9, 18])])
    title, heads, first, second = capsys.readouterr().out.strip().splitlines()
    assert title == "A100-40, llama-3.1-8b: agents, shell tools, 1 jobs/s" and heads.split()[:2] == ["policy", "jobs/s"]
    assert first.split()[:4] == ["fcfs", "1", "15", "30"] and "%" not in first
    assert "-10.0 ± 0.0" in second and second.endswith("7/8/9") and " 50.0   25.0 " in second
