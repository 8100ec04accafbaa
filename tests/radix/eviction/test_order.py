"""The order of eviction: which leaf is the next victim, and the lanes in which leaves wait."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.radix.cache import StaleHandleError
from baton.radix.eviction.order import EvictionOrder, Lane, OneLane
from baton.radix.eviction.ranks import RANKS, lru
from baton.radix.node import TreeNode
from baton.radix.tree import RadixTree
from tests.doubles.cache_rig import CacheRig


def tokens(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def leaves(tree: RadixTree, count: int):
    for i in range(count):
        key = tokens(i)
        yield tree.add_leaf(tree.root, "", key.tobytes(), key + 1, i)


def test_stale_access_times_are_corrected_on_pop() -> None:
    tree, order = RadixTree(1), EvictionOrder(OneLane(lru))
    a, b, c = leaves(tree, 3)
    for node in (a, b, c):
        order.push_leaf(node)
        order.push_leaf(node)  # a second call adds no second entry
    a.last_access = 10
    assert sorted(time for time, _ in order.entries()) == [0, 1, 2]
    assert [order.pop(), order.pop(), order.pop(), order.pop()] == [b, c, a, None]
    assert a.entry is None


def test_locked_inner_and_removed_nodes_are_skipped_until_requeued() -> None:
    tree, order = RadixTree(1), EvictionOrder(OneLane(lru))
    locked, inner, removed, leaf = leaves(tree, 4)
    for node in (locked, inner, removed, leaf):
        order.push_leaf(node)
    locked.lock_ref = 1
    child = tree.add_leaf(inner, "", tokens(9).tobytes(), tokens(99), 9)
    tree.remove_leaves([removed])
    assert order.pop() is leaf
    assert order.pop() is None
    locked.lock_ref = 0
    order.push_leaf(locked)
    assert order.pop() is locked
    tree.remove_leaves([child])
    order.push_leaf(inner)
    assert order.pop() is inner


def test_least_recently_used_is_evicted_first() -> None:
    rig = CacheRig()
    for i in range(4):
        rig.insert(tokens(i, i, i))
    rig.cache.match_prefix("", tokens(0, 0, 0))  # an access
    rig.cache.match_len("", tokens(1, 1, 1))  # none
    for gone in (1, 2, 3, 0):
        assert rig.cache.match_len("", tokens(gone, gone, gone)) == 3
        assert rig.cache.evict(3) == 3
        assert rig.cache.match_len("", tokens(gone, gone, gone)) == 0
        rig.verify()


def test_access_to_evicted_branch_keeps_its_stem_recent() -> None:
    rig = CacheRig()
    rig.insert(tokens(1, 1, 2))  # stem 1 1 with branches 2 and 3
    rig.insert(tokens(1, 1, 3))
    rig.insert(tokens(5, 5))
    other = rig.cache.match_prefix("", tokens(5, 5)).handle
    rig.cache.match_prefix("", tokens(1, 1, 2))  # younger than 5 5, and so is its stem
    rig.cache.lock(other)
    assert rig.cache.evict(1) == 1  # 3
    assert rig.cache.evict(1) == 1  # 2: only the stem's own last access lies before that of 5 5
    rig.cache.unlock(other)
    assert rig.cache.evict(2) == 2
    assert rig.cache.match_len("", tokens(5, 5)) == 0
    assert rig.cache.match_len("", tokens(1, 1)) == 2


def test_evict_frees_no_more_than_asked_for() -> None:
    rig = CacheRig()
    for i in range(5):
        rig.insert(tokens(*[i] * 10))
    assert rig.cache.evict(0) == 0
    assert rig.cache.evict(-5) == 0
    assert rig.cache.evict(11) == 11
    assert rig.cache.match_len("", tokens(*[1] * 10)) == 9, "the tail goes, what is in front of it can still be used"
    rig.verify()
    assert rig.cache.evict(1000) == 39
    assert rig.cache.evict(1) == 0
    assert rig.cache.evicted_total == 50
    assert rig.cache.total_nodes == 0
    assert rig.allocator.free_tokens == rig.allocator.total_tokens
    rig.verify()


@pytest.mark.parametrize("page", [1, 16])
def test_long_leaf_is_trimmed_from_its_end_in_whole_pages(page: int) -> None:
    rig = CacheRig(num_tokens=4_096, page_size=page, context=4_000)
    ids = np.arange(4_000, dtype=np.int32)
    rig.insert(tokens(*[7] * 64))
    rig.insert(ids)
    rig.cache.match_prefix("", tokens(*[7] * 64))  # younger than the long one
    left = 4_000
    for asked in (1, page, 3 * page + 1, 500):
        freed = rig.cache.evict(asked)
        left -= freed
        assert asked <= freed < asked + page
        assert rig.cache.match_len("", ids) == left == rig.cache.evictable_tokens - 64
        assert rig.cache.total_nodes == 2 and len(list(rig.cache.order.entries())) == 2
    rig.verify()
    handle = rig.cache.match_prefix("", ids).handle
    rig.cache.match_prefix("", tokens(*[7] * 64))
    rig.cache.evict(1)
    with pytest.raises(StaleHandleError):
        rig.cache.lock(handle)  # it means more tokens than are left
    assert rig.cache.evict(left + 10) == left + (16 if page == 16 else 10) and rig.cache.match_len("", ids) == 0


def test_short_rest_of_leaf_is_evicted_with_its_end() -> None:
    rig = CacheRig(num_tokens=2_560)  # shorter than 10 tokens
    ids = np.arange(100, dtype=np.int32)
    rig.insert(ids)
    assert rig.cache.evict(90) == 90 and rig.cache.match_len("", ids) == 10
    assert rig.cache.evict(1) == 10 and rig.cache.total_nodes == 0
    rig.verify()


def test_locked_nodes_and_their_ancestors_are_not_evicted() -> None:
    rig = CacheRig()
    rig.insert(tokens(1, 2, 3, 4))
    rig.insert(tokens(1, 2, 3, 9))
    rig.insert(tokens(1, 7))
    handle = rig.cache.match_prefix("", tokens(1, 2, 3)).handle
    rig.cache.lock(handle)
    assert rig.cache.protected_tokens == 3
    assert rig.cache.evictable_tokens == 3
    assert rig.cache.evict(1000) == 3
    assert rig.cache.match_len("", tokens(1, 2, 3, 4)) == 3
    rig.cache.unlock(handle)
    assert rig.cache.evict(1000) == 3
    assert rig.cache.total_nodes == 0


def test_parent_is_queued_once_it_is_an_unlocked_leaf() -> None:
    rig = CacheRig()
    rig.insert(tokens(1, 2, 3, 4))
    rig.insert(tokens(1, 2, 3, 9))
    stem = rig.cache.match_prefix("", tokens(1, 2, 3)).handle
    assert rig.cache.evict(1) == 1 and stem.entry is None, "the other child is still there"
    rig.cache.lock(stem)
    assert rig.cache.evict(1) == 1 and stem.entry is None, "it is locked"
    rig.cache.unlock(stem)
    assert stem.entry is not None and rig.cache.evict(3) == 3


@pytest.mark.parametrize("page", [1, 16, 64])
def test_evicted_pages_are_whole(page: int) -> None:
    rig = CacheRig(num_tokens=64 * 8, page_size=page, context=256)
    rig.insert(np.arange(200, dtype=np.int32))
    rig.insert(np.arange(100, dtype=np.int32))
    cached = 200 - 200 % page
    assert rig.cache.evict(1) % page == 0
    rig.cache.evict(1000)
    assert rig.cache.evicted_total == cached
    assert rig.allocator.free_tokens == rig.allocator.total_tokens


def test_100_000_leaves_are_popped_in_order() -> None:
    count = 100_000
    tree, order = RadixTree(1), EvictionOrder(OneLane(lru))
    nodes = list(leaves(tree, count))
    for node in nodes:
        order.push_leaf(node)
    for node in nodes[::2]:
        node.last_access += count
    popped = [order.pop() for _ in range(count)]
    assert popped == nodes[1::2] + nodes[::2]


def a_leaf(tree: RadixTree, token: int, tick: int = 1) -> TreeNode:
    key = np.array([token], dtype=np.int32)
    return tree.add_leaf(tree.root, "", key.tobytes(), key, tick)


class TestLanes:
    @pytest.mark.parametrize("seed", range(5))
    def test_late_lane_entries_are_popped_in_order(self, seed: int) -> None:
        rng, tree, lane = random.Random(seed), RadixTree(1), Lane()
        assert not lane
        entries = [(rng.randrange(50), number, a_leaf(tree, number)) for number in range(200)]
        taken: list[int] = []
        for entry in entries:
            lane.push_entry(entry)
            if rng.random() < 0.3:
                assert lane.first()[0] == min(waiting[0] for waiting in lane)
                taken.append(lane.pop_entry()[1])
        rest = [lane.pop_entry() for _ in range(len(entries) - len(taken))]
        assert not lane and rest == sorted(rest)
        assert sorted(taken + [serial for _, serial, _ in rest]) == list(range(200))

    def test_forget_removed_drops_removed_nodes(self) -> None:
        tree, lane = RadixTree(1), Lane()
        kept, gone, late = a_leaf(tree, 1, 5), a_leaf(tree, 2, 6), a_leaf(tree, 3, 2)
        for node in (kept, gone, late):
            node.entry = (node.last_access, node.serial, node)
            lane.push_entry(node.entry)
        tree.remove_leaves([gone, late])
        lane.forget_removed()
        assert [entry[2] for entry in lane] == [kept]
        assert (kept.entry is None, gone.entry, late.entry) == (False, None, None)

    def test_revived_leaf_keeps_one_entry(self) -> None:
        """Its rank may be what it was before it was to go early, so a rank does not tell its entries apart."""
        tree, order = RadixTree(1), EvictionOrder(OneLane(RANKS["fifo"]))
        first, revived = a_leaf(tree, 1), a_leaf(tree, 2, 7)
        order.push_leaf(first)
        order.push_leaf(revived)
        revived.last_access = 0
        order.push_leaf(revived)
        revived.last_access = 9
        assert order.pop() is first  # and the early entry has been put back
        assert [node for _, node in order.entries()] == [revived]
        assert order.pop() is revived and order.pop() is None
