"""Handoff with bounded patience, for clients that name their jobs and for clients that do not."""

from __future__ import annotations

from collections import deque

from ..request import Request
from .job_policies import Handoff
from .policy import PolicyTools

LEAST_PATIENCE = 0.5
"""The least patience, as a share of T_fill; it holds where requests hardly wait."""

SLACK = 2.0
"""Patience, as a multiple of the longest recent wait in order of arrival."""

RECENT = 128
"""Admissions over which that wait is taken."""

MAX_RANKED = 512
"""Waiting requests, the first to arrive, that are ranked in a step; the others keep their order of arrival."""


class Auto(Handoff):
    """Handoff, except that no request waits for much longer than it would in order of arrival.

    Steps of older work go first, until a request has waited `SLACK` times as long as the longest wait of late would
    have been in order of arrival. From then on, only requests that arrived before it, and children with a lease, go
    first. So the longest waits stay about what they are under fcfs, where more is computed again and the queue is
    longer, and most work still ends before later work begins.

    What the waits would have been is known without trying: in order of arrival, the k-th admission admits the k-th
    request to arrive.

    Work is what an agent does from its user's message to its answer. With Handoff it is the whole job; but people who
    talk read each answer, and would rather wait a little for all of them than long for the first.

    Handoff's order alone triples the 99th percentile of the time to a first token in overload (docs/policies.md).
    """

    def __init__(self, tools: PolicyTools) -> None:
        super().__init__(tools)
        self._in_turn: deque[float] = deque()
        """Arrivals of the requests that would wait now in order of arrival, as many as do wait."""
        self._last_seen = -1
        """Serial of the last request that was put there."""
        self._waits = LongestOfLast(RECENT)
        """Seconds that the admissions of late would have waited."""

    @property
    def patience_s(self) -> float:
        """Seconds for which a request may be overtaken by later steps of older jobs."""
        return max(SLACK * self._waits.longest, LEAST_PATIENCE * self._tools.fill_time.seconds)

    def order(self, waiting: list[Request], now: float) -> list[Request]:
        self._note_waiting(waiting)
        return super().order(waiting, now)

    def age(self, request: Request) -> tuple[float, int, int]:
        """(arrival of the request that its job's present work began with, its serial, its own serial)"""
        if request.job is None:
            return request.arrival, request.serial, request.serial
        return *request.job.asked, request.serial

    def rank(self, waiting: list[Request], now: float) -> list[Request]:
        if all(request.job is None for request in waiting):
            return waiting
        first, since = waiting[:MAX_RANKED], now - self.patience_s
        overdue = [request for request in first if request.arrival < since]
        patient = [request for request in first if request.arrival >= since]
        return [*overdue, *sorted(patient, key=self.age), *waiting[MAX_RANKED:]]

    def _note_waiting(self, waiting: list[Request]) -> None:
        """waiting: in order of arrival."""
        news = len(waiting)
        while news and waiting[news - 1].serial > self._last_seen:
            news -= 1
        self._in_turn.extend(request.arrival for request in waiting[news:])
        if news < len(waiting):
            self._last_seen = waiting[-1].serial
        while len(self._in_turn) > len(waiting):  # some were aborted; an arrival that is kept would seem to wait on
            self._in_turn.popleft()

    def note_admission(self, request: Request, now: float) -> None:
        super().note_admission(request, now)
        if self._in_turn and not request.retractions:  # one that was retracted has been admitted before
            self._waits.add_number(max(0.0, now - self._in_turn.popleft()))


class LongestOfLast:
    """The greatest of the last ``size`` numbers, in constant time on average."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._added = 0
        self._falling: deque[tuple[int, float]] = deque()
        """(number of the addition, number) of those that are greater than all later ones."""

    @property
    def longest(self) -> float:
        return self._falling[0][1] if self._falling else 0.0

    def add_number(self, number: float) -> None:
        while self._falling and self._falling[-1][1] <= number:
            self._falling.pop()
        self._falling.append((self._added, number))
        self._added += 1
        if self._falling[0][0] <= self._added - 1 - self._size:
            self._falling.popleft()
