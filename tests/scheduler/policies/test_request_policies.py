"""The policies that know no jobs: their orders of the waiting requests."""

from __future__ import annotations

import numpy as np
import pytest

from baton.radix.cache import RadixCache
from baton.scheduler.policies.request_policies import DepthFirstByWeight, LongestPrefixMatch, RandomOrder
from baton.scheduler.request import Request
from tests.doubles.cache_rig import CacheRig
from tests.doubles.policy_scene import FILL_TIME, fcfs, returning_child, waiting_request


class TestFirstComeFirstServed:
    def test_fcfs_order_is_arrival_order(self) -> None:
        queue = [waiting_request(0, list(range(90))), waiting_request(1, [1]), waiting_request(2, list(range(50)))]
        assert fcfs().order(queue, 5.0) == queue


class TestLongestPrefixMatch:
    @pytest.fixture
    def cache(self) -> RadixCache:
        """Holds the tokens 0 to 39 of the namespace ""."""
        rig = CacheRig()
        rig.insert(np.arange(40, dtype=np.int32))
        return rig.cache

    def test_longest_cached_prefix_is_ordered_first_and_ties_by_arrival(self, cache: RadixCache) -> None:
        nothing, other_salt = waiting_request(1, [7, 7]), waiting_request(2, list(range(40)), namespace="salt")
        some, most, as_much = (waiting_request(3 + i, [*range(n), 99]) for i, n in enumerate((10, 30, 30)))
        queue = [nothing, other_salt, some, most, as_much]
        assert LongestPrefixMatch(cache, FILL_TIME).order(queue, 0.0) == [most, as_much, some, nothing, other_salt]

    def test_children_with_lease_precede_any_match(self, cache: RadixCache) -> None:
        child, match = returning_child(2), waiting_request(1, list(range(40)))
        assert LongestPrefixMatch(cache, FILL_TIME).order([match, child], 0.0) == [child, match]

    @pytest.mark.parametrize(("more", "is_ranked"), [(0, True), (1, False)])
    def test_long_queue_is_served_in_arrival_order(self, cache: RadixCache, more: int, is_ranked: bool) -> None:
        policy = LongestPrefixMatch(cache, FILL_TIME)
        queue = [waiting_request(number) for number in range(policy.max_queue - 1 + more)]
        queue.append(match := waiting_request(1000, list(range(40))))
        assert (policy.order(queue, 0.0)[0] is match) is is_ranked


STEM, LEFT, RIGHT, OTHER = [1] * 8, [2] * 4, [3] * 4, [9] * 8


def ordered(cache: RadixCache, prompts: list[list[int]]) -> list[int]:
    queue = [waiting_request(number, [*ids, 99]) for number, ids in enumerate(prompts)]
    return [request.serial for request in DepthFirstByWeight(cache, FILL_TIME).order(queue, 0.0)]


class TestDepthFirstByWeight:
    @pytest.fixture
    def cache(self) -> RadixCache:
        """STEM with the branches LEFT and RIGHT, and OTHER."""
        rig = CacheRig()
        for ids in (STEM + LEFT, STEM + RIGHT, OTHER):
            rig.insert(np.array(ids, dtype=np.int32))
        return rig.cache

    def test_heaviest_branch_is_ordered_first_as_a_whole(self, cache: RadixCache) -> None:
        prompts = [[7], OTHER, STEM + LEFT, STEM + RIGHT, OTHER, STEM + RIGHT]
        assert ordered(cache, prompts) == [3, 5, 2, 1, 4, 0]

    def test_request_ending_at_stem_follows_its_branches(self, cache: RadixCache) -> None:
        assert ordered(cache, [STEM, STEM + LEFT, OTHER]) == [1, 0, 2]

    def test_equal_branches_are_ordered_by_first_arrival(self, cache: RadixCache) -> None:
        assert ordered(cache, [OTHER, STEM + RIGHT, STEM + LEFT, OTHER]) == [0, 3, 1, 2]

    def test_partial_node_matches_count_but_other_namespaces_do_not(self, cache: RadixCache) -> None:
        queue = [waiting_request(0, OTHER, namespace="salt"), waiting_request(1, [*OTHER[:4], 5])]
        queue += [waiting_request(2, [*STEM, 5]), waiting_request(3, [*OTHER[:3], 6])]
        policy = DepthFirstByWeight(cache, FILL_TIME)
        assert [request.serial for request in policy.order(queue, 0.0)] == [1, 3, 2, 0]

    def test_dfs_order_does_not_change_the_cache(self, cache: RadixCache) -> None:
        before = [(node.serial, node.last_access) for node in cache.tree.nodes()]
        ordered(cache, [STEM[:3], OTHER[:5], STEM + LEFT[:2]])
        assert [(node.serial, node.last_access) for node in cache.tree.nodes()] == before

    def test_children_with_lease_precede_heaviest_branch(self, cache: RadixCache) -> None:
        child, queue = returning_child(5), [waiting_request(number, STEM) for number in range(3)]
        assert DepthFirstByWeight(cache, FILL_TIME).order([*queue, child], 0.0)[0] is child

    @pytest.mark.parametrize(("more", "is_ranked"), [(0, True), (1, False)])
    def test_long_queue_is_served_in_arrival_order(self, cache: RadixCache, more: int, is_ranked: bool) -> None:
        policy = DepthFirstByWeight(cache, FILL_TIME)
        queue = [waiting_request(number, [50]) for number in range(policy.max_queue - 1 + more)]
        queue.append(match := waiting_request(1000, STEM))
        assert (policy.order(queue, 0.0)[0] is match) is is_ranked

    def test_lone_prompt_is_not_starved_by_shared_prefixes(self, cache: RadixCache) -> None:
        policy, alone = DepthFirstByWeight(cache, FILL_TIME), waiting_request(0, [7])
        served: list[Request] = []
        while alone not in served:
            newcomers = [waiting_request(2 * len(served) + more, STEM) for more in (1, 2)]
            first = policy.order([alone, *newcomers], 0.0)[0]
            policy.note_admission(first, 0.0)
            served.append(first)
            assert len(served) <= policy.max_overtakes + 1
        assert len(served) == policy.max_overtakes + 1


class TestRandomOrder:
    def test_random_order_is_a_permutation_unlike_arrival(self) -> None:
        queue = [waiting_request(number) for number in range(100)]
        found = RandomOrder(FILL_TIME).order(queue, 0.0)
        assert found != queue and sorted(request.serial for request in found) == list(range(100))
        moved = sum(abs(place - request.serial) for place, request in enumerate(found)) / 100
        assert 20 < moved < 45, "a third of the queue on average"

    def test_random_order_is_reproducible_across_ranks_and_turns(self) -> None:
        queue = [waiting_request(number) for number in range(50)]
        policy = RandomOrder(FILL_TIME)
        found = policy.order(queue, 0.0)
        assert found == policy.order(queue, 7.0) == RandomOrder(FILL_TIME).order(list(queue), 3.0)
        gone = found[:10]
        rest = [request for request in queue if request not in gone]
        assert policy.order(rest, 8.0) == found[10:], "who waits on keeps a place among the others"

    def test_priorities_and_leases_precede_random_order(self) -> None:
        urgent, child = waiting_request(60, priority=1), returning_child(61)
        queue = [waiting_request(number) for number in range(20)]
        assert RandomOrder(FILL_TIME).order([*queue, urgent, child], 0.0)[:2] == [urgent, child]

    def test_random_order_starves_no_request(self) -> None:
        policy = RandomOrder(FILL_TIME)
        last = policy.order([waiting_request(number) for number in range(400)], 0.0)[-1]
        served: list[Request] = []
        while last not in served:
            newcomers = [waiting_request(1000 + 8 * len(served) + more) for more in range(8)]
            first = policy.order([last, *newcomers], 0.0)[0]
            policy.note_admission(first, 0.0)
            served.append(first)
            assert len(served) <= policy.max_overtakes + 1
        assert len(served) > 50, "it did wait"
