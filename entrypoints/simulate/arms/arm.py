"""What a study compares, by name: POLICY[@TIME][+pin][+chat][+plain][+host]."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple, get_args

from ....scheduler.policies.registry import POLICIES
from ....scheduler.policies.tools import PinTime
from .variants import VARIANTS

Sender = Literal["generate", "chat", "plain"]
"""How a job's turns are sent: by /generate with its job_id; as chats with its job_id; as plain chats, without one."""

EXTRAS = ("pin", "chat", "plain", "host")

LMCACHE_LIKE = "lmcache-like"
"""fcfs with a host tier, as vLLM runs with LMCache: the name under which studies compare it."""


class Arm(NamedTuple):
    """What is compared: a policy, or a variant of one, and how it is used."""

    policy: str
    variant: str
    """Of variants.py; "" for none."""
    settings: dict[str, Any]
    """Of the scheduler: how it chooses the time of a pin."""
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
    if {"chat", "plain"} <= set(extras):
        raise ValueError(f"{name!r}: a chat either names its job (+chat) or does not (+plain)")
    settings = _pin_time(name, time) if at else {}
    variant = policy if policy in VARIANTS else ""
    return Arm(
        "handoff" if variant else "fcfs" if policy == LMCACHE_LIKE else policy,
        variant,
        settings,
        "pin" in extras,
        "host" in extras or policy == LMCACHE_LIKE,
        "chat" if "chat" in extras else "plain" if "plain" in extras else "generate",
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
    """Every policy, fcfs also with pins; with a host tier if there is one."""
    arms = ["fcfs", "fcfs+pin", *(name for name in POLICIES if name != "fcfs")]
    return [*arms, *(f"{name}+host" for name in POLICIES)] if with_host else arms
