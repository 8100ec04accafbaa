"""The policies by name, as ``--schedule-policy`` takes them."""

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
    """Make a new policy for one scheduler. Raises KeyError for a name that is not in POLICIES."""
    return POLICIES[name](cache)
