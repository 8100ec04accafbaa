"""The policies by name, as ``--schedule-policy`` takes them."""

from __future__ import annotations

from collections.abc import Callable

from ...radix.cache import RadixCache
from .continuum import Continuum
from .fcfs import FirstComeFirstServed
from .fill_time import FillTime
from .lpm import LongestPrefixMatch
from .policy import SchedulePolicy

POLICIES: dict[str, Callable[[RadixCache, FillTime], SchedulePolicy]] = {
    "fcfs": lambda cache, fill_time: FirstComeFirstServed(fill_time),
    "lpm": LongestPrefixMatch,
    "continuum": lambda cache, fill_time: Continuum(fill_time),
}


def make_policy(name: str, cache: RadixCache, fill_time: FillTime) -> SchedulePolicy:
    """Make a new policy for one scheduler. Raises KeyError for a name that is not in POLICIES."""
    return POLICIES[name](cache, fill_time)
