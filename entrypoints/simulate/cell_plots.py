"""Plots of service time, TTFT and hit rate against load: a row of panels for each machine and workload."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from .cells import Cell

PANELS = (
    ("mean service time, s", ("service_s", "mean"), 1.0),
    ("95 % of service times below, s", ("service_s", "p95"), 1.0),
    ("mean TTFT, s", ("ttft_s", "mean"), 1.0),
    ("prompt tokens found, %", ("hit_rate",), 100.0),
)


def plot(cells: Sequence[Cell], out: Path) -> None:
    """Write the plots to ``out``. Needs matplotlib (the extra ``bench``)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows: dict[str, list[Cell]] = {}
    for cell in cells:
        rows.setdefault(msgspec.structs.replace(cell.plan, rate=0.0, num_jobs=0).key, []).append(cell)
    figure, grid = pyplot.subplots(
        len(rows), len(PANELS), figsize=(4.2 * len(PANELS), 3.4 * len(rows)), squeeze=False, layout="constrained"
    )
    for panels, group in zip(grid, rows.values()):
        group.sort(key=lambda cell: cell.plan.rate)
        for panel, (label, path, factor) in zip(panels, PANELS):
            _draw(panel, group, path, factor)
            panel.set(xlabel="times as fast" if group[0].plan.trace else "jobs/s", ylabel=label)
        panels[0].set_title(group[0].title.rsplit(",", 1)[0], fontsize="small", loc="left")
        panels[0].legend(fontsize="small")
    figure.savefig(out, dpi=130)
    pyplot.close(figure)


def _draw(panel: Any, group: Sequence[Cell], path: tuple[str, ...], factor: float) -> None:
    arms = list(dict.fromkeys(arm for cell in group for arm in cell.arms))
    for number, arm in enumerate(arms):
        points = [(cell.plan.rate, factor * cell.mean(arm, *path)) for cell in group if arm in cell.arms]
        panel.plot(*zip(*points), marker="osd^v<>"[number % 7], label=arm)
    if factor == 1.0:
        panel.set_yscale("log")
