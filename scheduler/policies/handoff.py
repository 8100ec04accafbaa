"""Baton's own policy for agents: pins that are worth what they cost, jobs in order, and nothing kept for the dead.

It rests on what a simulation of agents showed (docs/policies.md): newcomers that are not admitted do less harm than
anything that ranks what is evicted; a pin needs the right to go first with it; what idles for longer than T_fill costs
more than it saves; and where the host has a copy, no pin is needed.
"""

from __future__ import annotations

from ...radix.lease import Lease, LeaseState
from ..jobs.job import FinishedStep
from ..jobs.kept_turn import KeptTurn, worth_of
from .job_order import JobOrder


class Handoff(JobOrder):
    """A pin lasts until the rate at which its job may come back falls to 1 / T_fill (Gittins' index, jobs/ttl.py). What
    a finished job alone had in the cache goes first. Of the pins of jobs that are expected back, the newest job's
    breaks first."""

    pin_time = "gittins"
    retires_jobs = True

    def ttl(self, step: FinishedStep, now: float) -> float:
        return 0.0 if step.has_copy else super().ttl(step, now)

    def lease_value(self, lease: Lease, now: float) -> tuple[float, ...]:
        """As `BasePolicy`; but of equal worth those whose job is expected back come last, and of these the newest job's
        breaks first: the queue serves the oldest job first, so that it ends."""
        if lease.state is LeaseState.CLAIMED:
            return super().lease_value(lease, now)
        kept = lease.owner
        if isinstance(kept, KeptTurn) and kept.job is not None and now <= kept.expected_until:
            return 0, kept.worth, 1, -kept.job.arrival, -lease.serial
        return 0, worth_of(lease), 0, lease.idle_since
