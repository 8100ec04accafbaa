"""Recommendations from the runs: which policy, and how much host memory. Nothing is extrapolated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from .cells import Cell, Estimate
from .runs import Plan

FIGURE = ("service_s", "mean")

ENOUGH = 0.02
"""A gain below this share is not worth a change, even a certain one."""


MANY_JOBS = 100
"""Runs with fewer jobs show little of the effect of load."""


class Choice(NamedTuple):
    cell: Cell
    arm: str
    over_base: Estimate | None
    """Change of the service time against ``base``; None if ``arm`` is the base."""
    base: str
    runner_up: str
    over_runner_up: Estimate | None

    @property
    def is_sure(self) -> bool:
        """The seeds agree that the arm is better than the base."""
        gain = self.over_base
        return gain is not None and gain.mean + gain.half_width < 0


def choose(cell: Cell) -> Choice:
    """The first arm, in the order given, with a mean service time within 2 % of the least. Arms that completed no job
    do not count, nor do those that refused jobs, unless all did."""
    arms = [arm for arm in cell.arms if math.isfinite(cell.mean(arm, *FIGURE))]
    whole = [arm for arm in arms if not cell.mean(arm, "jobs_refused")] or arms
    best = min(whole, key=lambda arm: cell.mean(arm, *FIGURE))
    limit = cell.mean(best, *FIGURE) * (1 + ENOUGH)
    chosen = next(arm for arm in whole if cell.mean(arm, *FIGURE) <= limit)
    others = sorted((arm for arm in whole if arm != chosen), key=lambda arm: cell.mean(arm, *FIGURE))
    runner_up = others[0] if others else ""
    return Choice(
        cell,
        chosen,
        cell.change(chosen, arms[0], *FIGURE) if chosen != arms[0] else None,
        arms[0],
        runner_up,
        cell.change(chosen, runner_up, *FIGURE) if runner_up else None,
    )


def recommend(cells: Sequence[Cell]) -> list[str]:
    """Sentences: one for each cell, one more where host tiers of several sizes were tried, and one over all cells."""
    lines: list[str] = []
    for cell in cells:
        if _is_empty(cell):
            lines.append(
                f"{cell.title}: no job was completed, so there is no recommendation; the pool may be too small"
            )
        else:
            lines += [_say(choose(cell)), *_host_sizes(cell)]
    return lines + _worst_case([cell for cell in cells if not _is_empty(cell)])


def _is_empty(cell: Cell) -> bool:
    return not any(math.isfinite(cell.mean(arm, *FIGURE)) for arm in cell.arms)


def _say(choice: Choice) -> str:
    title = choice.cell.title
    if not choice.runner_up:
        said = f"{title}: only {choice.arm} was tried"
    elif choice.over_base is None:
        said = f"{title}: stay with {choice.arm}; nothing tried is more than {100 * ENOUGH:.0f} % better"
    else:
        gain = choice.over_base
        said = f"{title}: {choice.arm}; service time {gain.percent()} % against {choice.base}"
        if not math.isfinite(gain.half_width):
            said += " (one seed; run more --seeds to see how certain that is)"
        elif not choice.is_sure:
            said += f" (uncertain: the 95 % interval of {gain.seeds} seeds includes 0)"
        else:
            said += f" ({gain.seeds} seeds)"
    if choice.runner_up and choice.over_runner_up is not None and choice.runner_up != choice.base:
        said += f"; next best: {choice.runner_up}, against which it is {choice.over_runner_up.percent()} %"
    jobs = _jobs(choice.cell)
    return said if jobs >= MANY_JOBS else f"{said} ({jobs} jobs per run are few; use more)"


def _jobs(cell: Cell) -> int:
    """Jobs in the run that has fewest."""
    return min(int(line["figures"]["jobs"]) for results in cell.arms.values() for line in results.values())


def _host_sizes(cell: Cell) -> list[str]:
    """For the arm with a host tier that is best: the smallest size of the tier that is within 2 % of the best size."""
    by_arm: dict[str, dict[float, float]] = {}
    for label, results in cell.arms.items():
        plan = next(iter(results.values()))["plan"]
        if plan["host_gb"]:
            by_arm.setdefault(plan["arm"], {})[plan["host_gb"]] = cell.mean(label, *FIGURE)
    if not by_arm:
        return []
    arm = min(by_arm, key=lambda name: min(by_arm[name].values()))
    service = by_arm[arm]
    if len(service) < 2:
        return []
    enough = min(size for size, value in service.items() if value <= min(service.values()) * (1 + ENOUGH))
    figures = ", ".join(f"{size:g} GB {value:.3g} s" for size, value in sorted(service.items()))
    return [f"  host tier for {arm}: {enough:g} GB is enough ({figures})"]


def say_states(found: dict[str, Any]) -> str:
    """The result of `study.find_enough_states` in words."""
    plan, enough = msgspec.convert(found["plan"], Plan), found["states"]
    *tried, (_, floor) = found["tried"]
    lost = ", ".join(f"with {count} states {100 * share:.1f} %" for count, share in tried)
    said = (
        f"{Cell(plan.cell).title}: {enough} states are enough for {plan.label}; prompt tokens lost to no_state: "
        f"{lost}, with a state for every place {100 * floor:.1f} %"
    )
    unseen = ". A trace shows neither edits nor which prompts share a beginning; a server of such prompts may need more"
    return said + unseen if plan.trace else said


def _worst_case(cells: Sequence[Cell]) -> list[str]:
    """The safest arm over several cells: among the arms that all cells have, with a worst change against the first arm
    within 2 points of the best such worst case, the one with the best mean. The first arm stays if
    the mean gain is not worth a change."""
    if len(cells) < 2:
        return []
    base = next(iter(cells[0].arms))
    worst: dict[str, tuple[float, Cell]] = {}
    means: dict[str, float] = {}
    for arm in [arm for arm in cells[0].arms if arm != base and all({arm, base} <= set(c.arms) for c in cells)]:
        changes = [(change.mean, cell) for cell in cells if (change := cell.change(arm, base, *FIGURE)) is not None]
        if len(changes) == len(cells):
            worst[arm] = max(changes, key=lambda each: each[0])
            means[arm] = sum(change for change, _ in changes) / len(changes)
    if not worst:
        return []
    limit = min(value for value, _ in worst.values()) + ENOUGH
    safest = min((arm for arm in worst if worst[arm][0] <= limit), key=lambda arm: means[arm])
    value, cell = worst[safest]
    change = f"{100 * means[safest]:+.1f} % on average, at worst {100 * value:+.1f} % ({cell.title})"
    if means[safest] > -ENOUGH:
        return [f"over all {len(cells)} cells, stay with {base}; {safest} is the safest of the others: {change}"]
    return [f"over all {len(cells)} cells, {safest} is the safest: {change}"]
