"""The table: every engine's figure, the ratio of Baton's to the better peer's, the goal, and whether it was met."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.peers.engines import OURS, Engine, family
from benchmarks.peers.models import TITLES
from benchmarks.peers.plan import Metric, Unit, takes_part
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
    rounds: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """The figures of each round, by engine."""

    @property
    def best(self) -> float | None:
        """The best value of the measured peers; None without any."""
        return self._best(self.values)

    @property
    def ratio(self) -> float | None:
        """Ours over the better peer's."""
        return self._ratio(self.values)

    @property
    def ratio_of_best(self) -> float | None:
        """The same of each engine's best round, which others on the machine disturbed least."""
        return self._ratio({engine: self._better(values) for engine, values in self.rounds.items()})

    @property
    def goals(self) -> dict[str, float]:
        """Measured peer -> goal, for those peers that have one."""
        found = {peer: self.metric.goal_of(self.dtype, peer) for peer in self.values if family(peer) != OURS}
        return {peer: goal for peer, goal in found.items() if goal is not None}

    @property
    def needed(self) -> float | None:
        """The value at which ours would meet the goals of all measured peers; None without any."""
        least = [goal * self.values[peer] for peer, goal in self.goals.items()]
        return self._better(least) if least else None

    @property
    def met(self) -> bool | None:
        """None where ours is missing, or every peer that there is a goal for."""
        ours = self.values.get(OURS)
        if ours is None or not self.goals:
            return None
        ratios = [(ours / self.values[peer], goal) for peer, goal in self.goals.items()]
        return all(ratio >= goal if self.metric.more_is_better else ratio <= goal for ratio, goal in ratios)

    def _better(self, values: Sequence[float]) -> float:
        return (max if self.metric.more_is_better else min)(values)

    def _best(self, values: Mapping[str, float]) -> float | None:
        others = [value for engine, value in values.items() if family(engine) != OURS]
        return self._better(others) if others else None

    def _ratio(self, values: Mapping[str, float]) -> float | None:
        ours, best = values.get(OURS), self._best(values)
        return None if ours is None or best is None else ours / best

    @property
    def goal(self) -> str:
        """Each goal, with the peers that it speaks of if there are several."""
        sign = "≥" if self.metric.more_is_better else "≤"
        known = {family(peer): self.metric.goal_of(self.dtype, peer) for peer in self.peers}
        goals: dict[float, list[str]] = {}
        for peer, goal in known.items():
            if goal is not None:
                goals.setdefault(goal, []).append(peer)
        if len(goals) == 1 and None not in known.values():
            return f"{sign} {next(iter(goals)):g}"
        return ", ".join(f"{sign} {goal:g} of {' and '.join(peers)}" for goal, peers in goals.items())

    @property
    def verdict(self) -> str:
        if self.met is None:
            return ""
        wanted = [peer for peer in self.peers if self.metric.goal_of(self.dtype, peer) is not None]
        missing = [peer for peer in wanted if peer not in self.values]
        return ("met" if self.met else "missed") + (f", without {' and '.join(missing)}" if missing else "")

    def cell(self, engine: str) -> str:
        if engine in self.values:
            value = self.values[engine]
            return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"
        return "failed" if engine in self.failed else ""


def lines(results: Results, units: Sequence[Unit], engines: Sequence[Engine]) -> Iterator[Line]:
    cells = dict.fromkeys((row["model"], row["dtype"]) for row in results.report["rows"] + results.report["failures"])
    for model, dtype in cells:
        for unit in units:
            if not unit.suits(dtype):
                continue
            able = [engine.name for engine in engines if takes_part(engine, unit, dtype)]
            failed = frozenset(engine for engine in able if results.failed(model, dtype, unit.name, engine))
            for metric in unit.metrics:
                values = results.values(model, dtype, metric.name)
                if values or failed:
                    peers = tuple(engine for engine in able if family(engine) != OURS)
                    rounds = results.all_values(model, dtype, metric.name)
                    yield Line(model, dtype, metric, values, failed, peers, rounds)


def render(found: Sequence[Line], results: Results, engines: Sequence[str]) -> str:
    """Markdown, aligned; below it what is to be known about it."""
    head = ["model", "dtype", "", *engines, "ratio", "best", "goal", ""]
    rows = [head, ["---"] * 3 + ["---:"] * (len(engines) + 3) + ["---"]]
    for line in found:
        ratios = ["" if ratio is None else f"{ratio:.2f}" for ratio in (line.ratio, line.ratio_of_best)]
        what = f"{line.metric.name}, {line.metric.measure}"
        title = TITLES[line.model].split(":")[0]
        rows.append(
            [title, line.dtype, what, *(line.cell(engine) for engine in engines), *ratios, line.goal, line.verdict]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    table = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths)) + " |" for row in rows]
    return "\n".join([*table, "", *notes(found, results)])


def notes(found: Sequence[Line], results: Results) -> Iterator[str]:
    report = results.report
    yield where_from(results)
    met = [line.met for line in found if line.met is not None]
    too_few = f" (to be judged by {ROUNDS} rounds or more)" if results.rounds() < ROUNDS else ""
    yield "ratio: ours over the better peer's; best: that of each engine's best round"
    yield f"goals met: {sum(met)} of {len(met)}{too_few}"
    for engine, why in report["skipped"].items():
        yield f"{engine}: skipped, {why}"
    if report["runs"][-1].get("level") and any(family(name) == "openvino" for name in report["engines"]):
        yield "openvino: lowered in its oneDNN kernels alone, so its figures are an upper bound"
    for engine, known in report["engines"].items():
        if "build" in known:
            yield f"{engine}: its package is built for {known['build']}, on any processor"
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
    # Baton with a file of llama.cpp's is not named again: it has no version of its own.
    engines = {name: known for name, known in results.report["engines"].items() if "version" in known}
    versions = ", ".join(f"{name} {known['version']}" for name, known in engines.items())
    often = f"medians of {rounds} rounds" if rounds > 1 else "one round"
    level = f" as {about['level']}" if about.get("level") else ""
    return f"{about['processor']}{level}, {len(about['cores'])} cores; {versions}; {often}"
