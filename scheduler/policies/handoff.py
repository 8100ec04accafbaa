"""Baton's own policy for agents: pins that are worth their cost, jobs in order, and no KV kept for finished jobs.

It follows from a simulation of agents (docs/policies.md): refusing newcomers does less harm than any ranking of what is
evicted; a pin helps only if its request also goes first; a lease that idles for longer than T_fill costs more than it
saves; and where the host has a copy, no pin is needed.
"""

from __future__ import annotations

from ...radix.lease import Lease, LeaseState
from ..jobs.job import FinishedStep
from ..jobs.kept_turn import KeptTurn, worth_of
from .job_order import JobOrder


class Handoff(JobOrder):
    """A pin lasts until the rate at which its job may return falls to 1 / T_fill (Gittins' index, jobs/ttl.py). KV that
    only a finished job used is evicted first. Of the pins of jobs that are expected back, the newest job's breaks
    first."""

    pin_time = "gittins"
    retires_jobs = True

    def ttl(self, step: FinishedStep, now: float) -> float:
        return 0.0 if step.has_copy else super().ttl(step, now)

    def lease_value(self, lease: Lease, now: float) -> tuple[float, ...]:
        """As `BasePolicy`, except that of equal worth the leases of jobs that are expected back break last, and of
        these the newest job's first: the queue serves the oldest job first, so that it ends."""
        if lease.state is LeaseState.CLAIMED:
            return super().lease_value(lease, now)
        kept = lease.owner
        if isinstance(kept, KeptTurn) and kept.job is not None and now <= kept.expected_until:
            return 0, kept.worth, 1, -kept.job.arrival, -lease.serial
        return 0, worth_of(lease), 0, lease.idle_since
