"""What a watcher of the cache hears is what happens to the device."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest

from baton.radix.node import TreeNode
from tests.doubles.cache_rig import CacheRig, int32


class Listener:
    """Keeps the slots that are in the tree by what it is told, and how long ago what was used had been used."""

    def __init__(self) -> None:
        self.slots: set[int] = set()
        self.gaps: list[int] = []

    def node_stored(self, node: TreeNode) -> None:
        new = set(node.value.tolist())
        assert len(new) == len(node) and not new & self.slots
        self.slots |= new

    def path_used(self, node: TreeNode, tick: int) -> None:
        self.gaps.append(tick - node.used)

    def nodes_removed(self, nodes: Sequence[TreeNode]) -> None:
        for node in nodes:
            gone = set(node.value.tolist())
            assert gone <= self.slots and node.parent is not None
            self.slots -= gone

    def cache_cleared(self) -> None:
        self.slots.clear()


def listening(rig: CacheRig) -> Listener:
    listener = Listener()
    rig.cache.watchers.add_watcher(listener)
    return listener


def in_tree(rig: CacheRig) -> set[int]:
    return {slot for node in rig.cache.tree.nodes() for slot in node.value.tolist()}


@pytest.mark.parametrize("seed", range(20))
def test_watcher_is_notified_of_every_change(seed: int) -> None:
    rng = random.Random(seed)
    page = rng.choice([1, 4])
    rig = CacheRig(page_size=page)
    listener = listening(rig)
    for _ in range(60):
        match rng.randrange(4):
            case 0 | 1:
                ids = np.array([rng.randint(1, 2) for _ in range(page * rng.randint(1, 6))], dtype=np.int32)
                rig.insert(ids)
            case 2:
                rig.cache.evict(rng.randrange(12))
            case _ if rng.random() < 0.2:
                assert rig.cache.reset()
            case _:
                rig.cache.match_prefix("", int32(*[rng.randint(1, 2) for _ in range(6 * page)]))
        assert listener.slots == in_tree(rig)
    rig.verify()


def test_only_opened_sequences_count_as_use() -> None:
    rig = CacheRig()
    ids = int32(1, 2, 3, 4)
    rig.insert(ids)
    listener = listening(rig)
    for _ in range(5):
        rig.cache.match_prefix("", ids)  # by a request that cannot be admitted yet
    rig.insert(int32(1, 2, 3, 4, 5))
    assert len(listener.gaps) == 1 and listener.gaps[0] > 5
    rig.insert(int32(1, 2, 3, 4, 6))
    assert listener.gaps[1] < 5
