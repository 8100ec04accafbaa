"""How far a burst goes: as many decode steps as pass before the scheduler would decide anything else."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .cost_model import StepCost, StepSize


class Ahead(NamedTuple):
    """What is to come for a row."""

    tokens: int
    """Until its turn ends."""
    context: int
    """That its next token looks at, itself included."""
    away_s: float
    """How long its job is away then."""


def last_together(
    rows: Sequence[Ahead], cost: StepCost, now: float, horizon: float, most: int, waiting: bool
) -> list[float]:
    """When each of the coming decode steps ends, up to the last that can be taken together with the others.

    horizon: when something is known to happen. waiting: somebody wants in, so the first row that ends matters; else a
    row that ends only leaves the rest of the steps to the others.
    """
    ending = sorted(row for row in rows if row.tokens <= most)
    count, context, first = len(rows), sum(row.context for row in rows), 0
    ends: list[float] = []
    clock = now
    while count and len(ends) < most and clock < horizon:
        clock += cost.step_s(StepSize(0, count, context, context))
        ends.append(clock)
        done = len(ends)
        while first < len(ending) and ending[first].tokens == done:
            context -= ending[first].context + done - 1
            count -= 1
            horizon = now if waiting else min(horizon, clock + ending[first].away_s)
            first += 1
        context += count
    return ends
