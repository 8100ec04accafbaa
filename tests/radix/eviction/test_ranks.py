"""Which of two leaves each order gives up first, and that a node which is to go early goes first in all of them."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.radix.discarding import retire
from baton.radix.eviction.registry import ORDERS
from tests.doubles.cache_rig import CacheRig


def ids(*values: int) -> np.ndarray:
    """Each value three times: leaves of their own."""
    return np.repeat(np.array(values, dtype=np.int32), 3)


def cached(rig: CacheRig, *values: int) -> bool:
    return rig.cache.match_len("", ids(*values)) == 3 * len(values)


def gone_in_turn(rig: CacheRig, values: tuple[int, ...]) -> list[int]:
    """Evicts leaf by leaf."""
    gone = []
    while rig.cache.evictable_tokens:
        rig.cache.evict(3)
        gone += [value for value in values if not cached(rig, value) and value not in gone]
        rig.verify()
    return gone


@pytest.mark.parametrize(
    ("name", "order"),
    [("lru", [3, 4, 1, 2]), ("lfu", [4, 3, 2, 1]), ("slru", [4, 3, 1, 2]), ("fifo", [1, 2, 3, 4])],
)
def test_eviction_order_of_each_rank(name: str, order: list[int]) -> None:
    rig = CacheRig(eviction=name)
    for value in (1, 2, 3, 4):
        rig.insert(ids(value))
    for value in (1, 1, 2, 2, 1, 3, 1, 4, 1, 2) if name == "lru" else (3, 1, 1, 1, 2, 2):
        rig.finish(rig.start(np.append(ids(value), np.int32(99))))
    assert gone_in_turn(rig, (1, 2, 3, 4)) == order


def test_priorities() -> None:
    rig = CacheRig(eviction="priority")
    rig.insert(ids(1), priority=5)
    rig.insert(ids(2), priority=-7)
    rig.insert(ids(3))
    rig.insert(ids(4), priority=-7)
    rig.finish(rig.start(np.append(ids(4), np.int32(99)), priority=9))  # lifted by whom it serves
    rig.finish(rig.start(np.append(ids(1), np.int32(99)), priority=-9))  # and never sunk
    assert gone_in_turn(rig, (1, 2, 3, 4)) == [2, 3, 1, 4]


@pytest.mark.parametrize("name", ORDERS)
def test_retired_node_is_evicted_first_in_every_order(name: str) -> None:
    rig = CacheRig(eviction=name)
    for value in (1, 2, 3):
        rig.insert(ids(value), priority=value)
    for _ in range(3):
        rig.finish(rig.start(np.append(ids(3), np.int32(99)), priority=8))
    retire(rig.cache, rig.cache.match_prefix("", ids(3)).handle)
    rig.cache.evict(3)
    assert not cached(rig, 3) and cached(rig, 1) and cached(rig, 2)


@pytest.mark.parametrize("name", ["lfu", "slru", "priority"])
def test_stem_inherits_rank_of_its_branches(name: str) -> None:
    """Without that, a system prompt would go before what nobody used, as soon as its last branch has gone."""
    rig = CacheRig(eviction=name)
    rig.insert(ids(1, 2), priority=5)
    rig.insert(ids(1, 3), priority=5)
    for _ in range(2):
        rig.finish(rig.start(np.append(ids(1, 2), np.int32(99)), priority=5))
        rig.finish(rig.start(np.append(ids(1, 3), np.int32(99)), priority=5))
    rig.cache.evict(6)
    rig.insert(ids(7))
    assert cached(rig, 1) and not cached(rig, 1, 2)
    rig.cache.evict(3)
    assert cached(rig, 1) and not cached(rig, 7)


@pytest.mark.parametrize("name", ORDERS)
def test_random_operations_keep_invariants_in_every_order(name: str) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    rng = random.Random(seed)
    rig = CacheRig(num_tokens=96, eviction=name)
    for _ in range(300):
        path = [rng.randrange(3) for _ in range(rng.randint(1, 4))]
        if rng.random() < 0.3 and len(rig.running) < 4:
            rig.start(ids(*path), priority=rng.randint(-3, 3))
        elif rig.running and rng.random() < 0.4:
            running = rng.choice(rig.running)
            (rig.finish if rig.compute(running) else rig.release)(running)
        else:
            handle = rig.cache.match_prefix("", ids(*path)).handle
            if rng.random() < 0.2:
                retire(rig.cache, handle)
        rig.verify()
