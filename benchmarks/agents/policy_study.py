"""Compares policies for agents: the whole study of docs/policies.md, in the simulator.

    python -m benchmarks.agents.policy_study --gpu RTX6000 A100-40 --jobs 2 --out benchmarks/results/policies

Cells are cards × work × loads; loads are in percent of the rate at which fcfs completes most jobs. For each card and
work the rivals' pin times are tried first, at 125 %, and each rival then uses its best. Then all policies run the same
jobs, and at 125 % so does an oracle: handoff that knows when each tool returns. The study takes hours. Finished runs
are kept in the folder, so it can be stopped and resumed; `--limit` runs at most that many more. The tables and the
picture show all finished runs.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from baton.entrypoints.simulate.arms import arm_named
from baton.entrypoints.simulate.cell_plots import plot
from baton.entrypoints.simulate.cells import Cell, cells_of
from baton.entrypoints.simulate.cost_model import CARDS
from baton.entrypoints.simulate.runs import Plan
from baton.entrypoints.simulate.study import RunLines, find_peaks, jobs_in, peak_plan, run_all
from benchmarks.agents.study_report import Studied, report


class Work(NamedTuple):
    workload: str
    tools: str
    minutes: float
    """Minutes of arrivals in a run: several times as long as most jobs take."""
    peak_minutes: float
    """Minutes of arrivals in each trial of a rate: many times as long as the longest jobs take, as jobs that are still
    under way at the end make the peak look too low."""

    @property
    def name(self) -> str:
        return f"{self.workload}-{self.tools}"


WORK = (
    Work("agents", "exponential", 6.0, 12.0),
    Work("agents", "heavy", 15.0, 60.0),
    Work("agents-3x", "exponential", 12.0, 24.0),
    Work("agents-3x", "heavy", 20.0, 60.0),
)
LOADS = (50, 75, 90, 100, 110, 125, 150)
TUNED_AT = 125
TUNING_SEEDS = 3
RIVALS = {
    "continuum": ("continuum", "continuum@0.5", "continuum@8", "continuum@cdf"),
    "context-serve": ("context-serve", "context-serve@0.5", "context-serve@8", "context-serve@cdf"),
}
HOST_GB = {"RTX6000": 100.0, "A100-40": 100.0, "H200": 300.0}
"""Several times the pool."""


def plan_of(gpu: str, work: Work) -> Plan:
    return Plan(arm="", gpu=gpu, workload=work.workload, tools=work.tools, burst=16)


def at_load(cell: Plan, peak: float, load: float, minutes: float) -> Plan:
    rate = peak * load / 100
    return msgspec.structs.replace(cell, rate=rate, num_jobs=max(300, jobs_in(minutes, rate)))


def runs_of(plan: Plan, arms: Sequence[str], seeds: int) -> list[Plan]:
    """Each arm with each seed; a host tier for those that have one."""
    found = []
    for seed, arm in itertools.product(range(seeds), arms):
        host_gb = HOST_GB.get(plan.gpu, 300.0) if arm_named(arm).host else 0.0
        found.append(msgspec.structs.replace(plan, arm=arm, seed=seed, host_gb=host_gb, pin_s=0.0))
    return found


def best_times(cells: Sequence[Cell]) -> dict[str, str]:
    """The best arm of each rival: the one with the least mean service time."""
    (cell,) = cells
    return {
        name: min((arm for arm in arms if arm in cell.arms), key=lambda arm: cell.mean(arm, "service_s", "mean"))
        for name, arms in RIVALS.items()
    }


def arms_at(load: float, rivals: dict[str, str]) -> list[str]:
    arms = ["fcfs", *rivals.values(), "handoff", "lmcache-like", f"{rivals['continuum']}+host", "handoff+host"]
    return [*arms, "oracle", "oracle+host"] if load == TUNED_AT else arms


def study(gpu: str, work: Work, args: argparse.Namespace) -> Studied | None:
    """The runs so far of a card and a kind of work; None until the rivals' pin times are known."""
    lines = RunLines(args.out / f"{gpu}-{work.name}.jsonl")
    cell = plan_of(gpu, work)
    peaks = find_peaks([cell], work.peak_minutes, lines, processes=args.jobs)
    peak = peaks[peak_plan(cell, work.peak_minutes).key]
    tried = at_load(cell, peak, TUNED_AT, work.minutes)
    arms = [arm for rival in RIVALS.values() for arm in rival]
    tuning = runs_of(tried, arms, TUNING_SEEDS)
    tuned = run_all(tuning, lines, processes=args.jobs, most=args.limit)
    if len(tuned) < len(tuning):
        return None
    rivals = best_times(cells_of(tuned))
    print(f"{gpu}, {work.name}: peak of fcfs {peak:.3g} jobs/s; rivals at {', '.join(rivals.values())}")
    wanted = []
    for load in args.load:
        seeds = args.seeds if load >= 100 else args.low_seeds
        wanted += runs_of(at_load(cell, peak, load, work.minutes), arms_at(load, rivals), seeds)
    wanted.sort(key=lambda plan: plan.seed)  # if it is stopped early, every load has been run
    found = run_all(wanted, lines, processes=args.jobs, most=args.limit)
    return Studied(f"{gpu}, {work.workload}, {work.tools} tools", peak, cells_of(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", nargs="+", choices=CARDS, default=["RTX6000", "A100-40", "H200"])
    parser.add_argument("--work", nargs="+", choices=[work.name for work in WORK], default=[w.name for w in WORK])
    parser.add_argument("--load", nargs="+", type=float, default=list(LOADS), help="percent of fcfs's peak")
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--low-seeds", type=int, default=6, help="below 100 %%, where little happens")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--limit", type=int, default=0, help="new runs of each card and work at most")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/policies"))
    args = parser.parse_args()
    chosen = [(gpu, work) for gpu, work in itertools.product(args.gpu, WORK) if work.name in args.work]
    studied = [found for gpu, work in chosen if (found := study(gpu, work, args)) is not None]
    report(studied, args.out)
    plot([cell for found in studied for cell in found.cells], args.out / "policies.png")


if __name__ == "__main__":
    main()
