"""The part that policies for agents share: steps of jobs come in the order in which their jobs arrived."""

from __future__ import annotations

from ..request import Request
from .base import BasePolicy


class JobOrder(BasePolicy):
    """A job that has begun goes on before a later one begins, which ends jobs one by one instead of all of them late.
    Requests of no job count as jobs of one step. Those whose pin still holds go first (`BasePolicy`), within its
    bounds."""

    def rank(self, waiting: list[Request], now: float) -> list[Request]:
        if all(request.job is None for request in waiting):
            return waiting
        return sorted(waiting, key=job_age)


def job_age(request: Request) -> tuple[float, int]:
    """When its job arrived; smaller is older."""
    if request.job is None:
        return request.arrival, request.serial
    return request.job.arrival, request.job.serial
