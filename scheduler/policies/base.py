"""The part that all policies share; each adds its `rank`, and overrides what it does differently."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from ...radix.lease import Lease, LeaseState
from ..jobs.job import FinishedStep
from ..jobs.kept_turn import Worth, worth_of
from ..request import Request
from .fill_time import FillTime


@dataclass(slots=True, eq=False)
class _Overtaken:
    """A waiting request, and the number of later ones admitted since it became the oldest."""

    request: Request
    times: int = 0


class BasePolicy(ABC):
    """Higher priorities go first; among equals, children return first, and the newest request is retracted first. A
    lease that has been idle for long breaks for newcomers. No request is overtaken for ever, and the longest-waiting
    one always makes progress."""

    min_shared_tokens = 32
    max_deferred = 256
    pins_steps = False
    retires_jobs = False
    max_passes = 32
    """How often children with a lease may pass the head of the queue before its turn comes."""
    max_overtakes = 256
    """How often the oldest waiting request may be overtaken for any reason, priority too, before its turn comes."""

    def __init__(self, fill_time: FillTime) -> None:
        self._fill_time = fill_time
        self._head: Request | None = None
        """The first waiting request without a lease; children have passed it ``_passes`` times."""
        self._passes = 0
        self._overtaken: list[_Overtaken] = []
        """The oldest waiting request last. The entries before it were the oldest until an even older request came back;
        they keep their counts."""

    @abstractmethod
    def rank(self, waiting: list[Request], now: float) -> list[Request]:
        """The order of the queue without regard to leases and priorities; see `SchedulePolicy.order`."""

    def order(self, waiting: list[Request], now: float) -> list[Request]:
        """The ranked order, except that higher priorities come first and, among equals, children for which a lease
        waits: they cost little and free the lease. The oldest request comes first once it has been overtaken often
        enough."""
        if waiting and not (self._overtaken and self._overtaken[-1].request is waiting[0]):
            self._note_oldest(waiting[0])
        if len(waiting) == 1:
            return waiting
        order, overdue = self._by_wish(waiting, now), self.overdue
        if overdue is None or order[0] is overdue:
            return order
        return [overdue, *(request for request in order if request is not overdue)]

    @property
    def overdue(self) -> Request | None:
        oldest = self._overtaken[-1] if self._overtaken else None
        return oldest.request if oldest is not None and oldest.times >= self.max_overtakes else None

    def _note_oldest(self, oldest: Request) -> None:
        noted = self._overtaken
        while noted and noted[-1].request.serial < oldest.serial:
            noted.pop()  # no longer waiting
        if not noted or noted[-1].request is not oldest:
            noted.append(_Overtaken(oldest))

    def _by_wish(self, waiting: list[Request], now: float) -> list[Request]:
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

    def note_admission(self, request: Request, now: float) -> None:
        """Count this admission for each older request that it overtakes."""
        if self._head is not None and request.inheritance is not None:
            self._passes += request.serial > self._head.serial
        for noted in self._overtaken:
            noted.times += request.serial > noted.request.serial

    def victim(self, running: Sequence[Request], prefilling: Request | None, now: float) -> Request:
        """The newest request of the lowest priority. The oldest of all is spared while there is another, so at least
        one request makes progress."""
        candidates = [*running, prefilling] if prefilling is not None else list(running)
        if len(candidates) > 1:
            candidates.remove(min(candidates, key=_by_age))
        return min(candidates, key=lambda request: (request.spec.priority, -request.arrival, -request.serial))

    def lease_value(self, lease: Lease, now: float) -> tuple[float, ...]:
        """Granted leases break first: those of the lowest `Worth`, and of equal worth the longest idle one. Claimed
        leases follow, the newest first."""
        if lease.state is LeaseState.CLAIMED:
            return 1, -lease.serial
        return 0, worth_of(lease), lease.idle_since

    def may_break_for(self, request: Request, lease: Lease, now: float) -> bool:
        """True for a lease that has been idle for longer than T_fill. Breaking younger ones would admit newcomers at
        the cost of requests that are about to return, which then do the same to the next: the cache thrashes. A first
        turn that no client asked to keep may break at once, because most are never continued."""
        if lease.state is not LeaseState.GRANTED:
            return False
        return worth_of(lease) is Worth.FIRST_TURN or now - lease.idle_since > self._fill_time.seconds

    def ttl(self, step: FinishedStep, now: float) -> float:
        """0: nothing is pinned."""
        return 0.0


def _by_priority(request: Request) -> int:
    return -request.spec.priority


def _by_age(request: Request) -> tuple[float, int]:
    return request.arrival, request.serial
