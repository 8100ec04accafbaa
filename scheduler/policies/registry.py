"""The policies by name, as ``--schedule-policy`` takes them."""

from __future__ import annotations

from collections.abc import Callable

from .auto import Auto
from .job_policies import ContextServe, Continuum, Handoff
from .policy import PolicyTools, SchedulePolicy
from .request_policies import DepthFirstByWeight, FirstComeFirstServed, LongestPrefixMatch, RandomOrder

POLICIES: dict[str, Callable[[PolicyTools], SchedulePolicy]] = {
    "auto": Auto,
    "fcfs": lambda tools: FirstComeFirstServed(tools.fill_time),
    "lpm": lambda tools: LongestPrefixMatch(tools.cache, tools.fill_time),
    "dfs-weight": lambda tools: DepthFirstByWeight(tools.cache, tools.fill_time),
    "random": lambda tools: RandomOrder(tools.fill_time),
    "handoff": Handoff,
    "continuum": Continuum,
    "context-serve": ContextServe,
}

PINNING = ("auto", "handoff", "continuum", "context-serve")
"""Policies that keep a job's KV while its tool runs."""


def make_policy(name: str, tools: PolicyTools) -> SchedulePolicy:
    """Make a new policy for one scheduler. Raises KeyError for a name that is not in POLICIES."""
    return POLICIES[name](tools)
