"""Why the KV of a finished turn is leased, as far as the scheduler knows: the value of its lease goes by this."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

from ...radix.lease import Lease
from .job import Job


class Worth(IntEnum):
    """How likely a turn is gone on from. A higher one outlasts a lower one."""

    FIRST_TURN = 0
    """A conversation that has not been returned to, and of which its client asked nothing: most are never."""
    ASKED_FOR = 1
    """Its client named a job, or asked for a lease."""
    RETURNED = 2
    """It went on from an earlier turn itself, or another request waits for it."""


@dataclass(slots=True, eq=False)
class KeptTurn:
    """The owner of a lease (`Lease.owner`)."""

    worth: Worth
    job: Job | None = None
    expected_until: float = -math.inf
    """Until when the policy expects its job back: while its text has not been read, and then while its tool runs. After
    a turn that called nothing, nothing is expected: a person may write again, or not."""


def job_id_of(lease: Lease) -> str | None:
    """The job that a lease is kept for, if any."""
    job = lease.owner.job if isinstance(lease.owner, KeptTurn) else None
    return job.id if job is not None else None


def worth_of(lease: Lease) -> Worth:
    """A lease that belongs to no turn has been asked for."""
    return lease.owner.worth if isinstance(lease.owner, KeptTurn) else Worth.ASKED_FOR
