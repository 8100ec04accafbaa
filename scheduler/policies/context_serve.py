"""ContextServe's policy: three ways to treat a step, by what it called. As far as its behaviour is published."""

from __future__ import annotations

from ..jobs.job import FinishedStep
from ..jobs.speed import Speed
from .job_order import JobOrder
from .pin_times import pin_seconds

FAST_S = 3.0
"""A fast tool's pin; one whose calls are mostly back within this time is fast."""

SLOW_S = 8.0
"""One that is rarely back before is slow."""


class ContextServe(JobOrder):
    """Fast tools are pinned, slow ones are let go at once, uncertain ones are pinned as Continuum does."""

    def ttl(self, step: FinishedStep, now: float) -> float:
        if step.calls is None:
            return self._tools.provisional_s
        speed = self._tools.times.speed(step.calls, fast_s=FAST_S, slow_s=SLOW_S)
        if speed is Speed.FAST:
            return FAST_S
        return 0.0 if speed is Speed.SLOW else pin_seconds(self._tools, self.pin_time, step)
