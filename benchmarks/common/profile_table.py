"""Shows step profiles (runtime/runner/step_profile.py) as a table on screen and as stacked bars in a picture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.runtime.runner.step_profile import PHASES


def print_profiles(groups: Mapping[str, dict[str, Any]]) -> None:
    """One line for each label: medians in ms of a kind of steps (``profile["kinds"][kind]``)."""
    width = max([len(label) for label in groups] + [26])
    print(
        f"\n{'host and device, median ms':<{width}}{'steps':>7}{'rows':>6}{'tokens':>8}{'step':>9}{'host':>8}{'p95':>8}"
        + "".join(f"{phase:>10}" for phase in PHASES)
        + f"{'device':>9}{'gap':>8}"
    )
    for label, group in groups.items():
        print(
            f"{label:<{width}}{group['steps']:>7}{_median(group['rows'], 6, 0)}{_median(group['new_tokens'], 8, 0)}"
            f"{_median(group['step_ms'], 9)}{_median(group['host_ms'], 8)}{_median(group['host_ms'], 8, key='p95')}"
            + "".join(_median(group["phases_ms"][phase], 10) for phase in PHASES)
            + _median(group["device_ms"], 9)
            + _median(group["gap_ms"], 8),
            flush=True,
        )


def plot_profiles(groups: Mapping[str, dict[str, Any]], out: Path) -> None:
    """A bar for each label: the phases of the median step on the host, and beside it the device's time and gap."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    labels = list(groups)
    figure, axes = pyplot.subplots(figsize=(3 + 0.9 * len(labels), 4), layout="constrained")
    places = range(len(labels))
    with_device = any(group["device_ms"] for group in groups.values())
    width = 0.38 if with_device else 0.6
    left = [place - width / 2 - 0.01 if with_device else place for place in places]
    phases = {p: [_value(groups[label]["phases_ms"][p]) for label in labels] for p in PHASES}
    colours = ["0.9" if phase == "wait" else f"C{i}" for i, phase in enumerate(PHASES)]  # pale: waiting is no work
    _stack(axes, left, width, phases, colours)
    if with_device:
        right = [place + width / 2 + 0.01 for place in places]
        times = {name: [_value(groups[label][f"{name}_ms"]) for label in labels] for name in ("device", "gap")}
        _stack(axes, right, width, times, ["0.35", "0.75"])
    axes.set(ylabel="ms per step, median", title="Where the time of a step goes: host" + ", device" * with_device)
    axes.set_xticks(list(places), labels, rotation=30, ha="right")
    figure.legend(loc="outside right upper", fontsize="small")
    figure.savefig(out, dpi=150)
    pyplot.close(figure)


def _stack(axes: Any, places: Any, width: float, parts: dict[str, list[float]], colours: list[str]) -> None:
    bottom = [0.0] * len(next(iter(parts.values())))
    for (name, heights), colour in zip(parts.items(), colours, strict=True):
        axes.bar(places, heights, width, bottom=bottom, label=name, color=colour)
        bottom = [low + height for low, height in zip(bottom, heights)]


def _value(times: dict[str, float]) -> float:
    return times.get("median", 0.0)


def _median(times: dict[str, float], width: int, digits: int = 2, key: str = "median") -> str:
    return f"{times[key]:>{width}.{digits}f}" if times else f"{'-':>{width}}"
