"""What is evicted and computed again soon is found to have gone too early; what is not, is not."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from baton.radix.statistics.lives import KVLives
from tests.doubles.cache_rig import CacheRig, int32
from tests.doubles.host_rig import TierRig


def ids(count: int, first: int) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int32)


def counted(rig: CacheRig) -> tuple[int, int]:
    return lives_of(rig).ghosts.recorded_tokens, lives_of(rig).ghosts.recomputed_tokens


def lives_of(rig: CacheRig) -> KVLives:
    (lives,) = rig.cache.watchers
    assert isinstance(lives, KVLives)
    return lives


def watched(**options: Any) -> CacheRig:
    rig = CacheRig(**options)
    KVLives(rig.cache)
    return rig


def test_what_comes_back_counts_once() -> None:
    rig = watched()
    rig.insert(ids(40, 1))
    rig.cache.evict(40)
    assert counted(rig) == (40, 0)
    rig.insert(ids(40, 1))
    assert counted(rig) == (40, 40)
    rig.insert(ids(40, 1))
    assert counted(rig) == (40, 40)


def test_others_do_not_count() -> None:
    rig = watched()
    rig.insert(ids(40, 1))
    rig.cache.evict(40)
    rig.insert(ids(40, 1), "another namespace")
    rig.insert(ids(40, 500))
    assert counted(rig) == (40, 0)


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_conversation_that_went_turn_by_turn_comes_back_whole(page_size: int) -> None:
    rig = watched(page_size=page_size)
    for end in (12, 24, 40):
        rig.insert(ids(end, 1))
    for _ in range(20):  # from its end, in pieces
        rig.cache.evict(page_size)
    rig.cache.evict(40)
    assert rig.cache.total_nodes == 0 and counted(rig) == (40, 0)
    rig.insert(np.concatenate([ids(40, 1), ids(8, 900)]))
    assert counted(rig) == (40, 40)


def test_what_goes_another_way_counts_up_to_there() -> None:
    rig = watched(page_size=4)
    rig.insert(ids(40, 1))
    rig.cache.evict(40)
    rig.insert(np.concatenate([ids(18, 1), ids(22, 900)]))
    assert counted(rig) == (40, 16), "in whole pages"


def test_a_prompt_that_comes_in_chunks_counts_whole() -> None:
    rig = watched()
    rig.insert(ids(40, 1))
    rig.cache.evict(40)
    running = rig.start(ids(40, 1))
    for end in (7, 14, 40):
        assert rig.compute(running, end)
        rig.publish(running)
    rig.finish(running)
    assert counted(rig) == (40, 40)


def test_a_tail_below_what_stayed() -> None:
    rig = watched()
    rig.insert(ids(40, 1))
    rig.cache.evict(15)
    rig.insert(ids(40, 1))
    assert counted(rig) == (15, 15)


def test_too_late_is_not_too_early() -> None:
    """A sample is an eighth of the pool, and is watched until the pool has been evicted once more."""
    rig = watched(num_tokens=80)
    rig.insert(ids(20, 1))
    rig.cache.evict(20)
    assert counted(rig) == (20, 0) and not lives_of(rig).ghosts.recording
    rig.insert(ids(40, 100))
    rig.cache.evict(40)
    assert counted(rig) == (20, 0), "nothing is recorded meanwhile"
    rig.insert(ids(40, 200))
    rig.cache.evict(40)
    assert lives_of(rig).ghosts.recording and len(lives_of(rig).ghosts) == 0
    rig.insert(ids(20, 1))
    assert counted(rig) == (20, 0)
    rig.cache.evict(20)
    assert counted(rig) == (40, 0), "the next sample"


def test_a_flush_is_no_eviction() -> None:
    rig = watched()
    rig.insert(ids(40, 1))
    rig.insert(ids(40, 500))
    rig.cache.evict(40)
    assert rig.cache.reset()
    rig.insert(ids(40, 1))
    rig.insert(ids(40, 500))
    assert counted(rig) == (40, 0)


def test_what_a_store_brings_back_is_not_computed_again() -> None:
    rig = TierRig()
    lives = KVLives(rig.cache)
    rig.insert(ids(40, 1))
    rig.cache.evict(40)  # before it was stored
    assert counted(rig) == (40, 0)
    slots = rig.tier.allocate(40)
    assert slots is not None
    tree = rig.cache.tree
    leaf = tree.add_host_leaf(tree.root, "", ids(40, 1).tobytes(), slots, 1)  # as a disk has it put there
    rig.tier.took_copy(leaf)
    assert rig.load(ids(40, 1)) is not None and leaf.on_device
    assert counted(rig) == (40, 0) and lives.stored_tokens == 80


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("page_size", [1, 4])
def test_never_more_than_a_slow_twin_finds(seed: int, page_size: int) -> None:
    """The twin knows every token that was evicted, by all that comes before it."""
    rng = random.Random(seed)
    rig = watched(num_tokens=96, page_size=page_size)
    ghosts = lives_of(rig).ghosts
    gone: set[bytes] = set()
    again = 0

    class Twin:
        def paths(self, node) -> set[bytes]:
            above, keys = node, []
            while above.parent is not None:
                keys.append(above.key)
                above = above.parent
            whole = b"".join(reversed(keys))
            return {whole[:end] for end in range(len(whole) - len(node.key) + 4, len(whole) + 1, 4)}

        def stored(self, node) -> None:
            nonlocal again, gone
            again += len(gone & self.paths(node))
            gone = gone - self.paths(node)

        def used(self, node, tick) -> None:
            pass

        def removed(self, nodes) -> None:
            for node in nodes:
                gone.update(self.paths(node))

        def cleared(self) -> None:
            gone.clear()

    rig.cache.watchers.add_watcher(Twin())
    found = 0
    for _ in range(150):
        stem = [1 + rng.randrange(2)] * page_size * rng.randrange(1, 5)
        rig.insert(int32(*stem, *[rng.randrange(2) for _ in range(rng.randrange(20))]))
        if rng.random() < 0.5:
            rig.cache.evict(rng.randrange(40))
        assert ghosts.recomputed_tokens <= min(again, ghosts.recorded_tokens), seed
        assert len(ghosts) <= ghosts.MAX_GHOSTS
        found = ghosts.recomputed_tokens
    assert found > 0, seed
