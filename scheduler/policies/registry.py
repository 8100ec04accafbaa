"""The policies by name: what ``--schedule-policy`` takes."""

from __future__ import annotations

from collections.abc import Callable

from ...radix.cache import RadixCache
from .fcfs import FirstComeFirstServed
from .lpm import LongestPrefixMatch
from .policy import SchedulePolicy

POLICIES: dict[str, Callable[[RadixCache], SchedulePolicy]] = {
    "fcfs": lambda cache: FirstComeFirstServed(),
    "lpm": LongestPrefixMatch,
}


def make_policy(name: str, cache: RadixCache) -> SchedulePolicy:
    """A policy of its own for one scheduler. Raises KeyError for a name that is not in POLICIES."""
    return POLICIES[name](cache)
