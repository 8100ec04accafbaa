"""The arms of a study, by name: POLICY[@TIME][+pin][+chat][+plain][+bare][+host].

POLICY is a policy of the server, or one that exists only here: handoff that knows the future, handoff without one of
its parts, other readings of Continuum, and `LMCACHE_LIKE`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

from ...scheduler.jobs.job import FinishedStep
from ...scheduler.policies.base import BasePolicy
from ...scheduler.policies.job_policies import MAX_PIN_S, Continuum, Handoff
from ...scheduler.policies.policy import PinTime, PolicyTools, SchedulePolicy
from ...scheduler.policies.registry import POLICIES
from ...scheduler.request import Request

Sender = Literal["generate", "chat", "plain", "bare"]
"""How a job's turns are sent: by /generate with its job_id; as chats with its job_id; as plain chats, without one; by
/generate with nothing but the prompt."""

SENDERS: tuple[Sender, ...] = ("chat", "plain", "bare")
"""Parts of an arm's name that choose its sender."""

EXTRAS = ("pin", *SENDERS, "host")

LMCACHE_LIKE = "lmcache-like"
"""fcfs with a host tier, as vLLM runs with LMCache: the name under which studies compare it."""

AwayTimes = Mapping[str, float]
"""Seconds from the end of a turn to the job's next one, by the turn's rid."""

SLACK_S = 5.0
"""An oracle's pin outlasts the return by this, since a step may be running at that moment."""


# -- policies that only a simulation has -------------------------------------------------------------------------------


class Oracle(Handoff):
    """Handoff that knows when each job returns: it pins a turn until then if that is within T_fill, else not at all."""

    def __init__(self, tools: PolicyTools, away: AwayTimes) -> None:
        super().__init__(tools)
        self._away = away

    def ttl(self, step: FinishedStep, now: float) -> float:
        if step.has_copy:
            return 0.0
        away_s = self._away[step.rid]
        return away_s + SLACK_S if away_s <= self._tools.fill_time.seconds else 0.0


class NoPins(Handoff):
    """Handoff that pins nothing while a tool runs."""

    def ttl(self, step: FinishedStep, now: float) -> float:
        return 0.0


class NoOrder(Handoff):
    """Handoff that serves steps first come, first served."""

    def rank(self, waiting: list[Request], now: float) -> list[Request]:
        return waiting

    def victim(self, running: Sequence[Request], prefilling: Request | None, now: float) -> Request:
        return BasePolicy.victim(self, running, prefilling, now)


class NoRetire(Handoff):
    """Handoff that does not evict finished jobs first."""

    retires_jobs = False


class ContinuumAlways(Continuum):
    """Continuum that pins every step for the fixed time, tools that take longer included."""

    def ttl(self, step: FinishedStep, now: float) -> float:
        if step.calls is None or self._tools.pin_time not in ("auto", "fixed"):
            return super().ttl(step, now)
        return min(MAX_PIN_S, self._tools.pin_seconds)


class ContinuumFreeing(Continuum):
    """Continuum that evicts the KV of finished jobs first."""

    retires_jobs = True


class ContinuumAlwaysFreeing(ContinuumAlways):
    """Both: every step is pinned, and the KV of finished jobs is evicted first."""

    retires_jobs = True


class Variant(NamedTuple):
    policy: str
    """The policy of the server that it varies."""
    make: Callable[[PolicyTools, AwayTimes], SchedulePolicy]


VARIANTS = {
    "oracle": Variant("handoff", Oracle),
    "handoff-no-pins": Variant("handoff", lambda tools, away: NoPins(tools)),
    "handoff-no-order": Variant("handoff", lambda tools, away: NoOrder(tools)),
    "handoff-no-retire": Variant("handoff", lambda tools, away: NoRetire(tools)),
    "continuum-always": Variant("continuum", lambda tools, away: ContinuumAlways(tools)),
    "continuum-freeing": Variant("continuum", lambda tools, away: ContinuumFreeing(tools)),
    "continuum-always-freeing": Variant("continuum", lambda tools, away: ContinuumAlwaysFreeing(tools)),
}


# -- arms --------------------------------------------------------------------------------------------------------------


class Arm(NamedTuple):
    """One arm: a policy or a variant of one, and how it is used."""

    policy: str
    variant: str
    """A name in `VARIANTS`; "" for none."""
    settings: dict[str, Any]
    """Scheduler settings that choose the time of a pin."""
    pins: bool
    """Turns ask for a lease (retain_ttl), as clients of any policy may."""
    host: bool
    """There is a host tier."""
    sender: Sender = "generate"


def arm_named(name: str) -> Arm:
    """Raises ValueError."""
    timed, *extras = name.split("+")
    policy, at, time = timed.partition("@")
    names = (*POLICIES, *VARIANTS, LMCACHE_LIKE)
    if policy not in names or set(extras) - set(EXTRAS):
        known, extra = ", ".join(names), "".join(f"[+{extra}]" for extra in EXTRAS)
        raise ValueError(f"{name!r} is not POLICY[@TIME]{extra} with a policy among {known}")
    senders: list[Sender] = [extra for extra in SENDERS if extra in extras]
    if len(senders) > 1:
        raise ValueError(f"{name!r}: turns are sent in one way only; keep one of +{', +'.join(senders)}")
    variant = policy if policy in VARIANTS else ""
    return Arm(
        policy=VARIANTS[variant].policy if variant else "fcfs" if policy == LMCACHE_LIKE else policy,
        variant=variant,
        settings=_pin_time(name, time) if at else {},
        pins="pin" in extras,
        host="host" in extras or policy == LMCACHE_LIKE,
        sender=senders[0] if senders else "generate",
    )


def _pin_time(name: str, time: str) -> dict[str, Any]:
    if time in get_args(PinTime):
        return {"pin_time": time}
    try:
        seconds = float(time)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        rules = ", ".join(get_args(PinTime))
        raise ValueError(f"{name!r}: {time!r} is neither a number of seconds nor a rule among {rules}")
    return {"pin_time": "fixed", "pin_seconds": seconds}


def all_arms(with_host: bool) -> list[str]:
    """Every policy of the server, fcfs also with pins; with_host: each of them with a host tier, too."""
    arms = ["fcfs", "fcfs+pin", *(name for name in POLICIES if name != "fcfs")]
    return [*arms, *(f"{name}+host" for name in POLICIES)] if with_host else arms
