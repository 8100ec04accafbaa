from __future__ import annotations

import random

import numpy as np
import pytest

from baton.radix.eviction.lanes import Lane, OneLane
from baton.radix.eviction.order import EvictionOrder
from baton.radix.eviction.ranks import RANKS
from baton.radix.node import TreeNode
from baton.radix.tree import RadixTree


def a_leaf(tree: RadixTree, token: int, tick: int = 1) -> TreeNode:
    key = np.array([token], dtype=np.int32)
    return tree.add_leaf(tree.root, "", key.tobytes(), key, tick)


@pytest.mark.parametrize("seed", range(5))
def test_whatever_comes_late_is_taken_in_order(seed: int) -> None:
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


def test_removed_nodes_are_let_go() -> None:
    tree, lane = RadixTree(1), Lane()
    kept, gone, late = a_leaf(tree, 1, 5), a_leaf(tree, 2, 6), a_leaf(tree, 3, 2)
    for node in (kept, gone, late):
        node.entry = (node.last_access, node.serial, node)
        lane.push_entry(node.entry)
    tree.remove_leaves([gone, late])
    lane.forget_removed()
    assert [entry[2] for entry in lane] == [kept]
    assert (kept.entry is None, gone.entry, late.entry) == (False, None, None)


def test_a_leaf_that_is_wanted_again_after_all_has_one_entry() -> None:
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
