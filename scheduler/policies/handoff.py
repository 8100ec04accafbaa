"""Baton's own policy for agents: pins that are worth what they cost, jobs in order, and nothing kept for the dead.

It rests on what a simulation of agents showed (docs/policies.md): newcomers that are not admitted do less harm than
anything that ranks what is evicted; a pin needs the right to go first with it; what idles for longer than T_fill costs
more than it saves; and where the host has a copy, no pin is needed.
"""

from __future__ import annotations

from ...radix.lease import Lease, LeaseState
from ..jobs.job import FinishedStep, Job
from .job_order import JobOrder


class Handoff(JobOrder):
    """A pin lasts until the rate at which its job may come back falls to 1 / T_fill (Gittins' index, jobs/ttl.py). What
    a finished job alone had in the cache goes first. Pins break newest job first."""

    pin_time = "gittins"
    retires_jobs = True

    def ttl(self, step: FinishedStep, now: float) -> float:
        return 0.0 if step.has_copy else super().ttl(step, now)

    def lease_value(self, lease: Lease, now: float) -> tuple[float, ...]:
        """Of those that nobody has come back for, the newest job's breaks first."""
        claimed = lease.state is LeaseState.CLAIMED
        began = lease.owner.arrival if isinstance(lease.owner, Job) else lease.idle_since
        return claimed, -began, -lease.serial
