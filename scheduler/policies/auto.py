"""Handoff with bounded patience, for clients that name their jobs and for clients that do not."""

from __future__ import annotations

from collections import deque

from ..request import Request
from .job_policies import Handoff, job_age
from .policy import PolicyTools

LEAST_PATIENCE = 0.5
"""The least patience, as a share of T_fill; it holds where requests hardly wait."""

RECENT = 128
"""Admissions over which the mean wait is taken."""

MAX_RANKED = 512
"""Waiting requests, the first to arrive, that are ranked in a step; the others keep their order of arrival."""


class Auto(Handoff):
    """Handoff, except that no request waits for much longer than it would in order of arrival.

    Steps of older jobs go first, as with Handoff, until a request has waited as long as requests do on average of late.
    From then on, only requests that arrived before it, and children with a lease, go first. The mean wait hardly
    depends on the order; in order of arrival the longest waits are about twice the mean in overload, and several times
    the mean below it. So they do not grow, and most jobs still end before later ones begin.

    Handoff's order alone triples the 99th percentile of the time to a first token in overload (docs/policies.md).
    """

    def __init__(self, tools: PolicyTools) -> None:
        super().__init__(tools)
        self._waits: deque[float] = deque(maxlen=RECENT)
        """Seconds from arrival to admission of the requests admitted last."""

    @property
    def patience_s(self) -> float:
        """Seconds for which a request may be overtaken by later steps of older jobs."""
        mean = sum(self._waits) / len(self._waits) if self._waits else 0.0
        return max(mean, LEAST_PATIENCE * self._tools.fill_time.seconds)

    def rank(self, waiting: list[Request], now: float) -> list[Request]:
        if all(request.job is None for request in waiting):
            return waiting
        first, since = waiting[:MAX_RANKED], now - self.patience_s
        overdue = [request for request in first if request.arrival < since]
        patient = [request for request in first if request.arrival >= since]
        return [*overdue, *sorted(patient, key=job_age), *waiting[MAX_RANKED:]]

    def note_admission(self, request: Request, now: float) -> None:
        super().note_admission(request, now)
        if not request.retractions:  # a retracted request has not waited since its arrival
            self._waits.append(max(0.0, now - request.arrival))
