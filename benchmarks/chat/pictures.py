"""Two pictures of chat.json: TTFT by turn, and a timeline of one agent's conversation."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

COLOURS = {"goes on": "#2f7d5b", "looks up": "#7aa6c2", "replays": "#c2703d"}
NAMES = {
    "goes on": "goes on from its last turn",
    "looks up": "looks its beginning up",
    "replays": "computes everything again",
}


def draw(report: dict[str, Any], folder: Path) -> None:
    """chat_ttft.png and chat_timeline.png."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    for name, paint, size in (("chat_ttft", bars, (8, 4)), ("chat_timeline", timeline, (9, 3.6))):
        figure, axes = pyplot.subplots(figsize=size, layout="constrained")
        paint(axes, report)
        figure.text(0.995, 0.005, where(report), ha="right", va="bottom", fontsize=6.5, color="0.45")
        figure.get_layout_engine().set(rect=(0, 0.04, 1, 0.96))  # type: ignore[union-attr]
        figure.savefig(folder / f"{name}.png", dpi=160)
        pyplot.close(figure)


def where(report: dict[str, Any]) -> str:
    work = report["work"]
    return (
        f"{work['model']}, {work['agents']} agents in turn; {report['device']}, {report['cores']} cores; "
        f"commit {report['commit']}"
    )


def bars(axes: Any, report: dict[str, Any]) -> None:
    turns, rounds = report["work"]["turns"], report["rounds"]
    width = 0.8 / len(rounds)
    for place, (way, found) in enumerate(reversed(rounds.items())):
        talks = [agent for agents in found for agent in agents]
        heights = [1e3 * mean(turn["ttft"] for turn in each) for each in zip(*talks, strict=True)]
        at = [turn + (place - (len(rounds) - 1) / 2) * width for turn in range(1, turns + 1)]
        drawn = axes.bar(at, heights, width * 0.92, color=COLOURS[way], label=NAMES[way])
        axes.bar_label(drawn, fmt="%.0f", fontsize=7, padding=1)
    axes.set(title="An agent's chat: time to the first token of each turn", xlabel="turn")
    axes.set_ylabel("mean TTFT in ms (lower is better)")
    axes.set_xticks(range(1, turns + 1))
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def timeline(axes: Any, report: dict[str, Any]) -> None:
    """The first agent's turns of the first round, put one after the other without what others did between."""
    rounds = report["rounds"]
    for row, (way, found) in enumerate(reversed(rounds.items())):
        start = 0.0
        for turn in found[0][0]:
            answer = turn["done"] - turn["first"]
            axes.barh(row, turn["ttft"], 0.55, left=start, color=COLOURS[way])
            axes.barh(row, answer, 0.55, left=start + turn["ttft"], color="0.88", edgecolor="white", linewidth=0.5)
            start += turn["ttft"] + answer + GAP_S
        axes.text(start, row, f" {start - GAP_S * len(found[0][0]):.1f} s", va="center", fontsize=8)
    axes.set_yticks(range(len(rounds)), [NAMES[way] for way in reversed(rounds)])
    axes.set(title="The same conversation: coloured until the first token, grey while it answers")
    axes.set_xlabel("seconds of the server's time for one agent; gaps are tool calls, not to scale (shorter is better)")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0)


GAP_S = 0.15
