"""The one home of scheduling policy: who goes first, who waits for whom, and who gives way when memory runs out.

Admission, decoding, retraction and the lease table ask; they decide nothing of this themselves. A policy sees requests
(arrival, inheritance, how often retracted), leases and the time, and answers. It changes nothing but its own notes.
``now`` is the scheduler's clock in seconds, the same for a whole turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ...radix.lease import Lease
from ..jobs.job import FinishedStep
from ..request import Request


class SchedulePolicy(Protocol):
    """To add one: a class in a file of its own, usually on `BasePolicy`, and a line in registry.py."""

    min_shared_tokens: int
    """A request waits for a prompt that the coming step computes if that saves it at least this many tokens."""

    max_deferred: int
    """At most this many requests of a turn may wait like that and be passed by others; then admission stops."""

    retires_jobs: bool
    """Once a job is over, what only it has in the cache is evicted before all else."""

    def order(self, waiting: list[Request], now: float) -> list[Request]:
        """The order in which admission tries the waiting requests: all of them, each once.

        ``waiting`` is in order of arrival, a retracted request in its old place, and must not be changed; it may be
        returned as it is. Admission stops at the first request that does not fit, so whoever is put in front of
        others can hold them up, and whoever is always put behind others starves: a policy that lets some pass has
        to bound it (`BasePolicy` does).
        """
        ...

    @property
    def overdue(self) -> Request | None:
        """A waiting request that has been passed as often as may be, as of the last `order`. It stands first there, and
        does not wait for a prefix that others compute."""
        ...

    def admitted(self, request: Request, now: float) -> None:
        """``request`` has been admitted and is about to leave the queue; ``order`` may want to count that."""
        ...

    def victim(self, running: Sequence[Request], prefilling: Request | None, now: float) -> Request:
        """Who is retracted when a decode step finds no memory: one of ``running``, or ``prefilling``, whose prompt is
        partly computed.

        Called again until the rest fits. ``running`` is not empty. Somebody must always get on: two requests must
        never be able to retract each other in turns, so the oldest is spared.
        """
        ...

    def lease_value(self, lease: Lease, now: float) -> tuple[float, ...]:
        """The value of a live lease: the lowest value breaks first when memory is needed, of equal ones the lease that
        was granted first. As time passes the value may rise; it falls only where the lease itself changes."""
        ...

    def may_break_for(self, request: Request, lease: Lease, now: float) -> bool:
        """May ``lease``, the least valuable there is, break so that ``request`` is admitted beside those that run?

        Asked only while something else runs. A request that would run alone has any lease broken for it, and so has
        a running one that needs a slot: no policy can keep the last request out.
        """
        ...

    def ttl(self, step: FinishedStep, now: float) -> float:
        """For how many seconds after its end (``step.ended``) a step's KV stays pinned for the job's next step; 0 lets
        it go.

        Asked when the step ends, before its text has been read (``step.calls`` is None), and again once its calls are
        known. Not asked for a job's last step, nor for beam searches.
        """
        ...
