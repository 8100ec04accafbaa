"""The table: every engine's figure, the ratio of Baton's to the better peer's, the goal, and whether it was met."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.peers.engines import OURS
from benchmarks.peers.models import TITLES
from benchmarks.peers.plan import Metric, Unit
from benchmarks.peers.results import Results

ROUNDS = 3
"""Fewer do not say whether a goal is met."""


@dataclass(frozen=True)
class Line:
    """values: by engine, of those that were measured. peers: those that could have been, of all the goal speaks of."""

    model: str
    dtype: str
    metric: Metric
    values: dict[str, float]
    failed: frozenset[str]
    peers: tuple[str, ...]

    @property
    def best(self) -> float | None:
        """The best value of the measured peers; None without any."""
        others = [value for engine, value in self.values.items() if engine != OURS]
        return (max if self.metric.more_is_better else min)(others) if others else None

    @property
    def ratio(self) -> float | None:
        """Ours over the better peer's."""
        ours, best = self.values.get(OURS), self.best
        return None if ours is None or best is None else ours / best

    @property
    def met(self) -> bool | None:
        """None where ours or every peer is missing."""
        if self.ratio is None:
            return None
        return self.ratio >= self.metric.goal if self.metric.more_is_better else self.ratio <= self.metric.goal

    @property
    def verdict(self) -> str:
        if self.met is None:
            return ""
        missing = [peer for peer in self.peers if peer not in self.values]
        return ("met" if self.met else "missed") + (f", without {' and '.join(missing)}" if missing else "")

    def cell(self, engine: str) -> str:
        if engine in self.values:
            value = self.values[engine]
            return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"
        return "failed" if engine in self.failed else ""


def lines(results: Results, units: Sequence[Unit], engines: Sequence[str], servers: Sequence[str]) -> Iterator[Line]:
    """servers: the engines that have one."""
    cells = dict.fromkeys((row["model"], row["dtype"]) for row in results.report["rows"] + results.report["failures"])
    for model, dtype in cells:
        for unit in units:
            able = servers if unit.load else engines
            failed = frozenset(engine for engine in able if results.failed(model, dtype, unit.name, engine))
            for metric in unit.metrics:
                values = results.values(model, dtype, metric.name)
                if values or failed:
                    peers = tuple(engine for engine in able if engine != OURS)
                    yield Line(model, dtype, metric, values, failed, peers)


def render(found: Sequence[Line], results: Results, engines: Sequence[str]) -> str:
    """Markdown, aligned; below it what is to be known about it."""
    head = ["model", "dtype", "", *engines, "ratio", "goal", ""]
    rows = [head, ["---"] * 3 + ["---:"] * (len(engines) + 2) + ["---"]]
    for line in found:
        goal = f"{'≥' if line.metric.more_is_better else '≤'} {line.metric.goal:g}"
        ratio = "" if line.ratio is None else f"{line.ratio:.2f}"
        what = f"{line.metric.name}, {line.metric.measure}"
        title = TITLES[line.model].split(":")[0]
        rows.append([title, line.dtype, what, *(line.cell(engine) for engine in engines), ratio, goal, line.verdict])
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    table = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in rows]
    return "\n".join([*table, "", *notes(found, results)])


def notes(found: Sequence[Line], results: Results) -> Iterator[str]:
    report = results.report
    yield where_from(results)
    met = [line.met for line in found if line.met is not None]
    too_few = f" (to be judged by {ROUNDS} rounds or more)" if results.rounds() < ROUNDS else ""
    yield f"ratio: ours over the better peer's; goals met: {sum(met)} of {len(met)}{too_few}"
    for engine, why in report["skipped"].items():
        yield f"{engine}: skipped, {why}"
    yield from agreements(results)
    yield from (f"{OURS} warned at {warning}" for warning in report["warnings"])
    for failure in report["failures"]:
        where = ", ".join(filter(None, (failure["model"], failure["dtype"], failure["unit"])))
        yield f"\n{failure['engine']} failed at {where}: {failure['reason']}"
        yield from (f"    {line}" for line in failure["last_lines"])


def agreements(results: Results) -> Iterator[str]:
    shares: dict[tuple[str, str, str], list[float]] = {}
    for row in results.report["agreement"]:
        shares.setdefault((row["engine"], row["model"], row["dtype"]), []).append(row["equal"])
    for (engine, model, dtype), found in shares.items():
        worst, mean = min(found), sum(found) / len(found)
        yield f"greedy tokens of {engine} that equal ours, {model} {dtype}: {mean:.1%}, least in a unit {worst:.1%}"


def where_from(results: Results) -> str:
    """The machine, the versions and how often."""
    about, rounds = results.report["runs"][-1], results.rounds()
    versions = ", ".join(f"{name} {known['version']}" for name, known in results.report["engines"].items())
    often = f"medians of {rounds} rounds" if rounds > 1 else "one round"
    return f"{about['processor']}, {len(about['cores'])} cores; {versions}; {often}"
