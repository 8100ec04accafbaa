"""What is retired is evicted first, and nothing else is."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.radix.node import TreeNode
from baton.radix.retire import retire
from tests.doubles.cache_rig import CacheRig, int32


def end_of(rig: CacheRig, ids: np.ndarray) -> TreeNode:
    return rig.cache.find_prefix("", ids)[0]


def cached(rig: CacheRig, ids: np.ndarray) -> int:
    return rig.cache.match_len("", ids)


def test_it_goes_before_what_was_used_longer_ago() -> None:
    rig = CacheRig()
    old, new = int32(1, 2, 3, 4), int32(5, 6, 7, 8)
    rig.insert(old)
    rig.insert(new)
    assert retire(rig.cache, end_of(rig, new)) == 4
    rig.verify()
    rig.cache.evict(4)
    assert (cached(rig, old), cached(rig, new)) == (4, 0)
    rig.verify()


def test_the_whole_chain_goes_but_not_what_was_there_before() -> None:
    rig = CacheRig()
    turn = np.arange(1, 41, dtype=np.int32)
    rig.insert(turn[:10])  # somebody else's: the job found it
    rig.insert(turn[:20])
    rig.insert(turn)
    other = int32(90, 91, 92)
    rig.insert(other)
    assert retire(rig.cache, end_of(rig, turn), kept=10) == 30
    rig.cache.evict(30)
    assert (cached(rig, turn), cached(rig, other)) == (10, 3)
    rig.verify()


def test_it_stops_where_others_branch_off() -> None:
    rig = CacheRig()
    rig.insert(int32(1, 2, 3, 4, 5))
    rig.insert(int32(1, 2, 3, 8, 9))
    assert retire(rig.cache, end_of(rig, int32(1, 2, 3, 4, 5))) == 2
    assert retire(rig.cache, end_of(rig, int32(1, 2, 3))) == 0
    rig.verify()


def test_it_stops_where_others_branched_off_once() -> None:
    """They have left, and such may come again."""
    rig = CacheRig()
    rig.insert(int32(1, 2, 3, 8, 9))
    rig.insert(int32(1, 2, 3, 4, 5))
    rig.cache.evict(2)
    assert cached(rig, int32(1, 2, 3, 8, 9)) == 3
    rig.insert(int32(50, 51))
    assert retire(rig.cache, end_of(rig, int32(1, 2, 3, 4, 5))) == 2
    rig.cache.match_prefix("", int32(1, 2, 3))
    rig.cache.evict(4)
    assert (cached(rig, int32(1, 2, 3)), cached(rig, int32(50, 51))) == (3, 0)
    rig.verify()


@pytest.mark.parametrize(
    ("page", "kept", "left"), [(1, 5, 5), (1, 0, 0), (1, 12, 12), (4, 5, 8), (4, 8, 8), (4, 11, 12)]
)
def test_it_begins_within_a_node(page: int, kept: int, left: int) -> None:
    """At the next whole page."""
    rig = CacheRig(page_size=page, num_tokens=64)
    ids, other = np.arange(1, 13, dtype=np.int32), np.arange(40, 52, dtype=np.int32)
    rig.insert(ids)
    rig.insert(other)
    assert retire(rig.cache, end_of(rig, ids), kept) == 12 - left
    rig.insert(np.arange(70, 82, dtype=np.int32))
    rig.cache.evict(12 - left)
    assert (cached(rig, ids), cached(rig, other)) == (left, 12)
    rig.verify()


def test_it_stops_where_somebody_holds_it() -> None:
    rig = CacheRig()
    rig.insert(int32(1, 2, 3, 4))
    running = rig.start(int32(1, 2, 3, 4, 5, 6))
    assert retire(rig.cache, end_of(rig, int32(1, 2, 3, 4))) == 0
    assert rig.compute(running)
    rig.finish(running)
    rig.insert(int32(50, 51))
    rig.cache.evict(2)
    assert cached(rig, int32(1, 2, 3, 4, 5, 6)) == 4, "it goes as the least recently used, from its end"
    rig.verify()


def test_who_comes_back_for_it_makes_it_young_again() -> None:
    rig = CacheRig()
    mine, other = int32(1, 2, 3), int32(5, 6, 7)
    rig.insert(mine)
    rig.insert(other)
    retire(rig.cache, end_of(rig, mine))
    rig.cache.match_prefix("", mine)
    rig.cache.evict(3)
    assert (cached(rig, mine), cached(rig, other)) == (3, 0)
    rig.verify()
    assert rig.cache.evict(100) == 3


def test_of_the_root_and_of_what_is_gone_nothing_happens() -> None:
    rig = CacheRig()
    rig.insert(int32(1, 2, 3))
    gone = end_of(rig, int32(1, 2, 3))
    rig.cache.evict(3)
    assert retire(rig.cache, gone) == retire(rig.cache, rig.cache.tree.root) == 0
    rig.verify()


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("seed", range(6))
def test_at_random_no_entry_is_lost(seed: int, page: int) -> None:
    """Retired nodes are used, locked, split and evicted like any others."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    rig = CacheRig(num_tokens=64 * page, page_size=page, rows=6, context=512)
    stems = [np.array([rng.randrange(3) for _ in range(12 * page)], dtype=np.int32) for _ in range(3)]
    for _ in range(300):
        ids = np.append(rng.choice(stems)[: rng.randrange(12 * page)], int32(*(rng.randrange(4) for _ in range(4))))
        action = rng.random()
        if action < 0.5 and len(rig.running) < 5:
            running = rig.start(ids)
            if not rig.compute(running):
                rig.release(running)
        elif rig.running and action < 0.75:
            rig.finish(rig.running[rng.randrange(len(rig.running))])
        elif action < 0.95:
            retire(rig.cache, end_of(rig, ids), kept=rng.choice([0, 3]))
        else:
            rig.cache.evict(rng.randrange(page * 6))
        rig.verify()
    for running in list(rig.running):
        rig.finish(running)
    rig.cache.evict(10**6)
    assert rig.cache.evictable_tokens == 0 and rig.allocator.free_tokens == 64 * page
    assert not list(rig.cache.order.entries())
