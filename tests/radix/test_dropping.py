"""A prefix that is given up: no match finds it, what nobody locks is free, the rest follows when it is unlocked."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.radix.cuts import truncate
from baton.radix.dropping import drop_path
from tests.doubles.cache_rig import CacheRig


def tokens(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_the_path_and_all_that_hangs_on_it_goes() -> None:
    rig = CacheRig()
    rig.insert(tokens(1, 2, 3, 4))
    rig.insert(tokens(1, 2, 9, 9, 9))
    rig.insert(tokens(5, 6))
    rig.insert(tokens(1, 2, 3, 4), "other")
    match = rig.cache.match_prefix("", tokens(1, 2, 3))
    entries = len(list(rig.cache.order.entries()))
    assert drop_path(rig.cache, match.handle) == 7
    assert rig.cache.match_len("", tokens(1, 2, 3, 4)) == 0
    assert rig.cache.match_len("", tokens(5, 6)) == 2 and rig.cache.match_len("other", tokens(1, 2, 3, 4)) == 4
    assert len(list(rig.cache.order.entries())) < entries, "the removed nodes are not kept alive"
    assert rig.cache.evicted_total == 0, "it is no eviction"
    rig.verify()
    assert drop_path(rig.cache, match.handle) == 0 and drop_path(rig.cache, rig.cache.tree.root) == 0
    assert rig.cache.evict(100) == 6
    rig.verify()


def test_what_others_lock_stays_for_them_alone() -> None:
    rig = CacheRig(page_size=4)
    stem = np.arange(12, dtype=np.int32)
    rig.insert(np.append(stem, tokens(50, 50, 50, 50)))
    running = rig.start(np.concatenate([stem, tokens(60, 61, 62, 63, 64, 65)]))
    assert running.kv.tree_len == 12 and running.kv.node is not None
    assert drop_path(rig.cache, running.kv.node) == 4
    rig.verify()
    assert rig.cache.match_len("", stem) == 0
    rig.insert(np.append(stem, tokens(70, 70, 70, 70)))  # the same path again, beside the hidden one
    assert rig.compute(running)
    rig.publish(running)
    rig.verify()
    assert running.kv.tree_len == 16 and rig.cache.match_len("", running.ids) == 12
    truncate(rig.cache, running.kv, 5)  # a cut inside the hidden path
    running.committed = running.kv.length
    assert running.kv.length == 4
    rig.verify()
    rig.finish(running)
    rig.verify()
    assert rig.cache.evict(1000) == 2 * 16
    assert rig.verify().free == rig.allocator.total_tokens


def test_a_hidden_branch_can_be_dropped_again() -> None:
    rig = CacheRig()
    running = rig.start(tokens(1, 2, 3, 4))
    assert rig.compute(running)
    rig.publish(running)
    node = running.kv.node
    assert node is not None and drop_path(rig.cache, node) == 0
    rig.cache.match_prefix("", tokens(1, 2))
    rig.release(running)
    rig.verify()
    assert drop_path(rig.cache, node) == 4
    assert rig.verify().free == rig.allocator.total_tokens


@pytest.mark.parametrize("page", [1, 4])
def test_the_sound_start_of_a_path_stays(page: int) -> None:
    rig = CacheRig(page_size=page)
    stem = np.arange(12, dtype=np.int32)
    rig.insert(np.append(stem, np.full(8, 50, dtype=np.int32)))
    rig.insert(np.append(stem, np.full(8, 60, dtype=np.int32)))
    rig.insert(np.append(stem[:4], np.full(8, 70, dtype=np.int32)))
    node = rig.cache.match_prefix("", np.append(stem, np.full(8, 50, dtype=np.int32))).handle
    assert drop_path(rig.cache, node, kept=20) == 0 and rig.cache.match_len("", stem) == 12
    assert drop_path(rig.cache, node, kept=8) == 4 + 8 + 8, "with its other branch"
    assert rig.cache.match_len("", stem) == 8
    assert rig.cache.match_len("", np.append(stem[:4], np.full(8, 70, dtype=np.int32))) == 12
    rig.verify()
    assert rig.cache.evict(1000) == 8 + 8, "what has lost its children can be evicted"
    rig.verify()


def test_what_is_locked_below_the_sound_start_is_hidden() -> None:
    rig = CacheRig()
    running = rig.start(tokens(1, 2, 3, 4, 5))
    assert rig.compute(running)
    rig.publish(running)
    node = running.kv.node
    assert node is not None and drop_path(rig.cache, node, kept=2) == 0
    assert rig.cache.match_len("", tokens(1, 2, 3, 4, 5)) == 2
    rig.insert(tokens(1, 2, 3, 9))  # beside the hidden one
    assert rig.cache.match_len("", tokens(1, 2, 3, 9)) == 4
    rig.verify()
    root = rig.cache.tree.root
    assert rig.cache.find_prefix("", tokens(1, 2, 3, 4, 5, 6), after=node)[1] == 3
    assert rig.cache.tree.reachable(node) is root
    rig.finish(running)
    rig.verify()
    rig.cache.evict(1000)
    assert rig.verify().free == rig.allocator.total_tokens


@pytest.mark.parametrize("namespace", ["", "salt"])
def test_no_look_up_goes_on_in_a_hidden_branch(namespace: str) -> None:
    rig = CacheRig()
    running = rig.start(tokens(1, 2, 3, 4), namespace)
    assert rig.compute(running)
    rig.publish(running)
    node = running.kv.node
    assert node is not None
    ids = tokens(1, 2, 3, 4, 5)
    assert rig.cache.find_prefix(namespace, ids, after=node)[1] == 4
    drop_path(rig.cache, node)
    root = rig.cache.tree.root
    assert rig.cache.find_prefix(namespace, ids, after=node) == (root, 0, root)
    assert rig.cache.match_prefix(namespace, ids, after=node).handle is root


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("seed", range(4))
def test_random_drops_lose_nothing(seed: int, page: int) -> None:
    rng = random.Random(seed)
    rig = CacheRig(num_tokens=40 * page, page_size=page, rows=6)
    for _ in range(150):
        choice = rng.random()
        if choice < 0.4 and rig.pool.num_free:
            running = rig.start(np.repeat(tokens(*(rng.randrange(2) for _ in range(6))), page))
            if not rig.compute(running, min(len(running.ids), running.kv.length + 2 * page)):
                rig.release(running)
        elif choice < 0.9 and rig.running:
            running = rng.choice(rig.running)
            rng.choice([rig.publish, rig.finish, rig.release])(running)
        elif rig.running:
            node = rng.choice(rig.running).kv.node
            assert node is not None
            drop_path(rig.cache, node, kept=rng.choice([0, 0, page, 2 * page]))
        else:
            rig.cache.evict(rng.randrange(1, 3 * page))
        rig.verify()
    for running in list(rig.running):
        rig.finish(running)
    rig.cache.evict(10**9)
    assert rig.verify().free == rig.allocator.total_tokens
