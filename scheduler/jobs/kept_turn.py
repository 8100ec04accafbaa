"""Why the KV of a finished turn is leased, as far as the scheduler knows: this determines the value of its lease."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

from ...radix.lease import Lease
from .job import Job


class Worth(IntEnum):
    """How likely a turn is to be continued. A higher worth outlasts a lower one."""

    FIRST_TURN = 0
    """The first turn of a conversation, without a lease or job from the client: most are never continued. A turn that
    has been away for so long that its return is no likelier counts the same."""
    ASKED_FOR = 1
    """The client named a job, or asked for a lease; or a first turn called a tool, or its client continues most of
    them."""
    RETURNED = 2
    """The turn continued an earlier one, or another request waits for it."""


@dataclass(slots=True, eq=False)
class KeptTurn:
    """The owner of a lease (`Lease.owner`)."""

    worth: Worth
    job: Job | None = None
    expected_until: float = -math.inf
    """Time until which the policy expects its job back: while its text has not been parsed, and then while its tool
    runs. A turn that called nothing sets no such time: its user may or may not write again."""
    falls_at: float = math.inf
    """Time from which its return is no likelier than that of a first turn, so that it is worth no more; never for a
    lease that a client asked for."""


def job_id_of(lease: Lease) -> str | None:
    """The job that a lease is kept for, if any."""
    job = lease.owner.job if isinstance(lease.owner, KeptTurn) else None
    return job.id if job is not None else None


def worth_of(lease: Lease) -> Worth:
    """The worth of a lease. One that belongs to no turn counts as asked for."""
    return lease.owner.worth if isinstance(lease.owner, KeptTurn) else Worth.ASKED_FOR


def has_share(lease: Lease) -> bool:
    """False for a first turn that no client asked to keep: it takes no other client's KV for the sake of fairness."""
    return worth_of(lease) is not Worth.FIRST_TURN
