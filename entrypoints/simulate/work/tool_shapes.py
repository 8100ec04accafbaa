"""Distributions of tool times: each tool has its own, so that a policy can learn a tool's times from its name.

A `ToolShape` is a list of tools with the share of calls that each gets.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Draw = Callable[[np.random.Generator], float]
"""Seconds of one call."""


def uniform(low: float, high: float) -> Draw:
    return lambda rng: float(rng.uniform(low, high))


def exponential(mean: float) -> Draw:
    return lambda rng: float(rng.exponential(mean))


def lognormal(median: float, sigma: float) -> Draw:
    return lambda rng: float(median * math.exp(sigma * rng.standard_normal()))


def pareto(least: float, alpha: float, cap: float) -> Draw:
    """A Pareto tail from ``least`` on, clipped at ``cap``."""
    return lambda rng: float(min(cap, least * (1.0 + rng.pareto(alpha))))


def either(first: Draw, share: float, second: Draw) -> Draw:
    """A mixture: ``share`` of the calls are like ``first``, the others like ``second``."""
    return lambda rng: first(rng) if rng.random() < share else second(rng)


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    share: float
    """Share of the shape's calls."""
    draw: Draw
    drift: float = 1.0
    """Factor by which its times change from the first job of a run to the last, by equal factors in equal parts."""

    def draw_call(self, progress: float, rng: np.random.Generator) -> float:
        """Seconds of a call. progress: how much of the run's jobs have arrived, 0 to 1."""
        return self.draw(rng) * self.drift**progress


@dataclass(frozen=True, slots=True)
class ToolShape:
    tools: tuple[Tool, ...]
    once: Tool | None = None
    """Called in exactly one turn of each job, drawn at random."""

    def draw_job(self, calls: int, rng: np.random.Generator, progress: float = 0.0) -> list[tuple[str, float]]:
        """(tool, seconds) for each of ``calls`` calls. progress: as for `Tool.draw_call`."""
        shares = np.array([tool.share for tool in self.tools])
        chosen = [self.tools[i] for i in rng.choice(len(self.tools), size=calls, p=shares / shares.sum())]
        if self.once is not None and calls:
            chosen[int(rng.integers(calls))] = self.once
        return [(tool.name, tool.draw_call(progress, rng)) for tool in chosen]


FAST = uniform(0.05, 0.2)

SHAPES = {
    # Agents on a shell: all calls are fast but one, the tests.
    "shell": ToolShape(
        (Tool("ls", 0.25, FAST), Tool("cat", 0.35, FAST), Tool("grep", 0.25, FAST), Tool("sed", 0.15, FAST)),
        once=Tool("pytest", 1.0, uniform(2.0, 5.0)),
    ),
    # Two thirds around 0.4 s, a fifth around 8 s, the rest a tail that begins at 100 s. `python` may be either.
    "heavy": ToolShape(
        (
            Tool("ls", 0.14, lognormal(0.25, 0.6)),
            Tool("cat", 0.20, lognormal(0.35, 0.6)),
            Tool("grep", 0.18, lognormal(0.5, 0.8)),
            Tool("python", 0.20, either(lognormal(0.6, 0.8), 0.75, lognormal(8.0, 0.8))),
            Tool("pytest", 0.10, lognormal(8.0, 0.7)),
            Tool("pip", 0.07, lognormal(9.0, 0.9)),
            Tool("make", 0.06, either(lognormal(6.0, 0.7), 0.3, pareto(100.0, 1.5, 900.0))),
            Tool("docker", 0.05, either(lognormal(10.0, 0.6), 0.1, pareto(100.0, 1.5, 900.0))),
            Tool("train", 0.03, pareto(100.0, 1.5, 900.0)),
        )
    ),
    # Tools that change: a build gets thirty times slower, a query thirty times faster, in the course of a run.
    "drifting": ToolShape(
        (
            Tool("ls", 0.30, FAST),
            Tool("build", 0.40, lognormal(0.6, 0.6), drift=30.0),
            Tool("query", 0.30, lognormal(18.0, 0.6), drift=1 / 30),
        )
    ),
    # Tools that lie: one takes a second, but one call in twelve takes five minutes; a name that every table of commands
    # counts among the fast ones takes half a minute (a search of a whole disk).
    "lying": ToolShape(
        (
            Tool("cat", 0.45, FAST),
            Tool("fetch", 0.35, either(lognormal(1.0, 0.3), 11 / 12, lognormal(300.0, 0.1))),
            Tool("grep", 0.20, lognormal(30.0, 0.4)),
        )
    ),
    # No tool: a person reads the answer and writes again.
    "people": ToolShape((Tool("", 1.0, lognormal(10.0, 0.8)),)),
    # No memory and no tail: the age of a call says nothing about its end.
    "exponential": ToolShape((Tool("call", 0.7, exponential(0.5)), Tool("search", 0.3, exponential(3.0)))),
}
