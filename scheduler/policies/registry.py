"""The policies by name, as ``--schedule-policy`` takes them."""

from __future__ import annotations

from collections.abc import Callable

from .context_serve import ContextServe
from .continuum import Continuum
from .dfs_weight import DepthFirstByWeight
from .fcfs import FirstComeFirstServed
from .handoff import Handoff
from .lpm import LongestPrefixMatch
from .policy import SchedulePolicy
from .random_order import RandomOrder
from .tools import PolicyTools

POLICIES: dict[str, Callable[[PolicyTools], SchedulePolicy]] = {
    "fcfs": lambda tools: FirstComeFirstServed(tools.fill_time),
    "lpm": lambda tools: LongestPrefixMatch(tools.cache, tools.fill_time),
    "dfs-weight": lambda tools: DepthFirstByWeight(tools.cache, tools.fill_time),
    "random": lambda tools: RandomOrder(tools.fill_time),
    "handoff": Handoff,
    "continuum": Continuum,
    "context-serve": ContextServe,
}

PINNING = ("handoff", "continuum", "context-serve")
"""Policies that keep a job's KV while its tool runs."""


def make_policy(name: str, tools: PolicyTools) -> SchedulePolicy:
    """Make a new policy for one scheduler. Raises KeyError for a name that is not in POLICIES."""
    return POLICIES[name](tools)
