"""The tables of policy_study.py: the effect of each policy, cell by cell, and whether handoff meets its goals."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from baton.entrypoints.simulate.cells import Cell, Estimate

FIGURES = {"mean service": ("service_s", "mean"), "P95 of durations": ("duration_s", "p95")}

RIVALS = {"handoff": ("continuum", "context-serve"), "handoff+host": ("continuum+host", "lmcache-like")}
"""The rivals of each arm of handoff, with and without a host tier. A rival may have its own pin time (continuum@8)."""

EQUAL = 0.002
"""A difference below this share is none."""


def find(cell: Cell, name: str) -> str | None:
    """The label of an arm in a cell, whatever its pin time and host tier."""
    for label in cell.arms:
        arm = label.split(" ")[0]
        policy, _, extra = arm.partition("+")
        if name == "+".join(filter(None, (policy.partition("@")[0], extra))):
            return label
    return None


class Studied(NamedTuple):
    """A card and a kind of work. peak: jobs per second that fcfs completes at most."""

    title: str
    peak: float
    cells: list[Cell]


class Compared(NamedTuple):
    """handoff compared with another arm: the relative change of its figure."""

    cell: Cell
    ours: str
    other: str
    change: Estimate


def compare(cells: Sequence[Cell], ours: str, other: str, figure: Sequence[str]) -> Iterator[Compared]:
    for cell in cells:
        own, base = find(cell, ours), find(cell, other)
        if own is not None and base is not None and (change := cell.change(own, base, *figure)) is not None:
            yield Compared(cell, own, base, change)


def against_best(cells: Sequence[Cell], ours: str, figure: Sequence[str]) -> list[Compared]:
    """The comparison with the best rival in each cell."""
    found = []
    for cell in cells:
        compared = [one for rival in RIVALS[ours] for one in compare([cell], ours, rival, figure)]
        if compared:
            found.append(max(compared, key=lambda one: one.change.mean))
    return found


def worst_job(cell: Cell, label: str, base: str = "fcfs") -> float:
    """The greatest factor by which a job's service takes longer than it does under ``base``, in any seed."""
    factors = [
        float(np.max(np.array(line["services_s"]) / np.array(cell.arms[base][seed]["services_s"])))
        for seed, line in cell.arms[label].items()
        if seed in cell.arms[base]
    ]
    return max(factors)


def rows(found: Studied) -> Iterator[list[str]]:
    """A line for each cell: mean service of fcfs in seconds, and what the others change, in percent."""
    for cell in sorted(found.cells, key=lambda cell: cell.plan.rate):
        load, seeds = f"{100 * cell.plan.rate / found.peak:.0f} %", len(cell.arms["fcfs"])
        row = [load, f"{cell.plan.rate:.3g}", str(seeds), f"{cell.mean('fcfs', 'service_s', 'mean'):.4g}"]
        for name in ("continuum", "context-serve", "handoff", "oracle", *RIVALS["handoff+host"], "handoff+host"):
            label = find(cell, name)
            change = cell.change(label, "fcfs", "service_s", "mean") if label is not None else None
            row.append(change.percent() if change is not None else "")
        yield [*row, f"{max(worst_job(cell, label) for label in cell.arms if label.startswith('handoff')):.2f}"]


HEAD = (
    "load",
    "jobs/s",
    "seeds",
    "fcfs, s",
    "continuum",
    "context-serve",
    "handoff",
    "oracle",
    "continuum + host",
    "lmcache-like",
    "handoff + host",
    "worst job ×",
)


def table(found: Studied) -> str:
    """Markdown."""
    title = f"\n{found.title}; fcfs completes {found.peak:.3g} jobs/s at most\n\n"
    lines = [f"| {' | '.join(row)} |\n" for row in (HEAD, *rows(found))]
    return title + lines[0] + f"|{'---|' * len(HEAD)}\n" + "".join(lines[1:])


def verdicts(studied: Sequence[Studied]) -> list[str]:
    """The claims about handoff, and whether the runs support them."""
    cells = [cell for found in studied for cell in found.cells]
    saturated = [cell for found in studied for cell in found.cells if cell.plan.rate > 1.05 * found.peak]
    said = []
    for figure, path in FIGURES.items():
        said.append(f"{figure}, {_beside(compare(cells, 'handoff', 'fcfs', path), 'fcfs', 0.01)}")
        for ours in RIVALS:
            best = against_best(saturated, ours, path)
            said.append(f"{figure} above saturation, {_beside(best, 'the best rival', EQUAL)}")
        for ours, oracle in (("handoff", "oracle"), ("handoff+host", "oracle+host")):
            said.append(f"{figure}, {_beside(compare(cells, ours, oracle, path), oracle, 0.1)}")
    for ours in RIVALS:
        worst = [(worst_job(cell, label), cell) for cell in cells if (label := find(cell, ours)) is not None]
        if worst:
            factor, cell = max(worst, key=lambda one: one[0])
            said.append(f"the job that suffers most under {ours} takes {factor:.2f} times its fcfs value: {cell.title}")
    return said


def _beside(compared: Iterable[Compared], other: str, most: float) -> str:
    """How often the figure is larger by no more than this share, and the worst case."""
    ranked = sorted(compared, key=lambda one: -one.change.mean)
    if not ranked:
        return f"nothing to compare with {other}"
    within, worst = sum(one.change.mean <= most for one in ranked), ranked[0]
    return (
        f"{worst.ours} beside {other}: at most {100 * most:g} % more in {within} of {len(ranked)} cells; at worst "
        f"{worst.change.percent()} % beside {worst.other} ({worst.cell.title})"
    )


def report(studied: Sequence[Studied], out: Path) -> None:
    """On the terminal, and as study.md and study.json in a folder."""
    said = verdicts(studied)
    text = "".join(map(table, studied))
    print(text)
    print("\n".join(said))
    (out / "study.md").write_text(text + "\n" + "".join(f"- {line}\n" for line in said))
    figures: list[dict[str, Any]] = [
        {"work": found.title, "rate": cell.plan.rate, "arm": arm, "seed": seed, "figures": line["figures"]}
        for found in studied
        for cell in found.cells
        for arm, lines in cell.arms.items()
        for seed, line in lines.items()
    ]
    (out / "study.json").write_text(json.dumps({"verdicts": said, "runs": figures}, indent=1) + "\n")
