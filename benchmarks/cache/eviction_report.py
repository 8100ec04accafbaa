"""The report on runs of eviction.py: the table, the gates of the learned order, the picture."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from baton.entrypoints.simulate.cells import Estimate

BASE, OPTIMUM, LEARNED = "lru", "optimum", "learned"

MOST_BELOW_LRU = 0.003
LEAST_CLOSED = 0.15
MOST_EVICT_US = 10.0

TARGETS = {
    "agents": {0.1: 0.30, 0.3: 0.30, 0.6: 0.50},
    "tenants": {0.1: 0.30, 0.3: 0.35, 0.6: 0.35},
    "retrieval": {0.1: 0.10, 0.3: 0.25, 0.6: 0.35},
}
"""Share of the gap that must be closed with hints, by the pool's share of the live tokens."""


class Run(NamedTuple):
    trace: str
    seed: int
    requests: int
    share: float
    """Share of the live tokens that the pool holds."""
    pool: int
    order: str
    hints: bool
    hit_rate: float
    """Tokens of prompts that were cached ÷ all tokens of prompts."""
    evict_us: float

    @property
    def key(self) -> tuple:
        return self.trace, self.seed, self.requests, self.share, self.order, self.hints


class Cell:
    """A trace and a pool, over all seeds."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.trace, self.share = runs[0].trace, runs[0].share
        self.arms: dict[tuple[str, bool], dict[int, Run]] = {}
        for run in runs:
            self.arms.setdefault((run.order, run.hints), {})[run.seed] = run

    def rate(self, order: str, hints: bool) -> Estimate:
        return Estimate.from_values([run.hit_rate for run in self.arms[order, hints].values()])

    def closed(self, order: str, hints: bool) -> Estimate:
        """Share of the gap between lru without hints and the optimum that is closed, seed by seed."""
        base, best = self.arms[BASE, False], self.arms[OPTIMUM, False]
        return Estimate.from_values(
            [
                (run.hit_rate - base[seed].hit_rate) / max(best[seed].hit_rate - base[seed].hit_rate, 1e-9)
                for seed, run in self.arms[order, hints].items()
            ]
        )

    def above_lru(self, order: str, hints: bool) -> Estimate:
        """Hit rate above that of lru with the same hints, seed by seed."""
        base = self.arms[BASE, hints]
        return Estimate.from_values(
            [run.hit_rate - base[seed].hit_rate for seed, run in self.arms[order, hints].items()]
        )

    def evict_us(self, order: str) -> float:
        """The time of the quietest run, as other processes only add to it."""
        return min(run.evict_us for (name, _), runs in self.arms.items() if name == order for run in runs.values())


def cells_of(runs: Sequence[Run]) -> list[Cell]:
    grouped: dict[tuple[str, float], list[Run]] = {}
    for run in runs:
        grouped.setdefault((run.trace, run.share), []).append(run)
    return [Cell(group) for group in grouped.values()]


def print_table(runs: Sequence[Run]) -> None:
    """In Markdown: of each order the hit rate in percent, and of the gap from lru to the optimum what it closes."""
    cells = cells_of(runs)
    orders = list(dict.fromkeys(order for cell in cells for order, _ in cell.arms if order not in (BASE, OPTIMUM)))
    print(f"\n| trace | pool | hints | optimum | lru | {' | '.join(orders)} |\n|{'---|' * (5 + len(orders))}")
    for cell in cells:
        for hints in (False, True):
            if (BASE, hints) in cell.arms:
                line = [cell.trace, f"{cell.share:.0%}", "yes" if hints else "no"]
                line.append(f"{100 * cell.rate(OPTIMUM, False).mean:.1f}")
                line += [_figure(cell, order, hints) for order in (BASE, *orders)]
                print("| " + " | ".join(line) + " |")
    print("\nhit rate in %; in brackets the % of the gap from lru without hints to the optimum that is closed, ± 95 %")


def _figure(cell: Cell, order: str, hints: bool) -> str:
    rate, closed = 100 * cell.rate(order, hints).mean, cell.closed(order, hints)
    if order == BASE and not hints:
        return f"{rate:.1f}"
    spread = f" ± {100 * closed.half_width:.0f}" if math.isfinite(closed.half_width) else ""
    return f"{rate:.1f} ({100 * closed.mean:+.0f}{spread})"


def print_gates(runs: Sequence[Run]) -> None:
    """The conditions for making the learned order the default."""
    cells = cells_of(runs)
    arms = [(cell, hints) for cell in cells for hints in (False, True) if (LEARNED, hints) in cell.arms]
    print("\nlearned, points of hit rate above lru with the same hints:")
    for cell, hints in arms:
        above = cell.above_lru(LEARNED, hints)
        spread = f" ± {100 * above.half_width:.2f}" if math.isfinite(above.half_width) else ""
        low = "  <-- below" if above.mean < -MOST_BELOW_LRU else ""
        print(
            f"  {cell.trace:10} {cell.share:4.0%} {'hints' if hints else '     '} {100 * above.mean:+.2f}{spread}{low}"
        )
    worst = min(cell.above_lru(LEARNED, hints).mean for cell, hints in arms)
    _say(
        f"never more than {100 * MOST_BELOW_LRU:.1f} points below lru: worst {100 * worst:+.2f}",
        worst >= -MOST_BELOW_LRU,
    )
    for hints in (False, True):
        closed = [cell.closed(LEARNED, hints).mean for cell, with_hints in arms if with_hints is hints]
        if closed:
            mean = sum(closed) / len(closed)
            words = f"closes {LEAST_CLOSED:.0%} on average {'with' if hints else 'without'} hints: {mean:.0%}"
            _say(words, mean >= LEAST_CLOSED)
    for cell in cells:
        if cell.trace in TARGETS and (LEARNED, True) in cell.arms:
            target = TARGETS[cell.trace][cell.share]
            closed = cell.closed(LEARNED, True).mean
            _say(f"with hints, {cell.trace} at {cell.share:.0%} closes {target:.0%}: {closed:.0%}", closed >= target)
    slowest = max(cell.evict_us(LEARNED) for cell in cells)
    base = max(cell.evict_us(BASE) for cell in cells)
    _say(f"at most {MOST_EVICT_US:.0f} µs an eviction: {slowest:.1f} (lru {base:.1f})", slowest <= MOST_EVICT_US)


def _say(words: str, holds: bool) -> None:
    print(f"{'holds ' if holds else 'MISSED'}  {words}")


def draw(runs: Sequence[Run], out: Path) -> None:
    """Hit rates by pool, a row for each trace, without and with hints. Needs matplotlib (the extra ``bench``)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    traces = list(dict.fromkeys(run.trace for run in runs))
    figure, grid = pyplot.subplots(
        2, len(traces), figsize=(3.6 * len(traces), 6.4), squeeze=False, layout="constrained"
    )
    for column, trace in enumerate(traces):
        cells = sorted((cell for cell in cells_of(runs) if cell.trace == trace), key=lambda cell: cell.share)
        for row, hints in enumerate((False, True)):
            _draw_panel(grid[row][column], cells, hints)
            grid[row][column].set_title(f"{trace}, {'with' if hints else 'without'} hints", fontsize="medium")
    for panels in grid:
        panels[0].set_ylabel("prompt tokens found, %")
    grid[0][0].legend(fontsize="small")
    figure.savefig(out, dpi=130)
    pyplot.close(figure)


def _draw_panel(panel: Any, cells: Sequence[Cell], hints: bool) -> None:
    arms = [arm for arm in cells[0].arms if arm[1] is hints or arm[0] == OPTIMUM]
    if len(arms) == 1:
        panel.axis("off")
        panel.text(0.5, 0.5, "says nothing of the future", ha="center")
        return
    for number, (order, hinted) in enumerate(arms):
        rates = [cell.rate(order, hinted) for cell in cells]
        spread = [100 * rate.half_width if math.isfinite(rate.half_width) else 0.0 for rate in rates]
        style = {"color": "black", "linestyle": "--"} if order == OPTIMUM else {"color": f"C{number - 1}"}
        panel.errorbar(
            [100 * cell.share for cell in cells],
            [100 * rate.mean for rate in rates],
            spread,
            marker="osd^v<>"[number % 7],
            capsize=2,
            linewidth=2.4 if order == LEARNED else 1.2,
            label=order,
            **style,
        )
    panel.set_xlabel("pool, % of the live tokens")
    panel.grid(alpha=0.3)
