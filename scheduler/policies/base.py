"""The part that all policies share; each adds its `rank`, and overrides what it does differently."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ...radix.lease import Lease, LeaseState
from ..request import Request


class BasePolicy(ABC):
    """A higher priority goes first; among equals children return first, and the newest gives way. Leases hold until
    nothing else runs."""

    min_shared_tokens = 32
    max_deferred = 256
    max_passes = 32
    """How often children with a lease may pass the head of the queue before its turn comes."""

    def __init__(self) -> None:
        self._head: Request | None = None
        """The first waiting request without a lease; children have passed it ``_passes`` times."""
        self._passes = 0

    @abstractmethod
    def rank(self, waiting: list[Request], now: float) -> list[Request]:
        """The order of the queue if nobody had a lease or a priority; as `SchedulePolicy.order`."""

    def order(self, waiting: list[Request], now: float) -> list[Request]:
        """As ranked, but a higher priority comes first, and among equals children for which a lease waits: they cost
        little and free the lease. No more than ``max_passes`` of them pass the same request."""
        ranked = self.rank(waiting, now)
        prioritized = any(request.spec.priority for request in ranked)
        if prioritized:
            ranked = sorted(ranked, key=_by_priority)
        plain = [request for request in ranked if not request.has_claim]
        if len(plain) == len(ranked):
            return ranked
        if plain and plain[0] is not self._head:
            self._head, self._passes = plain[0], 0
        if self._passes >= self.max_passes:
            return ranked
        order = [request for request in ranked if request.has_claim] + plain
        return sorted(order, key=_by_priority) if prioritized else order

    def admitted(self, request: Request, now: float) -> None:
        """Count a child that arrived after the head of the queue and goes before it."""
        if self._head is not None and request.inheritance is not None:
            self._passes += request.serial > self._head.serial

    def victim(self, running: Sequence[Request], prefilling: Request | None, now: float) -> Request:
        """Among the lowest priority, the prompt that is partly computed, else the request that arrived last. So the
        oldest request of the highest priority always gets on."""
        newest = max(running, key=lambda request: (-request.spec.priority, request.arrival, request.serial))
        if prefilling is not None and prefilling.spec.priority <= newest.spec.priority:
            return prefilling
        return newest

    def lease_value(self, lease: Lease, now: float) -> tuple[float, ...]:
        """Granted leases break first, in order of their deadlines; then claimed ones, the newest first."""
        if lease.state is LeaseState.CLAIMED:
            return 1, -lease.serial
        return 0, lease.deadline

    def may_break_for(self, request: Request, lease: Lease, now: float) -> bool:
        """Never: a newcomer would be let in at the cost of somebody who is about to return."""
        return False


def _by_priority(request: Request) -> int:
    return -request.spec.priority
