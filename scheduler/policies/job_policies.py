"""The policies for agents: steps run in the order in which their jobs arrived, and a step's KV is pinned for its job.

`JobOrder` is the part that the policies share, `pin_seconds` the rules for the length of a pin; docs/policies.md
compares the policies by simulation. Continuum follows the fork of vLLM of that name, and ContextServe its paper, as far
as their behaviour is published.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from ...radix.lease import Lease, LeaseState
from ..jobs.job import FinishedStep
from ..jobs.kept_turn import KeptTurn, Worth, worth_of
from ..jobs.speed import Speed
from ..request import Request
from .base import BasePolicy
from .policy import PinTime, PolicyTools

MAX_PIN_S = 600.0
"""Longest pin; a lease would have been broken long before."""

POSTERIOR_SHARE = 0.8
"""Share of a tool's calls that return within the time that `posterior` gives."""

FAST_S = 3.0
"""Seconds that a fast tool's step is pinned; a tool is fast if most of its calls return within this time."""

SLOW_S = 8.0
"""Seconds; a tool is slow if few of its calls return within this time."""


class JobOrder(BasePolicy):
    """Continues a job that has begun before it begins a later one: jobs end one by one, instead of all of them late.
    Requests of no job count as jobs of one step. Requests with a live pin go first, within the bounds of
    `BasePolicy`."""

    pins_steps = True
    pin_time: PinTime = "fixed"
    """Rule for the length of a pin, unless ``--pin-time`` names another."""

    def __init__(self, tools: PolicyTools) -> None:
        super().__init__(tools.fill_time)
        self._tools = tools

    def rank(self, waiting: list[Request], now: float) -> list[Request]:
        if all(request.job is None for request in waiting):
            return waiting
        return sorted(waiting, key=self.age)

    def victim(self, running: Sequence[Request], prefilling: Request | None, now: float) -> Request:
        """Among requests of the lowest priority, the step of the newest job that is not its last; failing that, the
        newest. The oldest of all is spared while there is another, so at least one request makes progress."""
        candidates = [*running, prefilling] if prefilling is not None else list(running)
        if len(candidates) > 1:
            candidates.remove(min(candidates, key=self.age))
        lowest = min(request.spec.priority for request in candidates)
        candidates = [request for request in candidates if request.spec.priority == lowest]
        return max([r for r in candidates if not r.spec.is_last_step] or candidates, key=self.age)

    def age(self, request: Request) -> tuple[float, int, int]:
        """Sort key of the order, smaller is older."""
        return job_age(request)

    def may_break_for(self, request: Request, lease: Lease, now: float) -> bool:
        """As `BasePolicy`, and also True once a step's tool has run past the time at which the policy expected it back.
        If its client or ``--conversation-ttl`` keeps the lease for longer, it outlasts evictable KV, but no newcomer
        waits for it. False for a first turn with a text that has not been parsed: its calls, which are about to be
        known, tell an agent from a one-shot."""
        kept = lease.owner
        if lease.state is LeaseState.GRANTED and isinstance(kept, KeptTurn) and kept.expected_until > -math.inf:
            if kept.expected_until < now:
                return True
            if kept.worth is Worth.FIRST_TURN:
                return False
        return super().may_break_for(request, lease, now)

    def ttl(self, step: FinishedStep, now: float) -> float:
        """A short provisional time until the calls are known; then the time for the tool."""
        if step.calls is None:
            return self._tools.provisional_s
        return pin_seconds(self._tools, self.pin_time, step)


def job_age(request: Request) -> tuple[float, int, int]:
    """Sort key, smaller is older: (arrival of its job, serial of its job, its own serial)."""
    if request.job is None:
        return request.arrival, request.serial, request.serial
    return request.job.arrival, request.job.serial, request.serial


class Continuum(JobOrder):
    """Pins every step for a fixed time, unless its tool is known to take longer."""


class ContextServe(JobOrder):
    """Pins steps of fast tools, releases those of slow ones at once, and pins uncertain ones as Continuum does."""

    def ttl(self, step: FinishedStep, now: float) -> float:
        if step.calls is None:
            return self._tools.provisional_s
        speed = self._tools.times.speed(step.calls, fast_s=FAST_S, slow_s=SLOW_S)
        if speed is Speed.FAST:
            return FAST_S
        return 0.0 if speed is Speed.SLOW else pin_seconds(self._tools, self.pin_time, step)


class Handoff(JobOrder):
    """Baton's own policy. A pin lasts until the rate at which its job may return falls to 1 / T_fill (Gittins' index,
    jobs/tool_time.py), and for T_fill while little is known of its tool. KV that only a finished job used is evicted
    first. Among the pins of jobs that are expected back, the newest job's breaks first.

    It follows from a simulation of agents (docs/policies.md): refusing newcomers does less harm than any ranking of the
    evicted KV; a pin helps only if its request also goes first; a lease that idles for longer than T_fill costs more
    than it saves; and where the host has a copy, no pin is needed.
    """

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


def pin_seconds(tools: PolicyTools, own: PinTime, step: FinishedStep) -> float:
    """Seconds for which a step is worth keeping, counted from its end, by the rule that ``--pin-time`` names. own: the
    calling policy's rule, used for ``auto``."""
    rule = own if tools.pin_time == "auto" else tools.pin_time
    return min(MAX_PIN_S, _RULES[rule](tools, step))


def _fixed(tools: PolicyTools, step: FinishedStep) -> float:
    return tools.times.fixed_ttl(step.calls, tools.pin_seconds)


def _cdf(tools: PolicyTools, step: FinishedStep) -> float:
    found = tools.times.cdf_ttl(step.calls, tools.fill_time.seconds)
    return tools.pin_seconds if found is None else found


def _gittins(tools: PolicyTools, step: FinishedStep) -> float:
    """Up to T_fill while little is known of a tool. Whatever it takes, that costs at most twice as much as pinning by
    its true time (the break-even rule of ski rental), and a few durations say little about the next one."""
    fill_s = tools.fill_time.seconds
    found = tools.times.gittins_ttl(step.calls, fill_s)
    if tools.times.may_return(step.calls, fill_s):
        return max(fill_s, found or 0.0)
    return tools.pin_seconds if found is None else found


def _posterior(tools: PolicyTools, step: FinishedStep) -> float:
    """Pins only if most calls return before keeping the KV costs more than it saves."""
    seconds = tools.times.posterior_ttl(step.calls, POSTERIOR_SHARE)
    return seconds if seconds <= tools.fill_time.seconds else 0.0


def _thompson(tools: PolicyTools, step: FinishedStep) -> float:
    seconds = tools.times.drawn_ttl(step.calls)
    return seconds if seconds <= tools.fill_time.seconds else 0.0


_RULES: dict[str, Callable[[PolicyTools, FinishedStep], float]] = {
    "fixed": _fixed,
    "cdf": _cdf,
    "posterior": _posterior,
    "thompson": _thompson,
    "gittins": _gittins,
}
