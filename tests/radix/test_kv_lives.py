"""Times and counts of KV, by hand on small scenes, and KV that was evicted too early."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from baton.radix.discarding import drop_path, retire
from baton.radix.kv_lives import MAX_NOTED, SECONDS, Histogram, KVLives
from tests.doubles.cache_rig import CacheRig, int32
from tests.doubles.host_rig import TierRig, tokens


class Scene:
    """A cache, its statistics and a clock."""

    def __init__(self, rig: CacheRig) -> None:
        self.rig, self.lives = rig, KVLives(rig.cache)

    def at(self, now: float) -> CacheRig:
        self.lives.set_time(now)
        return self.rig


def shown(spread: Histogram) -> dict[float, int]:
    """Upper bound -> tokens, where there are some."""
    return {bound: count for bound, count in zip((*SECONDS, float("inf")), spread.counts) if count}


def test_lifetime_idle_time_and_reuse_gap() -> None:
    scene = Scene(CacheRig())
    scene.at(100.0).insert(tokens(10))
    scene.at(104.0).insert(tokens(16))  # finds 10 after 4 s, adds 6
    scene.at(129.0).insert(tokens(21))  # finds 16 after 25 s, adds 5
    lives = scene.lives
    assert shown(lives.reuse_gap) == {5.0: 10, 30.0: 16} and lives.reuse_gap.sum == 10 * 4 + 16 * 25
    assert scene.at(200.0).cache.evict(7) == 7  # the last five, and two of the six
    assert shown(lives.lifetime) == {120.0: 7} and lives.lifetime.sum == 5 * 71 + 2 * 96
    assert lives.idle_time.sum == 7 * 71, "the six were used when the five were computed"
    assert (lives.evicted_tokens, lives.evicted_nodes, lives.stored_tokens) == (7, 2, 21)
    scene.at(1000.0).cache.evict(14)
    assert lives.lifetime.sum == 5 * 71 + 2 * 96 + 4 * 896 + 10 * 900
    assert lives.idle_time.sum == 7 * 71 + 14 * 871
    assert sum(lives.lifetime.counts) == sum(lives.idle_time.counts) == lives.evicted_tokens == 21


def test_split_parts_keep_the_age_of_their_node() -> None:
    scene = Scene(CacheRig())
    scene.at(10.0).insert(tokens(20))
    scene.at(13.0).insert(np.concatenate([tokens(8), int32(99, 98)]))  # splits after 8, which were stored 3 s ago
    assert scene.lives.reuse_gap.sum == 8 * 3
    scene.at(20.0).cache.evict(22)
    assert scene.lives.lifetime.sum == 20 * 10 + 2 * 7
    assert scene.lives.idle_time.sum == 12 * 10 + 2 * 7 + 8 * 7


def test_lookups_of_waiting_requests_are_no_reuse() -> None:
    scene = Scene(CacheRig())
    scene.at(1.0).insert(tokens(10))
    for second in range(2, 50):
        scene.at(second).cache.match_prefix("", tokens(10))
    scene.at(51.0).insert(tokens(12))
    assert scene.lives.reuse_gap.sum == 10 * 50
    scene.at(61.0).cache.evict(12)
    assert scene.lives.idle_time.sum == 12 * 10


def test_miss_records_no_reuse_gap() -> None:
    scene = Scene(CacheRig())
    scene.at(1.0).insert(tokens(10))
    scene.at(2.0).insert(tokens(10, first=500))
    assert not shown(scene.lives.reuse_gap)


def test_retired_tokens_are_counted_separately() -> None:
    scene = Scene(CacheRig())
    rig = scene.at(1.0)
    rig.insert(tokens(10))
    rig.insert(tokens(6, first=500))
    assert retire(rig.cache, rig.cache.find_prefix("", tokens(10))[0]) == 10
    rig.cache.evict(10)
    assert (scene.lives.evicted_tokens, scene.lives.retired_tokens) == (10, 10)
    rig.cache.evict(6)
    assert (scene.lives.evicted_tokens, scene.lives.retired_tokens) == (16, 10)


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_dropped_or_flushed_tokens_are_not_counted_as_evicted(page_size: int) -> None:
    scene = Scene(CacheRig(page_size=page_size))
    rig = scene.at(1.0)
    rig.insert(tokens(128))
    rig.insert(tokens(128, first=500))
    assert drop_path(rig.cache, rig.cache.find_prefix("", tokens(128))[0]) == 128
    lives = scene.lives
    assert (lives.stored_tokens, lives.evicted_tokens, lives.given_up_tokens) == (256, 0, 128)
    assert rig.cache.reset()
    assert (lives.stored_tokens, lives.evicted_tokens, lives.given_up_tokens) == (256, 0, 256)
    assert not shown(lives.lifetime) and lives.cleared_at == 1.0


def test_lifetime_continues_across_the_host_tier() -> None:
    rig = TierRig()
    scene = Scene(rig)
    scene.at(100.0).insert(tokens(32))
    rig.store_all()
    scene.at(110.0).cache.evict(32)
    lives = scene.lives
    assert (lives.evicted_tokens, lives.to_host_tokens, lives.lifetime.sum) == (32, 32, 320)
    assert lives.ghosts.recorded_tokens == 0, "nothing was lost"
    scene.at(140.0)
    fence = rig.load(tokens(32))
    assert fence is not None
    rig.end(fence)
    rig.insert(tokens(40))
    assert lives.stored_tokens == 32 + 32 + 8
    assert lives.reuse_gap.sum == 32 * 40
    scene.at(150.0).cache.evict(40)
    assert lives.lifetime.sum == 320 + 32 * 50 + 8 * 10
    assert lives.idle_time.sum == 320 + 40 * 10
    assert (lives.evicted_tokens, lives.to_host_tokens, lives.ghosts.recorded_tokens) == (72, 64, 8)


def test_dropped_host_copy_is_not_evicted_a_second_time() -> None:
    rig = TierRig()
    scene = Scene(rig)
    scene.at(1.0).insert(tokens(32))
    rig.store_all()
    rig.cache.evict(12)
    node = rig.cache.match_prefix("", tokens(32)).host_handle
    assert node is not None and not node.on_device
    drop_path(rig.cache, node)
    lives = scene.lives
    assert (lives.evicted_tokens, lives.evicted_nodes, lives.given_up_tokens) == (12, 1, 20)
    assert lives.ghosts.recorded_tokens == 0


def test_pending_reuse_samples_are_bounded() -> None:
    scene = Scene(CacheRig(num_tokens=2 * MAX_NOTED + 50))
    rig = scene.at(1.0)
    for number in range(MAX_NOTED + 5):
        rig.insert(int32(number, 7))
        rig.insert(int32(number, 7, 8))
        if number % 100 == 0:
            scene.at(1.0 + number)
        assert len(scene.lives._uses) < 3 * MAX_NOTED and len(scene.lives._ends) < 4 * MAX_NOTED
    assert sum(scene.lives.reuse_gap.counts) == 2 * (MAX_NOTED + 5)


def run_of_ids(count: int, first: int) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int32)


def ghost_counts(rig: CacheRig) -> tuple[int, int]:
    return lives_of(rig).ghosts.recorded_tokens, lives_of(rig).ghosts.recomputed_tokens


def lives_of(rig: CacheRig) -> KVLives:
    (lives,) = rig.cache.watchers
    assert isinstance(lives, KVLives)
    return lives


def watched_rig(**options: Any) -> CacheRig:
    rig = CacheRig(**options)
    KVLives(rig.cache)
    return rig


class TestGhostSample:
    def test_recomputed_evicted_tokens_count_once(self) -> None:
        rig = watched_rig()
        rig.insert(run_of_ids(40, 1))
        rig.cache.evict(40)
        assert ghost_counts(rig) == (40, 0)
        rig.insert(run_of_ids(40, 1))
        assert ghost_counts(rig) == (40, 40)
        rig.insert(run_of_ids(40, 1))
        assert ghost_counts(rig) == (40, 40)

    def test_other_prompts_and_namespaces_do_not_count_as_recomputed(self) -> None:
        rig = watched_rig()
        rig.insert(run_of_ids(40, 1))
        rig.cache.evict(40)
        rig.insert(run_of_ids(40, 1), "another namespace")
        rig.insert(run_of_ids(40, 500))
        assert ghost_counts(rig) == (40, 0)

    @pytest.mark.parametrize("page_size", [1, 4])
    def test_conversation_evicted_piecewise_is_recognised_whole(self, page_size: int) -> None:
        rig = watched_rig(page_size=page_size)
        for end in (12, 24, 40):
            rig.insert(run_of_ids(end, 1))
        for _ in range(20):  # from its end, in pieces
            rig.cache.evict(page_size)
        rig.cache.evict(40)
        assert rig.cache.total_nodes == 0 and ghost_counts(rig) == (40, 0)
        rig.insert(np.concatenate([run_of_ids(40, 1), run_of_ids(8, 900)]))
        assert ghost_counts(rig) == (40, 40)

    def test_diverging_prompt_counts_up_to_the_divergence(self) -> None:
        rig = watched_rig(page_size=4)
        rig.insert(run_of_ids(40, 1))
        rig.cache.evict(40)
        rig.insert(np.concatenate([run_of_ids(18, 1), run_of_ids(22, 900)]))
        assert ghost_counts(rig) == (40, 16), "in whole pages"

    def test_chunked_prompt_counts_as_a_whole(self) -> None:
        rig = watched_rig()
        rig.insert(run_of_ids(40, 1))
        rig.cache.evict(40)
        running = rig.start(run_of_ids(40, 1))
        for end in (7, 14, 40):
            assert rig.compute(running, end)
            rig.publish(running)
        rig.finish(running)
        assert ghost_counts(rig) == (40, 40)

    def test_evicted_tail_counts_when_recomputed(self) -> None:
        rig = watched_rig()
        rig.insert(run_of_ids(40, 1))
        rig.cache.evict(15)
        rig.insert(run_of_ids(40, 1))
        assert ghost_counts(rig) == (15, 15)

    def test_recomputation_after_sample_window_does_not_count(self) -> None:
        """A sample is an eighth of the pool, and is watched until the pool has been evicted once more."""
        rig = watched_rig(num_tokens=80)
        rig.insert(run_of_ids(20, 1))
        rig.cache.evict(20)
        assert ghost_counts(rig) == (20, 0) and not lives_of(rig).ghosts.recording
        rig.insert(run_of_ids(40, 100))
        rig.cache.evict(40)
        assert ghost_counts(rig) == (20, 0), "nothing is recorded meanwhile"
        rig.insert(run_of_ids(40, 200))
        rig.cache.evict(40)
        assert lives_of(rig).ghosts.recording and len(lives_of(rig).ghosts) == 0
        rig.insert(run_of_ids(20, 1))
        assert ghost_counts(rig) == (20, 0)
        rig.cache.evict(20)
        assert ghost_counts(rig) == (40, 0), "the next sample"

    def test_flush_does_not_count_as_eviction(self) -> None:
        rig = watched_rig()
        rig.insert(run_of_ids(40, 1))
        rig.insert(run_of_ids(40, 500))
        rig.cache.evict(40)
        assert rig.cache.reset()
        rig.insert(run_of_ids(40, 1))
        rig.insert(run_of_ids(40, 500))
        assert ghost_counts(rig) == (40, 0)

    def test_loaded_tokens_do_not_count_as_recomputed(self) -> None:
        rig = TierRig()
        lives = KVLives(rig.cache)
        rig.insert(run_of_ids(40, 1))
        rig.cache.evict(40)  # before it was stored
        assert ghost_counts(rig) == (40, 0)
        slots = rig.tier.allocate(40)
        assert slots is not None
        tree = rig.cache.tree
        leaf = tree.add_host_leaf(tree.root, "", run_of_ids(40, 1).tobytes(), slots, 1)  # as a disk has it put there
        rig.tier.took_copy(leaf)
        assert rig.load(run_of_ids(40, 1)) is not None and leaf.on_device
        assert ghost_counts(rig) == (40, 0) and lives.stored_tokens == 80

    @pytest.mark.parametrize("seed", range(30))
    @pytest.mark.parametrize("page_size", [1, 4])
    def test_ghosts_never_count_more_than_slow_twin(self, seed: int, page_size: int) -> None:
        """The twin knows every token that was evicted, by all that comes before it."""
        rng = random.Random(seed)
        rig = watched_rig(num_tokens=96, page_size=page_size)
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

            def node_stored(self, node) -> None:
                nonlocal again, gone
                again += len(gone & self.paths(node))
                gone = gone - self.paths(node)

            def path_used(self, node, tick) -> None:
                pass

            def nodes_removed(self, nodes) -> None:
                for node in nodes:
                    gone.update(self.paths(node))

            def cache_cleared(self) -> None:
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


class TestHistogram:
    def test_bucket_bounds_are_inclusive_upper_bounds(self) -> None:
        spread = Histogram((1.0, 10.0))
        spread.add_values(np.array([0.0, 1.0, 1.5, 10.0, 10.5, 99.0]), np.array([1.0, 2.0, 4.0, 8.0, 16.0, 32.0]))
        assert spread.counts == [3, 12, 48]
        assert spread.sum == 2 + 6 + 80 + 168 + 99 * 32
        spread.add_values(np.array([5.0]), np.array([100.0]))
        assert spread.counts == [3, 112, 48]
