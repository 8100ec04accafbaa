"""The host tier over a memory that remembers what was computed where: what comes back is what was stored, copies end in
any order and fail, and no slot of either pool is ever lost or owned twice."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.radix.discarding import drop_path
from baton.radix.tiers.host_tier import HostPolicy
from tests.doubles.cache_rig import Running, int32
from tests.doubles.host_rig import TierRig, tokens

PAGES = pytest.mark.parametrize("page", [1, 4, 16])


@PAGES
class TestLife:
    def test_evicted_tokens_are_loaded_from_host(self, page: int) -> None:
        rig = TierRig(page_size=page)
        rig.insert(tokens(64))
        rig.store_all()
        assert rig.tier.tokens == rig.tier.counts.stored == 64
        assert rig.cache.evict(64) == 64 and rig.verify().free == rig.allocator.total_tokens
        match = rig.cache.match_prefix("", tokens(64))
        assert (match.device_len, match.host_len) == (0, 64) and rig.cache.match_len("", tokens(64)) == 64
        fence = rig.load(tokens(64))
        assert fence is not None
        rig.check()
        rig.end(fence)
        rig.check()
        assert rig.cache.match_prefix("", tokens(64)).device_len == 64 and rig.tier.counts.loaded == 64

    def test_evicted_tokens_without_host_copy_are_gone(self, page: int) -> None:
        rig = TierRig(page_size=page)
        rig.insert(tokens(64))
        rig.cache.evict(64)
        assert rig.cache.match_len("", tokens(64)) == 0 and rig.cache.total_nodes == 0
        rig.pump()
        assert not rig.copies, "nobody stores what has left"

    def test_slots_of_copies_in_flight_are_not_evicted(self, page: int) -> None:
        rig = TierRig(page_size=page, num_tokens=64)
        rig.insert(tokens(64))
        rig.pump()
        assert rig.cache.evict(64) == 0, "what is read stays"
        rig.end_all()
        assert rig.cache.evict(64) == 64
        fence = rig.load(tokens(64))
        assert fence is not None and rig.cache.evict(64) == 0, "what is written stays"
        assert rig.tier.evict(64) == 0, "what is read on the host stays too"
        rig.end(fence)
        rig.check()
        assert rig.tier.evict(64) == 64 and rig.cache.match_prefix("", tokens(64)).device_len == 64

    def test_failed_store_is_never_matched(self, page: int) -> None:
        rig = TierRig(page_size=page)
        rig.insert(tokens(64))
        rig.pump()
        rig.end_all(ok=False)
        rig.check()
        assert rig.tier.tokens == 0 and rig.tier.counts.failed_stores == 64
        rig.cache.evict(64)
        assert rig.cache.match_len("", tokens(64)) == 0

    def test_failed_load_is_never_matched_and_returns_its_slots(self, page: int) -> None:
        rig = TierRig(page_size=page)
        rig.insert(tokens(64))
        rig.store_all()
        rig.cache.evict(64)
        fence = rig.load(tokens(64))
        assert fence is not None
        device_slots = rig.copies[fence].device_slots
        bad = rig.end(fence, ok=False)
        assert bad is not None and sorted(bad) == sorted(device_slots)
        rig.check()
        assert rig.cache.match_len("", tokens(64)) == 0 and rig.tier.tokens == 0
        rig.cache.evict(64)
        assert rig.verify().free == rig.allocator.total_tokens

    def test_recomputed_tokens_rejoin_their_host_node(self, page: int) -> None:
        """A request that did not wait for the host brings its own KV: the node is on the device again, once."""
        rig = TierRig(page_size=page)
        rig.insert(tokens(64))
        rig.store_all()
        rig.cache.evict(64)
        running = rig.start(tokens(80))
        assert running.kv.tree_len == 0, "opened on what the device has"
        assert rig.compute(running)
        rig.publish(running)
        rig.check()
        assert running.kv.tree_len == 80 and rig.tier.tokens == 64
        rig.finish(running)
        rig.store_all()
        rig.check()
        assert rig.tier.tokens == 80, "only what is new is stored"

    def test_full_host_evicts_least_recently_used(self, page: int) -> None:
        rig = TierRig(page_size=page, host_tokens=128)
        for first in (1000, 2000):
            rig.insert(tokens(64, first))
            rig.store_all()
        rig.cache.match_prefix("", tokens(64, 1000))
        rig.cache.evict(128)
        rig.insert(tokens(64, 3000))
        rig.store_all()
        rig.check()
        assert rig.cache.match_len("", tokens(64, 1000)) == 64 and rig.cache.match_len("", tokens(64, 2000)) == 0
        assert rig.tier.counts.evicted == 64

    def test_prefix_is_stored_before_its_continuation(self, page: int) -> None:
        rig = TierRig(page_size=page, policy=HostPolicy(min_hits=2))
        rig.insert(tokens(48))
        rig.insert(np.concatenate([tokens(48), tokens(16, 500)]))
        rig.pump()
        assert not rig.copies
        for _ in range(2):
            rig.cache.match_prefix("", np.concatenate([tokens(48), tokens(16, 500)]))
        rig.pump()
        assert [len(copy.device_slots) for copy in rig.copies.values()] == [48, 16]
        rig.check()

    def test_drop_path_removes_host_copies(self, page: int) -> None:
        rig = TierRig(page_size=page)
        rig.insert(tokens(64))
        rig.insert(np.concatenate([tokens(32), tokens(32, 700)]))
        rig.store_all()
        node = rig.cache.match_prefix("", tokens(64)).handle
        drop_path(rig.cache, node, kept=32)
        rig.check()
        assert rig.tier.tokens == 32 + 32 and rig.cache.match_len("", tokens(64)) == 32
        drop_path(rig.cache, rig.cache.match_prefix("", tokens(32)).handle)
        rig.check()
        assert rig.tier.tokens == 0 and rig.cache.total_nodes == 0, "the other branch hangs on it"

    def test_host_slots_of_store_in_flight_are_not_reused(self, page: int) -> None:
        rig = TierRig(page_size=page, host_tokens=64)
        rig.insert(tokens(64))
        rig.pump()
        drop_path(rig.cache, rig.cache.match_prefix("", tokens(64)).handle)
        rig.insert(tokens(64, 2000))
        (fence,) = rig.copies
        rig.pump()
        assert list(rig.copies) == [fence], "there is no room yet"
        rig.check()
        rig.end(fence)
        rig.check()
        assert rig.host_allocator.free_tokens == 64 and rig.tier.counts.no_room == 64

    def test_store_does_not_evict_its_own_prefix(self, page: int) -> None:
        rig = TierRig(page_size=page, host_tokens=48)
        rig.insert(tokens(32))
        rig.store_all()
        rig.insert(tokens(64))
        rig.store_all()
        rig.check()
        assert rig.tier.counts.no_room == 32

    def test_tokens_being_stored_are_bounded(self, page: int) -> None:
        rig = TierRig(page_size=page, policy=HostPolicy(max_storing=64))
        for first in (1000, 2000, 3000):
            rig.insert(tokens(48, first))
        rig.pump()
        assert len(rig.copies) == 2
        rig.pump()
        assert len(rig.copies) == 2
        rig.end(next(iter(rig.copies)))
        rig.pump()
        assert len(rig.copies) == 2 and rig.tier.counts.stored == 48

    def test_host_match_counts_as_access_on_both_tiers(self, page: int) -> None:
        rig = TierRig(page_size=page)
        for first in (1000, 2000):
            rig.insert(tokens(48, first))
            rig.insert(np.concatenate([tokens(48, first), tokens(16, first + 500)]))
        rig.store_all()
        rig.cache.evict(16)
        assert rig.cache.match_prefix("", tokens(48, 2000)).device_len == 48
        old = np.concatenate([tokens(48, 1000), tokens(16, 1500)])
        match = rig.cache.match_prefix("", old)
        assert (match.device_len, match.host_len) == (48, 16)
        rig.cache.evict(16 + 48)
        assert rig.cache.match_prefix("", old).device_len == 48, "what the other has goes first"
        rig.tier.evict(16 + 48)
        assert rig.cache.match_len("", old) == 64 and rig.cache.match_len("", tokens(48, 2000)) == 0
        rig.check()

    def test_reset_keeps_slots_of_copies_in_flight(self, page: int) -> None:
        rig = TierRig(page_size=page, num_tokens=128, host_tokens=128)
        rig.insert(tokens(64))
        rig.store_all()
        rig.cache.evict(64)
        rig.load(tokens(64))
        rig.insert(tokens(32, 900))
        rig.pump()
        running = rig.start(tokens(3, 5000))
        handle = rig.cache.match_prefix("", tokens(64)).handle
        rig.cache.lock(handle)
        assert rig.cache.reset() is False, "somebody else holds a node"
        rig.cache.unlock(handle)
        rig.check()
        rig.release(running)
        assert rig.cache.reset() is True
        rig.check()
        assert rig.allocator.quarantined_tokens == rig.host_allocator.quarantined_tokens == 64 + 32
        rig.insert(tokens(32, 900))
        rig.check()
        rig.end_all()
        rig.store_all()
        rig.check()
        assert rig.allocator.quarantined_tokens == 0 and rig.tier.tokens == 32

    def test_abandon_keeps_slots_of_copies_in_flight(self, page: int) -> None:
        rig = TierRig(page_size=page, num_tokens=128, host_tokens=128)
        rig.insert(tokens(64))
        rig.store_all()
        rig.cache.evict(64)
        rig.load(tokens(64))
        rig.insert(tokens(32, 900))
        rig.pump()
        rig.start(tokens(3, 5000))
        rig.cache.discard_all()
        rig.running.clear()
        assert rig.allocator.free_tokens == rig.host_allocator.free_tokens == 128 - 96
        rig.check()
        for fence in list(rig.copies):
            assert rig.end(fence, ok=False) is None, "nobody uses these slots"
        rig.check()
        assert rig.allocator.free_tokens == rig.host_allocator.free_tokens == 128

    def test_hidden_nodes_are_not_stored(self, page: int) -> None:
        rig = TierRig(page_size=page)
        running = rig.start(tokens(64))
        assert rig.compute(running)
        rig.publish(running)
        assert running.kv.node is not None
        drop_path(rig.cache, running.kv.node)
        rig.pump()
        assert not rig.copies
        rig.finish(running)
        rig.pump()
        assert not rig.copies and rig.tier.tokens == 0


@PAGES
def test_host_pool_with_leak_can_be_abandoned(page: int) -> None:
    """The device goes on, and so do copies under way; the host starts afresh."""
    rig = TierRig(page_size=page)
    rig.insert(tokens(64))
    rig.insert(tokens(64, first=500))
    rig.store_all()
    rig.cache.evict(64)
    rig.insert(tokens(32, first=900))
    rig.pump()
    fence = rig.load(tokens(64))
    assert fence is not None and rig.tier.unaccounted_tokens == 0 and len(rig.copies) == 2
    lost = rig.host_allocator.alloc_extend(int32(0), int32(page), int32(0))
    assert lost is not None and rig.tier.unaccounted_tokens == page
    rig.tier.discard_copies()
    rig.check()
    assert rig.tier.unaccounted_tokens == 0 and rig.tier.tokens == 0
    rig.end_all()
    rig.check()
    assert (
        rig.cache.match_prefix("", tokens(64)).device_len == 64 and rig.cache.match_prefix("", tokens(64)).host_len == 0
    )
    assert rig.host_allocator.free_tokens == rig.host_allocator.total_tokens
    rig.insert(tokens(16, first=700))
    rig.store_all()
    rig.check()


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("seed", range(8))
def test_random_tier_operations_keep_invariants(seed: int, page: int) -> None:
    rng = random.Random(seed)
    policy = HostPolicy(min_hits=rng.choice([0, 0, 2]), max_storing=page * rng.choice([4, 1000]))
    rig = TierRig(page * rng.choice([20, 60]), policy, num_tokens=page * rng.choice([24, 60]), page_size=page)
    stems = [[rng.randrange(3) for _ in range(6 * page + 10)] for _ in range(3)]

    def some_ids() -> np.ndarray:
        stem = rng.choice(stems)
        return int32(*stem[: rng.randrange(1, len(stem))], *(rng.randrange(3) for _ in range(rng.randrange(1, 9))))

    def start() -> None:
        if rig.pool.num_free:
            rig.start(some_ids(), rng.choice(["", "salt"]))

    def pick() -> Running | None:
        return rng.choice(rig.running) if rig.running else None

    def compute() -> None:
        if (running := pick()) is not None:
            rig.compute(running, rng.randrange(running.committed, len(running.ids) + 1))

    def leave() -> None:
        if (running := pick()) is not None:
            rng.choice([rig.finish, rig.finish, rig.release])(running)

    def publish() -> None:
        if (running := pick()) is not None:
            rig.publish(running)

    def end() -> None:
        if rig.copies:
            fence = rng.choice(list(rig.copies))
            bad = rig.end(fence, ok=rng.random() < 0.85)
            if bad is not None:  # whoever reads these slots has nothing
                for running in list(rig.running):
                    if np.isin(rig.pool.rows[running.kv.row, : running.kv.length], bad).any():
                        rig.release(running)

    def distrust() -> None:
        match = rig.cache.match_prefix("", some_ids())
        if match.device_len and not rig.running:
            drop_path(rig.cache, match.handle, kept=rng.choice([0, page]) if match.device_len > page else 0)

    def reset() -> None:
        assert rig.cache.reset() is (not rig.running)

    weights = {reset: 0.3, start: 5, compute: 6, publish: 4, leave: 3, rig.pump: 4, end: 5, distrust: 0.5}
    weights |= {lambda: rig.load(some_ids(), rng.choice(["", "salt"])): 4}
    weights |= {lambda: rig.cache.evict(rng.randrange(8 * page)): 3, lambda: rig.tier.evict(rng.randrange(4 * page)): 1}
    for _ in range(400):
        rng.choices(list(weights), list(weights.values()))[0]()
        rig.check()
    rig.end_all()
    for running in list(rig.running):
        rig.release(running)
    rig.cache.evict(10**9)
    rig.tier.evict(10**9)
    rig.check()
    assert rig.verify().free == rig.allocator.total_tokens and rig.cache.total_nodes == 0, f"seed {seed}"
    assert rig.host_allocator.free_tokens == rig.host_allocator.total_tokens and not len(rig.allocator.fences)


def test_host_only_path_can_be_dropped() -> None:
    rig = TierRig()
    rig.insert(tokens(8))
    rig.store_all()
    rig.cache.evict(8)
    match = rig.cache.match_prefix("", tokens(8))
    assert match.host_len == 8 and match.host_handle is not None
    drop_path(rig.cache, match.host_handle, 3)
    rig.check()
    assert rig.cache.match_len("", tokens(8)) == 3
    rig.insert(tokens(2, 50))
    assert rig.cache.evict(100) == 2  # what is not on the device does not leave it once more
    rig.check()
