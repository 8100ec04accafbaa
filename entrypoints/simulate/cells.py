"""Results of runs by cell, and the table that the terminal shows of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from .runs import Plan

Line = dict[str, Any]

STUDENT_95 = (math.inf, 12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23)
"""Two-sided 95 % points of Student's t by degrees of freedom; 2.1 for more degrees than listed."""


class Estimate(NamedTuple):
    """A mean over seeds; ``half_width`` of its 95 % interval, infinite from one seed."""

    mean: float
    half_width: float
    seeds: int

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Estimate:
        count = len(values)
        if count < 2:
            return cls(float(values[0]), math.inf, count)
        points = STUDENT_95[count - 1] if count <= len(STUDENT_95) else 2.1
        return cls(float(np.mean(values)), points * float(np.std(values, ddof=1)) / math.sqrt(count), count)

    def percent(self) -> str:
        """The mean, a share, in percent, with its interval if it has one."""
        known = f" ± {100 * self.half_width:.1f}" if math.isfinite(self.half_width) else ""
        return f"{100 * self.mean:+.1f}{known}"


class Cell:
    """Runs that differ in nothing but arm and seed."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.arms: dict[str, dict[int, Line]] = {}
        """Results by arm label, then by seed."""

    def mean(self, arm: str, *path: str) -> float:
        """The mean over seeds of a figure such as ("service_s", "mean"); NaN where no run has it."""
        values = [_at(line["figures"], path) for line in self.arms[arm].values()]
        values = [value for value in values if value is not None]
        return float(np.mean(values)) if values else math.nan

    def change(self, arm: str, base: str, *path: str) -> Estimate | None:
        """The relative change of a figure against ``base``, seed by seed; None if they have no seed in common."""
        changes = []
        for seed, line in self.arms[arm].items():
            before = self.arms[base].get(seed)
            if before is not None:
                old, new = _at(before["figures"], path), _at(line["figures"], path)
                changes += [new / old - 1] if old and new is not None else []
        return Estimate.from_values(changes) if changes else None

    @property
    def title(self) -> str:
        plan = self.plan
        work = plan.trace or f"{plan.workload}, {plan.tools} tools" + (f" × {plan.scale:g}" if plan.scale != 1 else "")
        machine = plan.costs or f"{plan.gpu}, {plan.model}"
        pool = ", the trace's pools" if plan.recorded is not None else ""
        pool += f", pool {plan.pool}" if plan.pool else ""
        pool += f", {plan.states} states" if plan.states else ""
        pool += f", window {plan.window}" if plan.window else ""
        pool += f", ratio {plan.window_ratio:g}" if plan.window_ratio else ""
        speed = f"{plan.rate:.4g} ×" if plan.trace else f"{plan.rate:.4g} jobs/s"
        return f"{machine}{pool}: {work}, {speed}"


def cells_of(lines: Sequence[Line]) -> list[Cell]:
    """The cells of these lines, in order of first appearance."""
    cells: dict[str, Cell] = {}
    for line in lines:
        plan = msgspec.convert(line["plan"], Plan)
        cell = cells.setdefault(plan.cell.key, Cell(plan.cell))
        cell.arms.setdefault(plan.label, {})[plan.seed] = line
    return list(cells.values())


def _at(figures: Line, path: Sequence[str]) -> float | None:
    found: Any = figures
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found


def show(cells: Sequence[Cell]) -> None:
    """Print a table for each cell. Its first arm is the baseline."""
    for cell in cells:
        width = max(len("policy"), *map(len, cell.arms))
        print(f"\n{cell.title}")
        losses = "".join(f"{name.replace('_', ' '):>9}  " for name in _losses(cell))
        print(
            f"  {'policy':{width}}  jobs/s  {'job, s':>8} {'p95':>8}  {'service':>8} {'p95':>8} {'change, %':>14}"
            f"  {'TTFT, s':>8} {'p95':>8} {'max':>7}   hit  again  {losses}{'leases: kept/late/broken':>24}"
        )
        for arm in cell.arms:
            print("  " + _row(cell, arm, next(iter(cell.arms)), width))


def _losses(cell: Cell) -> list[str]:
    """The reasons for lost tokens that some run of the cell may have."""
    pools = [line.get("pools", {}) for results in cell.arms.values() for line in results.values()]
    reasons = (("no_state", "states"), ("no_window", "window"))
    return [reason for reason, size in reasons if any(each.get(size) for each in pools)]


def _row(cell: Cell, arm: str, base: str, width: int) -> str:
    def mean(*path: str) -> float:
        return cell.mean(arm, *path)

    change = cell.change(arm, base, "service_s", "mean") if arm != base else None
    leases = np.mean(
        [
            [line["scheduler"][f"leases_{end}"] for end in ("handed_off", "expired", "broken")]
            for line in cell.arms[arm].values()
        ],
        axis=0,
    )
    refused = cell.mean(arm, "jobs_refused")
    losses = "".join(f"{100 * mean(f'{reason}_share'):9.1f}  " for reason in _losses(cell))
    return (
        f"{arm:{width}}  {mean('completion_rate'):6.3g}  {mean('duration_s', 'mean'):8.4g} "
        f"{mean('duration_s', 'p95'):8.4g}  {mean('service_s', 'mean'):8.4g} {mean('service_s', 'p95'):8.4g} "
        f"{change.percent() if change is not None else '':>14}  {mean('ttft_s', 'mean'):8.3g} "
        f"{mean('ttft_s', 'p95'):8.3g} {mean('ttft_s', 'max'):7.3g}  {100 * mean('hit_rate'):4.1f}  "
        f"{100 * mean('recomputed_share'):5.1f}  {losses}{'/'.join(f'{count:.0f}' for count in leases):>24}"
        + (f"  {refused:.0f} jobs refused" if refused else "")
    )


LEGEND = (
    "jobs/s: completed per second in the second half of the arrivals; service: a job's duration without its tools; "
    "change: of the mean service time; hit: prompt tokens found in the cache, %; again: computed again, in % of "
    "the prompt tokens that an earlier turn had or that jobs share (not of all, as hit is); no state, no window: "
    "prompt tokens that had K and V in the cache, but no recurrent state or whole window to continue from, %"
)
