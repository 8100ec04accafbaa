"""The part that policies for agents share: steps run in the order in which their jobs arrived."""

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
    """Continues a job that has begun before it begins a later one: jobs end one by one, instead of all of them late.
    Requests of no job count as jobs of one step. Requests with a live pin go first, within the bounds of
    `BasePolicy`."""

    pin_time: PinTime = "fixed"
    """Rule for the length of a pin, unless ``--pin-time`` names another."""

    def __init__(self, tools: PolicyTools) -> None:
        super().__init__(tools.fill_time)
        self._tools = tools

    def rank(self, waiting: list[Request], now: float) -> list[Request]:
        if all(request.job is None for request in waiting):
            return waiting
        return sorted(waiting, key=job_age)

    def victim(self, running: Sequence[Request], prefilling: Request | None, now: float) -> Request:
        """Among requests of the lowest priority, the step of the newest job that is not its last; failing that, the
        newest. The oldest of all is spared while there is another, so at least one request makes progress."""
        candidates = [*running, prefilling] if prefilling is not None else list(running)
        if len(candidates) > 1:
            candidates.remove(min(candidates, key=job_age))
        lowest = min(request.spec.priority for request in candidates)
        candidates = [request for request in candidates if request.spec.priority == lowest]
        return max([r for r in candidates if not r.spec.is_last_step] or candidates, key=job_age)

    def may_break_for(self, request: Request, lease: Lease, now: float) -> bool:
        """As `BasePolicy`, and also True once a step's tool has run past the time at which the policy expected it back.
        If its client or ``--conversation-ttl`` keeps the lease for longer, it outlasts evictable KV, but no newcomer
        waits for it."""
        kept = lease.owner
        if lease.state is LeaseState.GRANTED and isinstance(kept, KeptTurn) and -math.inf < kept.expected_until < now:
            return True
        return super().may_break_for(request, lease, now)

    def ttl(self, step: FinishedStep, now: float) -> float:
        """A short provisional time until the calls are known; then the time for the tool."""
        if step.calls is None:
            return self._tools.provisional_s
        return pin_seconds(self._tools, self.pin_time, step)


def job_age(request: Request) -> tuple[float, int, int]:
    """Sort key, smaller is older: (arrival of its job, serial of its job, its own serial)."""
    if request.job is None:
        return request.arrival, request.serial, request.serial
    return request.job.arrival, request.job.serial, request.serial
