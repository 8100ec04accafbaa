"""Scheduling policy: the order of requests, which of them wait for others, and what is given up when memory runs out.

Admission, decoding, retraction and the lease table call it and make none of these decisions themselves. A policy reads
requests (arrival, inheritance, how often retracted), leases and the time, and changes nothing but its own notes.
``now`` is the scheduler's clock in seconds, the same for a whole turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from ...radix.cache import RadixCache
from ...radix.lease import Lease
from ..jobs.job import FinishedStep
from ..jobs.tool_time import ToolTimes
from ..request import Request
from .fill_time import FillTime

PinTime = Literal["auto", "fixed", "cdf", "posterior", "thompson", "gittins"]
"""Rule for the length of a pin; auto: the policy's own."""


@dataclass(frozen=True, slots=True)
class PolicyTools:
    """pin_time: rule that replaces the policy's own. pin_seconds: length of a fixed pin, and of one for a tool or user
    of which a rule knows nothing. provisional_s: length of a pin until the step's calls are known. times: durations of
    tools so far."""

    cache: RadixCache
    fill_time: FillTime
    pin_time: PinTime = "auto"
    pin_seconds: float = 2.0
    provisional_s: float = 1.0
    times: ToolTimes = field(default_factory=ToolTimes)


class SchedulePolicy(Protocol):
    """To add a policy, write a class, usually on `BasePolicy` (job_policies.py: on `JobOrder`), and add a line to
    registry.py."""

    min_shared_tokens: int
    """A request waits for a prompt that the coming step computes if that saves it at least this many tokens."""

    max_deferred: int
    """At most this many requests of a turn may wait like that and be overtaken; then admission stops."""

    pins_steps: bool
    """`ttl` may be more than 0. Then every request that may be continued is a step of a job, named or not."""

    retires_jobs: bool
    """Once a job is over, KV that only this job used is evicted first."""

    def order(self, waiting: list[Request], now: float) -> list[Request]:
        """The order in which admission tries the waiting requests: all of them, each once.

        ``waiting`` is in order of arrival, a retracted request in its old place, and must not be changed; it may be
        returned as it is. Admission stops at the first request that does not fit, so a request put in front of others
        can hold them up, and one always put behind others starves: a policy that lets requests overtake must bound it
        (`BasePolicy` does).
        """
        ...

    @property
    def overdue(self) -> Request | None:
        """A waiting request that has been overtaken as often as allowed, as of the last `order`, which put it first. It
        does not wait for a prefix that others compute."""
        ...

    def note_admission(self, request: Request, now: float) -> None:
        """Note that ``request`` has been admitted and is about to leave the queue."""
        ...

    def victim(self, running: Sequence[Request], prefilling: Request | None, now: float) -> Request:
        """The request to retract when a decode step finds no memory: one of ``running``, or ``prefilling``, the one
        with a partly computed prompt.

        Called again until the rest fits. ``running`` is not empty. At least one request must always make progress: two
        requests must never be able to retract each other in turns, so the oldest is spared.
        """
        ...

    def lease_value(self, lease: Lease, now: float) -> tuple[float, ...]:
        """The value of a live lease. When memory is needed, the lease of the lowest value breaks first; of equal ones,
        the one granted first. As time passes the value may rise; it falls only where the lease itself changes."""
        ...

    def may_break_for(self, request: Request, lease: Lease, now: float) -> bool:
        """May ``lease``, the least valuable one, break so that ``request`` is admitted beside those that run?

        Called only while something else runs. Any lease breaks for a request that would run alone, and for a running
        one that needs a slot: no policy can keep the last request out.
        """
        ...

    def ttl(self, step: FinishedStep, now: float) -> float:
        """Seconds for which a step's KV stays pinned after its end (``step.ended``), for the job's next step; 0
        releases it.

        Called when the step ends, before its text has been parsed (``step.calls`` is None), and again once its calls
        are known. Not called for a job's last step, nor for beam searches.
        """
        ...
