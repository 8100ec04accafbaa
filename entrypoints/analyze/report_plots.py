"""Plots of a report: hit rate by size, working set over time, sharing between requests, hit rate over time, and for
models with recurrent states the turns that find one, by the number of states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .pool_sizes import GIB

_LEAST = 0.005
"""Share of an infinite cache's hit rate at which the curve begins."""

_WINDOW_STYLES = ("-", "--", ":")


def plot(report: dict[str, Any], out: Path) -> None:
    """Write the plots to ``out`` as PNG. Needs matplotlib (the extra ``bench``)."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = 2 if report["states"] is None else 3
    figure, panels = pyplot.subplots(2, columns, figsize=(5.5 * columns, 7.4), layout="constrained")
    try:
        if report["states"] is not None:
            _states(panels[0][2], report["states"])
            panels[1][2].set_axis_off()
        _hit_rate(panels[0][0], report)
        _working_set(panels[0][1], report)
        _sharing(panels[1][0], report)
        _over_time(panels[1][1], report)
        log, requests = report["log"], report["requests"]
        name = Path(log["name"]).name.replace("$", r"\$")
        figure.suptitle(f"{name}: {requests['requests']:,} requests, {requests['prompt_tokens']:,} prompt tokens")
        figure.savefig(out, dpi=120, format="png")
    finally:
        pyplot.close(figure)


def _hit_rate(panel: Any, report: dict[str, Any]) -> None:
    rates, kv_bytes = report["hit_rate"], report["kv_bytes_per_token"]
    points = [point for point in rates["by_size"] if point["tokens"] and point["hit_rate"] >= _LEAST * rates["endless"]]
    panel.plot(
        [point["tokens"] for point in points] or [1], [100 * point["hit_rate"] for point in points] or [0], label="LRU"
    )
    panel.axhline(100 * rates["endless"], color="gray", linestyle="--", linewidth=1, label="infinite")
    for tier, color in zip(report["recommended"], ("tab:green", "tab:orange", "tab:red")):
        if tier["tokens"] is not None:
            panel.plot(
                [tier["tokens"]], [100 * tier["hit_rate"]], "o", color=color, label=f"recommended {tier['tier']}"
            )
    if rates["exact_up_to_tokens"] is not None:
        panel.axvline(rates["exact_up_to_tokens"], color="gray", linestyle=":", linewidth=1, label="exact up to here")
    panel.set(xscale="log", xlabel="tokens of cache", ylabel="prompt tokens found, %", title="Hit rate by size")
    panel.set_ylim(0, max(5.0, 108 * rates["endless"]))
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small")
    if kv_bytes is not None and report["windows"] is None:
        top = panel.secondary_xaxis(
            "top", functions=(lambda tokens: tokens * kv_bytes / GIB, lambda size: size * GIB / kv_bytes)
        )
        top.set_xlabel("GiB", fontsize="small")


def _states(panel: Any, states: dict[str, Any]) -> None:
    points, endless = states["by_number"], states["endless"]
    numbers = [point["states"] for point in points]
    for name, label in (("turns_found", "turns that find their state"), ("hit_rate", "prompt tokens found")):
        if endless[name] is not None:
            (line,) = panel.plot(numbers, [100 * point[name] for point in points], ".-", label=label)
            panel.axhline(100 * endless[name], color=line.get_color(), linestyle="--", linewidth=1)
    if (beside := states["by_tier"]["device"]) is not None:
        panel.axvline(beside, color="tab:green", linestyle=":", label=f"for --max-states {states['max_states']}")
    panel.set(xscale="log", xlabel="states beside those of running requests", ylabel="%", title="Recurrent states")
    panel.set_ylim(0, 102)
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small")


def _working_set(panel: Any, report: dict[str, Any]) -> None:
    found = report["working_set"]
    is_time = found["window_unit"] == "s"
    scale = 60.0 if is_time else 1.0
    for place, (window, style) in enumerate(zip(found["windows"], _WINDOW_STYLES)):
        points = [(each["at"] / scale, each["tokens"][place]) for each in found["points"]]
        known = [(at, tokens) for at, tokens in points if tokens is not None]
        if known:
            name = f"last {window / 60:.0f} min" if is_time else f"last {window:,.0f} requests"
            panel.plot(*zip(*known), style, label=name)
    if panel.lines:
        panel.legend(fontsize="small")
        panel.set_ylim(bottom=0)
    else:
        panel.text(0.5, 0.5, "the log is shorter than every window", ha="center", transform=panel.transAxes)
    panel.set(xlabel="minutes" if is_time else "requests", ylabel="tokens used", title="Working set")
    panel.grid(alpha=0.3)


def _sharing(panel: Any, report: dict[str, Any]) -> None:
    classes = report["sharing"]["requests_by_shared_part_of_prompt"]
    total = report["requests"]["requests"]
    panel.bar(list(classes), [100 * number / total for number in classes.values()])
    panel.set(
        xlabel="part of the prompt shared with an earlier request",
        ylabel="requests, %",
        title="Shared with earlier requests",
    )
    panel.tick_params(axis="x", labelsize="small")
    panel.set_axisbelow(True)
    panel.grid(alpha=0.3, axis="y")


def _over_time(panel: Any, report: dict[str, Any]) -> None:
    """The hit rate of an infinite cache between one point and the next."""
    found = report["working_set"]
    scale = 60.0 if found["window_unit"] == "s" else 1.0
    before, line = (0, 0), []
    for point in found["points"]:
        asked, hits = point["prompt_tokens"] - before[0], point["endless_hits"] - before[1]
        before = (point["prompt_tokens"], point["endless_hits"])
        if asked * 4 * len(found["points"]) >= found["points"][-1]["prompt_tokens"]:  # skip intervals with few tokens
            line.append((point["at"] / scale, 100 * hits / asked))
    if line:
        panel.plot(*zip(*line), marker="." if len(line) < 20 else None)
    panel.set_ylim(0, 102)
    panel.set(
        xlabel="minutes" if scale > 1 else "requests",
        ylabel="prompt tokens found, %",
        title="Infinite cache, over time",
    )
    panel.grid(alpha=0.3)
