"""Arms are compared seed by seed."""

from __future__ import annotations

import math

import pytest

from benchmarks.agents.unchanged_clients import compare, pool_tokens, show_run
from benchmarks.agents.workload import Sizes, plan_jobs


def run(arm: str, seed: int, service: float, load: float = 1.0) -> dict[str, float | str]:
    return {"arm": arm, "seed": seed, "load": load, "avg_service_s": service}


def test_ratios_are_of_runs_with_the_same_seed_and_load() -> None:
    runs = [run("plain", 0, 11.0), run("fcfs", 0, 10.0), run("plain", 1, 26.0), run("fcfs", 1, 20.0)]
    runs += [run("plain", 0, 99.0, load=2.0), run("fcfs", 2, 1.0)]
    mean, half, seeds = compare(runs, 1.0, ("plain", "fcfs"), "avg_service_s")
    assert seeds == 2 and mean == pytest.approx(0.2)
    assert half == pytest.approx(12.706 * 0.1, rel=1e-3), "Student's t with one degree of freedom, standard error 0.1"


def test_one_seed_has_no_interval() -> None:
    mean, half, seeds = compare([run("a", 0, 3.0), run("b", 0, 4.0)], 1.0, ("a", "b"), "avg_service_s")
    assert (mean, seeds) == (-0.25, 1) and math.isinf(half)


def test_pool_holds_the_ends_of_conversations() -> None:
    jobs = plan_jobs("mini", Sizes(turns=8, tokens=0.5), 4, 0)
    last = jobs[0].turns[-1]
    assert pool_tokens(jobs, 6) == 6 * (last.prompt_tokens + last.max_tokens)


def test_pool_counts_shared_examples_once() -> None:
    jobs = plan_jobs("mixed", Sizes(turns=4, tokens=0.5), 3, 0)
    last, shared = jobs[0].turns[-1], jobs[0].example_tokens
    assert pool_tokens(jobs, 6) == shared + 6 * (last.prompt_tokens - shared + last.max_tokens)


@pytest.mark.parametrize(("followed", "warns"), [(0.89, True), (0.9, False)])
def test_line_of_a_run_warns_of_answers_that_call_something_else(
    followed: float, warns: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    counts = {"recomputed_tokens": 1, "reusable_tokens": 4, "jobs_done": 3, "jobs": 3, "followed": followed}
    show_run(run("plain", 0, 2.0) | counts | {"p95_service_s": 3.0, "p99_ttft_s": 0.5})
    first, *warning = capsys.readouterr().out.splitlines()
    assert first.endswith(f"followed  {followed:.0%}")
    assert [line.startswith(f"warning: only {followed:.0%} of the answers") for line in warning] == [True] * warns
