"""Depth first, by weight."""

from __future__ import annotations

import numpy as np
import pytest

from baton.radix.cache import RadixCache
from baton.scheduler.policies.dfs_weight import DepthFirstByWeight
from baton.scheduler.request import Request
from tests.doubles.cache_rig import CacheRig
from tests.doubles.policy_scene import FILL_TIME, returning_child, waiting_request

STEM, LEFT, RIGHT, OTHER = [1] * 8, [2] * 4, [3] * 4, [9] * 8


@pytest.fixture
def cache() -> RadixCache:
    """STEM with the branches LEFT and RIGHT, and OTHER."""
    rig = CacheRig()
    for ids in (STEM + LEFT, STEM + RIGHT, OTHER):
        rig.insert(np.array(ids, dtype=np.int32))
    return rig.cache


def ordered(cache: RadixCache, prompts: list[list[int]]) -> list[int]:
    queue = [waiting_request(number, [*ids, 99]) for number, ids in enumerate(prompts)]
    return [request.serial for request in DepthFirstByWeight(cache, FILL_TIME).order(queue, 0.0)]


def test_the_heaviest_branch_goes_first_and_whole(cache: RadixCache) -> None:
    prompts = [[7], OTHER, STEM + LEFT, STEM + RIGHT, OTHER, STEM + RIGHT]
    assert ordered(cache, prompts) == [3, 5, 2, 1, 4, 0]


def test_who_ends_at_a_stem_comes_after_its_branches(cache: RadixCache) -> None:
    assert ordered(cache, [STEM, STEM + LEFT, OTHER]) == [1, 0, 2]


def test_equal_branches_go_by_first_arrival(cache: RadixCache) -> None:
    assert ordered(cache, [OTHER, STEM + RIGHT, STEM + LEFT, OTHER]) == [0, 3, 1, 2]


def test_part_of_a_node_is_company_too_and_other_namespaces_are_none(cache: RadixCache) -> None:
    queue = [waiting_request(0, OTHER, namespace="salt"), waiting_request(1, [*OTHER[:4], 5])]
    queue += [waiting_request(2, [*STEM, 5]), waiting_request(3, [*OTHER[:3], 6])]
    policy = DepthFirstByWeight(cache, FILL_TIME)
    assert [request.serial for request in policy.order(queue, 0.0)] == [1, 3, 2, 0]


def test_it_changes_nothing_in_the_cache(cache: RadixCache) -> None:
    before = [(node.serial, node.last_access) for node in cache.tree.nodes()]
    ordered(cache, [STEM[:3], OTHER[:5], STEM + LEFT[:2]])
    assert [(node.serial, node.last_access) for node in cache.tree.nodes()] == before


def test_children_with_a_lease_go_first(cache: RadixCache) -> None:
    child, queue = returning_child(5), [waiting_request(number, STEM) for number in range(3)]
    assert DepthFirstByWeight(cache, FILL_TIME).order([*queue, child], 0.0)[0] is child


@pytest.mark.parametrize(("more", "is_ranked"), [(0, True), (1, False)])
def test_a_long_queue_is_served_in_order_of_arrival(cache: RadixCache, more: int, is_ranked: bool) -> None:
    policy = DepthFirstByWeight(cache, FILL_TIME)
    queue = [waiting_request(number, [50]) for number in range(policy.max_queue - 1 + more)]
    queue.append(match := waiting_request(1000, STEM))
    assert (policy.order(queue, 0.0)[0] is match) is is_ranked


def test_who_waits_alone_gets_a_turn_though_company_never_ends(cache: RadixCache) -> None:
    policy, alone = DepthFirstByWeight(cache, FILL_TIME), waiting_request(0, [7])
    served: list[Request] = []
    while alone not in served:
        newcomers = [waiting_request(2 * len(served) + more, STEM) for more in (1, 2)]
        first = policy.order([alone, *newcomers], 0.0)[0]
        policy.admitted(first, 0.0)
        served.append(first)
        assert len(served) <= policy.max_overtakes + 1
    assert len(served) == policy.max_overtakes + 1
