"""What a study compares, by name: POLICY[@TIME][+pin][+host]."""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

from ....scheduler.policies.registry import NEEDS_HOST_TIER, POLICIES
from ....scheduler.policies.tools import PinTime
from .variants import VARIANTS


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


def arm_named(name: str) -> Arm:
    """Raises ValueError."""
    timed, *extras = name.split("+")
    policy, at, time = timed.partition("@")
    if policy not in (*POLICIES, *VARIANTS) or set(extras) - {"pin", "host"}:
        known = ", ".join((*POLICIES, *VARIANTS))
        raise ValueError(f"{name!r} is not POLICY[@TIME][+pin][+host] with a policy among {known}")
    settings = _pin_time(name, time) if at else {}
    variant = policy if policy in VARIANTS else ""
    return Arm(
        "handoff" if variant else policy,
        variant,
        settings,
        "pin" in extras,
        "host" in extras or policy in NEEDS_HOST_TIER,
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
    plain = [name for name in POLICIES if name not in NEEDS_HOST_TIER]
    arms = ["fcfs", "fcfs+pin", *(name for name in plain if name != "fcfs")]
    if with_host:
        arms += [*(name for name in POLICIES if name in NEEDS_HOST_TIER), *(f"{name}+host" for name in plain)]
    return arms
