"""Generated jobs, by the name of a workload: Poisson arrivals, growing contexts, tools. A seed fixes the jobs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from .job import SYSTEM_STRIDE, Job, Turn, numbered
from .tool_shapes import SHAPES, ToolShape


@dataclass(frozen=True, slots=True)
class Workload:
    """The shape of a job. Values are drawn uniformly from (low, high), both included."""

    new: tuple[tuple[int, int], ...]
    """New prompt tokens of each turn; the last entry holds for all further turns."""
    output: tuple[int, int]
    turns: tuple[int, int]
    system: tuple[int, int] = (0, 0)
    """Tokens of the system prompt."""
    systems: int = 1
    """Number of different system prompts."""
    compacted: float = 0.0
    """Share of the jobs that replace their history with a summary once."""
    max_new_tokens: int = 512
    """Limit that requests ask for; outputs end long before."""
    one_shot: tuple[int, int] = (300, 900)
    """New prompt tokens of a job that ends with its first turn."""


def _grown(contexts: tuple[int, ...], output: tuple[int, int]) -> tuple[tuple[int, int], ...]:
    """(low, high) of each turn's new tokens, so that prompts have these lengths on average."""
    said = sum(output) // 2
    means = [contexts[0], *(b - a - said for a, b in pairwise(contexts))]
    return tuple((mean - mean // 2, mean + mean // 2) for mean in means)


CONTEXTS = (92, 469, 811, 1343, 1655, 2241, 2665, 2915)
"""Prompt tokens of the turns of a published agent trace."""

WORKLOADS = {
    "chats": Workload(((200, 600), (50, 350)), (60, 160), (5, 8)),
    "agents": Workload(_grown(CONTEXTS, (60, 160)), (60, 160), (8, 8), max_new_tokens=512),
    "agents-3x": Workload(
        _grown(tuple(3 * length for length in CONTEXTS), (120, 320)),
        (120, 320),
        (8, 8),
        system=(2000, 2000),
        max_new_tokens=1024,
    ),
    "coding-11": Workload(
        ((400, 1200), (1000, 2000)),
        (150, 450),
        (11, 11),
        system=(500, 4000),
        systems=4,
        compacted=0.1,
        max_new_tokens=1024,
    ),
    "coding-40": Workload(
        ((400, 1200), (1000, 2000)),
        (150, 450),
        (36, 43),
        system=(500, 15000),
        systems=4,
        compacted=0.1,
        max_new_tokens=1024,
    ),
}


def make_jobs(
    workload: Workload, tools: ToolShape, *, rate: float, count: int, seed: int, one_shots: float = 0.0
) -> list[Job]:
    """``count`` jobs that arrive at ``rate`` a second. Turns and tools do not depend on the rate: other loads get the
    same jobs, closer together. one_shots: share of the jobs that end with their first turn."""
    gaps = np.random.default_rng((seed, 0)).exponential(size=count)
    arrivals = np.cumsum(gaps) / rate
    lengths = np.random.default_rng((seed, 1)).integers(*workload.system, endpoint=True, size=workload.systems)
    jobs = []
    for number in range(count):
        rng = np.random.default_rng((seed, 2, number))
        system = int(rng.integers(workload.systems))
        turns = make_turns(workload, tools, int(lengths[system]), rng, number / count)
        if one_shots and (drawn := np.random.default_rng((seed, 3, number))).random() < one_shots:
            new = int(drawn.integers(*workload.one_shot, endpoint=True))
            turns = (Turn(turns[0].kept, new, turns[0].output),)
        jobs.append(Job(f"job{number}", float(arrivals[number]), turns, 0, system + workload.systems * seed))
    return numbered(jobs)


def make_turns(
    workload: Workload, tools: ToolShape, system: int, rng: np.random.Generator, progress: float = 0.0
) -> tuple[Turn, ...]:
    """system: tokens of the system prompt. progress: how much of the run's jobs have arrived, 0 to 1."""
    count = int(rng.integers(*workload.turns, endpoint=True))
    calls = tools.draw_job(count - 1, rng, progress)
    is_compacted = count > 2 and rng.random() < workload.compacted
    compacted_at = int(rng.integers(count // 2, count)) if is_compacted else -1
    turns: list[Turn] = []
    for number in range(count):
        low, high = workload.new[min(number, len(workload.new) - 1)]
        new, output = int(rng.integers(low, high, endpoint=True)), int(rng.integers(*workload.output, endpoint=True))
        kept = turns[-1].known if turns else system
        if number == compacted_at:
            new, kept = new + (kept - system) // 8, system  # the history, at an eighth of its length
        tool, tool_s = calls[number] if number < count - 1 else (None, 0.0)
        turns.append(Turn(kept, max(1, new), output, tool, tool_s))
    return tuple(turns)


def workload_named(name: str, scale: float = 1.0) -> Workload:
    """scale: multiplies every length except those of outputs."""
    found = WORKLOADS[name]
    if scale == 1.0:
        return found

    def scaled(bounds: tuple[int, int]) -> tuple[int, int]:
        return int(bounds[0] * scale), int(bounds[1] * scale)

    system = scaled(found.system)
    if system[1] > SYSTEM_STRIDE:
        raise ValueError(f"scaled by {scale:g}, a system prompt has {system[1]} tokens; at most {SYSTEM_STRIDE}")
    return replace(found, new=tuple(map(scaled, found.new)), system=system, one_shot=scaled(found.one_shot))


def tools_named(name: str) -> ToolShape:
    return SHAPES[name]
