"""ContextServe's policy, as far as its behaviour is published: the calls of a step decide between three treatments."""

from __future__ import annotations

from ..jobs.job import FinishedStep
from ..jobs.speed import Speed
from .job_order import JobOrder
from .pin_times import pin_seconds

FAST_S = 3.0
"""Seconds that a fast tool's step is pinned; a tool is fast if most of its calls return within this time."""

SLOW_S = 8.0
"""Seconds; a tool is slow if few of its calls return within this time."""


class ContextServe(JobOrder):
    """Pins steps of fast tools, releases those of slow ones at once, and pins uncertain ones as Continuum does."""

    def ttl(self, step: FinishedStep, now: float) -> float:
        if step.calls is None:
            return self._tools.provisional_s
        speed = self._tools.times.speed(step.calls, fast_s=FAST_S, slow_s=SLOW_S)
        if speed is Speed.FAST:
            return FAST_S
        return 0.0 if speed is Speed.SLOW else pin_seconds(self._tools, self.pin_time, step)
