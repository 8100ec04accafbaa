"""Plots the files of agent_jobs.py by load: job duration, service time, and the gain over a policy.

    python -m benchmarks.agents.plot_jps_sweep benchmarks/results [--baseline fcfs] [--out benchmarks/results]

Takes files, or folders of them. Runs of one policy at one load are rounds of the same measurement: the curve goes
through their median, and a bar shows the range. Runs of the same work share a picture, agents_WORKLOAD.png. The gain is
that of the mean duration: 100 × (baseline - policy) ÷ baseline, above 0 is faster.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.agents.run_report import read_runs, show
from benchmarks.common.measured import RESULTS

Run = dict[str, Any]
Curves = dict[str, dict[float, list[float]]]
"""policy -> JPS -> a value for each round."""

PANELS = {
    "avg_duration_s": "mean job duration, s",
    "p95_duration_s": "95th percentile of job durations, s",
    "avg_service_s": "mean service time (without tools), s",
}
_SAME_WORK = ("workload", "turns", "duration_s", "time_scale", "token_scale", "seed", "model")


def curves(runs: Sequence[Run], key: str) -> Curves:
    """Policies in the order they come in; loads ascending. Runs in which no job ended have no value."""
    found: Curves = {}
    for run in sorted(runs, key=lambda run: run["jps"]):
        if run[key] is not None:
            found.setdefault(run["policy"], {}).setdefault(run["jps"], []).append(run[key])
    names = dict.fromkeys(run["policy"] for run in runs)
    return {name: found[name] for name in names if name in found}


def gains(durations: Curves, baseline: str) -> Curves:
    """Per cent by which the others are faster than this policy, at the loads that both have; by round where both have
    as many, else of the medians. Raises ValueError without the policy."""
    if baseline not in durations:
        raise ValueError(f"no run of the policy {baseline!r}; there are {', '.join(durations) or 'none'}: --baseline")
    found: Curves = {}
    for name, by_load in durations.items():
        for jps, values in by_load.items():
            theirs = durations[baseline].get(jps)
            if name == baseline or theirs is None:
                continue
            pairs = zip(theirs, values) if len(theirs) == len(values) else [(median(theirs), median(values))]
            found.setdefault(name, {})[jps] = [100 * (base - own) / base for base, own in pairs]
    return found


def same_work(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """By a name for the file: runs that can be compared."""
    groups: dict[tuple[Any, ...], list[Run]] = defaultdict(list)
    for run in runs:
        groups[tuple(run[key] for key in _SAME_WORK)].append(run)
    names = [work[0] for work in groups]
    return {
        name if names.count(name) == 1 else f"{name}_{number}": sorted(group, key=lambda run: run["round"])
        for number, (name, group) in enumerate(zip(names, groups.values()), 1)
    }


def draw(runs: Sequence[Run], baseline: str, file: Path) -> None:
    """The gain is left out where the baseline was not run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parts: list[tuple[str, Curves]] = [(title, curves(runs, key)) for key, title in PANELS.items()]
    if baseline in parts[0][1] and len(parts[0][1]) > 1:
        parts.append((f"faster than {baseline} in the mean, %", gains(parts[0][1], baseline)))
    policies = sorted(parts[0][1], key=lambda name: name != baseline)
    figure, panels = pyplot.subplots(1, len(parts), figsize=(4.4 * len(parts), 3.9), layout="constrained")
    for panel, (title, by_policy) in zip(panels, parts):
        for number, name in enumerate(policies):
            if name in by_policy:
                _curve(panel, by_policy[name], name, f"C{number}")
        panel.set(title=title, xlabel="jobs that arrive a second")
        panel.spines[["top", "right"]].set_visible(False)
        if title == parts[-1][0] and len(parts) > len(PANELS):
            panel.axhline(0, color="0.6", linewidth=1)
        else:
            panel.set_ylim(bottom=0)
    panels[0].legend(frameon=False)
    figure.text(0.995, 0.005, _where(runs[0]), ha="right", va="bottom", fontsize=6.5, color="0.45")
    figure.get_layout_engine().set(rect=(0, 0.04, 1, 0.96))  # type: ignore[union-attr]
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def _curve(panel: Any, by_load: dict[float, list[float]], name: str, colour: str) -> None:
    middles = [median(values) for values in by_load.values()]
    below = [middle - min(values) for middle, values in zip(middles, by_load.values())]
    above = [max(values) - middle for middle, values in zip(middles, by_load.values())]
    panel.errorbar(list(by_load), middles, yerr=[below, above], marker="o", capsize=3, label=name, color=colour)


def _where(run: Run) -> str:
    machine = run["machine"]
    return (
        f"{run['workload']}, {run['turns']} turns, tools × {run['time_scale']:g}, lengths × {run['token_scale']:g}; "
        f"{Path(run['model']).name}; {machine['device']}, {machine['cores']} cores; commit {machine['commit']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*", default=[RESULTS], help="files of agent_jobs.py, or folders")
    parser.add_argument("--baseline", default="fcfs", help="the policy that the others are compared with")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the pictures")
    args = parser.parse_args()
    try:
        runs = read_runs(args.runs)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    if not runs:
        parser.error(f"no runs of benchmarks.agents.agent_jobs in {', '.join(map(str, args.runs))}")
    show(runs)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, group in same_work(runs).items():
        draw(group, args.baseline, args.out / f"agents_{name}.png")
        print(args.out / f"agents_{name}.png")
        durations = curves(group, "avg_duration_s")
        if args.baseline not in durations:
            print(f"no gains: {args.baseline} was not run; --baseline names another")
            continue
        for policy, by_load in gains(durations, args.baseline).items():
            print(f"{policy:<16}" + "".join(f"{jps:>8g} JPS{median(each):>+7.1f} %" for jps, each in by_load.items()))


if __name__ == "__main__":
    main()
