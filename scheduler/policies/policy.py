"""Orders of the waiting queue. A policy is a plain object: waiting requests in, the same requests ordered out."""

from __future__ import annotations

from typing import Protocol

from ...radix.cache import RadixCache
from ...radix.lease import Lease, LeaseState
from ..config import PolicyName
from ..request import Request


class SchedulePolicy(Protocol):
    def order(self, waiting: list[Request]) -> list[Request]:
        """``waiting`` comes in order of arrival; returns the order in which admission tries them."""
        ...


class FirstComeFirstServed:
    """fcfs: whoever waits longest. A retracted request keeps its first arrival, so it comes back first."""

    def order(self, waiting: list[Request]) -> list[Request]:
        return waiting


class LongestPrefixMatch:
    """lpm: most cached tokens first, arrival breaks ties (SGLang's default). Long queues fall back to fcfs, since
    every order costs one tree walk per waiting request."""

    MAX_QUEUE = 128

    def __init__(self, cache: RadixCache) -> None:
        self._cache = cache

    def order(self, waiting: list[Request]) -> list[Request]:
        if len(waiting) > self.MAX_QUEUE:
            return waiting
        return sorted(waiting, key=lambda r: -self._cache.match_len(r.namespace, r.token_ids.view()))


def make_policy(name: PolicyName, cache: RadixCache) -> SchedulePolicy:
    if name == "lpm":
        return LongestPrefixMatch(cache)
    return FirstComeFirstServed()


def lease_value(lease: Lease, now: float) -> tuple[int, float]:
    """Which lease breaks first when memory is short: the one that expires first, whatever the time is; claimed ones
    only when no other is left, the youngest of them first."""
    if lease.state is LeaseState.CLAIMED:
        return 1, -lease.serial
    return 0, lease.deadline
