"""The part that policies for agents share: steps of jobs come in the order in which their jobs arrived."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ...radix.lease import Lease, LeaseState
from ..jobs.job import FinishedStep
from ..jobs.kept_turn import KeptTurn
from ..request import Request
from .base import BasePolicy
from .pin_times import pin_seconds
from .tools import PinTime, PolicyTools


class JobOrder(BasePolicy):
    """A job that has begun goes on before a later one begins: jobs end one by one, instead of all of them late.
    Requests of no job count as jobs of one step. Those whose pin still holds go first (`BasePolicy`), within its
    bounds."""

    pin_time: PinTime = "fixed"
    """How it chooses the time of a pin, unless ``--pin-time`` says otherwise."""

    def __init__(self, tools: PolicyTools) -> None:
        super().__init__(tools.fill_time)
        self._tools = tools

    def rank(self, waiting: list[Request], now: float) -> list[Request]:
        if all(request.job is None for request in waiting):
            return waiting
        return sorted(waiting, key=job_age)

    def victim(self, running: Sequence[Request], prefilling: Request | None, now: float) -> Request:
        """Of the lowest priority, the step of the newest job that is not its last; then the newest. Never the oldest
        of all while there is another: so somebody gets on."""
        candidates = [*running, prefilling] if prefilling is not None else list(running)
        if len(candidates) > 1:
            candidates.remove(min(candidates, key=job_age))
        lowest = min(request.spec.priority for request in candidates)
        candidates = [request for request in candidates if request.spec.priority == lowest]
        return max([r for r in candidates if not r.spec.is_last_step] or candidates, key=job_age)

    def may_break_for(self, request: Request, lease: Lease, now: float) -> bool:
        """As `BasePolicy`; and a step whose tool has run for longer than it is worth waiting for holds nobody up: where
        its client, or ``--conversation-ttl``, keeps it for longer, it only outlasts what is evicted."""
        kept = lease.owner
        if lease.state is LeaseState.GRANTED and isinstance(kept, KeptTurn) and -math.inf < kept.expected_until < now:
            return True
        return super().may_break_for(request, lease, now)

    def ttl(self, step: FinishedStep, now: float) -> float:
        """For a moment, until its calls are known; then by the tool."""
        if step.calls is None:
            return self._tools.provisional_s
        return pin_seconds(self._tools, self.pin_time, step)


def job_age(request: Request) -> tuple[float, int, int]:
    """When its job arrived, and itself; smaller is older."""
    if request.job is None:
        return request.arrival, request.serial, request.serial
    return request.job.arrival, request.job.serial, request.serial
