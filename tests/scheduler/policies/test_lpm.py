"""Longest prefix match."""

from __future__ import annotations

import numpy as np
import pytest

from baton.radix.cache import RadixCache
from baton.scheduler.policies.lpm import LongestPrefixMatch
from tests.doubles.cache_rig import CacheRig
from tests.doubles.policy_scene import FILL_TIME, returning_child, waiting_request


@pytest.fixture
def cache() -> RadixCache:
    """Holds the tokens 0 to 39 of the namespace ""."""
    rig = CacheRig()
    rig.insert(np.arange(40, dtype=np.int32))
    return rig.cache


def test_what_is_cached_longest_goes_first_and_arrival_breaks_ties(cache: RadixCache) -> None:
    nothing, other_salt = waiting_request(1, [7, 7]), waiting_request(2, list(range(40)), namespace="salt")
    some, most, as_much = (waiting_request(3 + i, [*range(n), 99]) for i, n in enumerate((10, 30, 30)))
    queue = [nothing, other_salt, some, most, as_much]
    assert LongestPrefixMatch(cache, FILL_TIME).order(queue, 0.0) == [most, as_much, some, nothing, other_salt]


def test_children_with_a_lease_go_before_any_match(cache: RadixCache) -> None:
    child, match = returning_child(2), waiting_request(1, list(range(40)))
    assert LongestPrefixMatch(cache, FILL_TIME).order([match, child], 0.0) == [child, match]


@pytest.mark.parametrize(("more", "is_ranked"), [(0, True), (1, False)])
def test_a_long_queue_is_served_in_order_of_arrival(cache: RadixCache, more: int, is_ranked: bool) -> None:
    policy = LongestPrefixMatch(cache, FILL_TIME)
    queue = [waiting_request(number) for number in range(policy.max_queue - 1 + more)]
    queue.append(match := waiting_request(1000, list(range(40))))
    assert (policy.order(queue, 0.0)[0] is match) is is_ranked
