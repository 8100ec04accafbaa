"""tiers.png: TTFT by turn, the cost of write-through, and stage 2 after a broken lease."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any


def plot(report: dict[str, Any], out: Path) -> None:
    """A panel for each scenario that was run and has something to draw."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    draw = {"multi_turn": draw_turns, "write_cost": draw_cost, "broken_lease": draw_leases}
    chosen = [(draw[name], part) for name, parts in report["scenarios"].items() if name in draw for part in parts]
    if not chosen:
        return
    figure, panels = pyplot.subplots(1, len(chosen), figsize=(5 * len(chosen), 4), squeeze=False, layout="constrained")
    for panel, (drawn, part) in zip(panels[0], chosen):
        drawn(panel, part)
    figure.savefig(out, dpi=150)
    pyplot.close(figure)


def draw_turns(panel: Any, part: dict[str, Any]) -> None:
    for cell in part["cells"]:
        times = [mean(turn) * 1e3 for turn in cell["ttft_s"]]
        panel.plot(
            range(1, len(times) + 1), times, marker="o", label=f"{cell['engine']}, {100 * cell['hits']:.0f} % hit"
        )
    panel.set(title=f"conversations, {part['work']['at_once']} at once", xlabel="turn", ylabel="mean TTFT, ms", ylim=0)
    panel.xaxis.get_major_locator().set_params(integer=True)
    panel.legend()


def draw_cost(panel: Any, part: dict[str, Any]) -> None:
    labels = []
    for name, kinds in part["differences"].items():
        for kind, label in (("cpu_s", "CPU"), ("host_s", "own work"), ("wall_s", "wall")):
            found = kinds[kind]
            panel.errorbar(len(labels), 100 * found["mean"], yerr=100 * found["half_width"], fmt="o", capsize=4)
            labels.append(f"{name}\n{label}")
    panel.axhline(0, color="0.6", linewidth=1)
    panel.axhline(100 * part["goals"][0]["goal"], color="C3", linestyle="--", linewidth=1)
    panel.set(title="write-through, traffic that fits the device", ylabel="more than without a tier, %")
    panel.set_xticks(range(len(labels)), labels, fontsize="small")


def draw_leases(panel: Any, part: dict[str, Any]) -> None:
    cells = part["cells"]
    bars = panel.bar([cell["mode"] for cell in cells], [cell["ttft_median_ms"] for cell in cells], width=0.6)
    panel.bar_label(bars, fmt="%.0f")
    panel.set(title=f"stage 2 after a broken lease, prompt {part['work']['prompt']}", ylabel="TTFT, ms")
