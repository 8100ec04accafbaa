"""Continuum's policy: pin a step's KV for as long as its tool may take, and let jobs go on in order of their arrival.

After the fork of vLLM of that name, as far as its behaviour is published.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..jobs.job import FinishedStep
from ..request import Request
from .job_order import JobOrder, job_age

FIXED_TTL_S = 2.0


class Continuum(JobOrder):
    """A fixed time for every tool. Who gives way: the newest job that is not in its last step, then the newest."""

    def ttl(self, step: FinishedStep, now: float) -> float:
        return FIXED_TTL_S

    def victim(self, running: Sequence[Request], prefilling: Request | None, now: float) -> Request:
        candidates = [*running, prefilling] if prefilling is not None else list(running)
        if len(candidates) > 1:
            candidates.remove(min(candidates, key=job_age))  # somebody must get on
        lowest = min(request.spec.priority for request in candidates)
        candidates = [request for request in candidates if request.spec.priority == lowest]
        return max([r for r in candidates if not r.spec.is_last_step] or candidates, key=job_age)
