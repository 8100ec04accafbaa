"""The disk tier over a memory that remembers what was computed where: a block is what its name says, whatever was
split, given up, reset or late meanwhile."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.radix.discarding import drop_path
from baton.radix.tiers.host_tier import HostPolicy
from tests.doubles.cache_rig import Running, int32
from tests.doubles.host_rig import DiskRig, tokens

PAGES = pytest.mark.parametrize("page", [1, 4, 16])


def forget_all(rig: DiskRig) -> None:
    """Nothing is left but what is on disk."""
    rig.cache.evict(10**9)
    rig.tier.evict(10**9)
    rig.check()
    assert rig.cache.total_nodes == 0


def read(rig: DiskRig, ids: np.ndarray, namespace: str = "") -> int | None:
    """Order what the disk has of ``ids``; the fence."""
    found = rig.disk.find_blocks(namespace, ids)
    if found is None or found.under_way:
        return None
    fence = rig.disk.begin_read(found, timeout=1.0)
    rig.pump_disk()
    return fence


@PAGES
def test_blocks_evicted_from_memory_are_read_from_disk(page: int) -> None:
    rig = DiskRig(16, page_size=page)
    rig.insert(tokens(70))
    rig.to_disk()
    assert len(rig.blocks.blocks) == 4 and rig.disk.counts.written == 64
    forget_all(rig)
    fence = read(rig, tokens(70))
    assert fence is not None
    rig.check()
    rig.end_disk(fence)
    rig.check()
    match = rig.cache.match_prefix("", tokens(70))
    assert (match.device_len, match.host_len) == (0, 64) and rig.disk.counts.adopted == 64
    fence = rig.load(tokens(70))
    assert fence is not None
    rig.end(fence)
    rig.check()


@PAGES
def test_only_blocks_absent_from_memory_are_read(page: int) -> None:
    rig = DiskRig(16, page_size=page)
    rig.insert(tokens(64))
    rig.to_disk()
    assert rig.disk.find_blocks("", tokens(200)) is None, "all that is on disk is here too"
    forget_all(rig)
    rig.insert(tokens(32))
    rig.store_all()
    found = rig.disk.find_blocks("", tokens(200))
    assert found is not None and (found.first, len(found.keys), found.gain) == (2, 2, 32)
    assert rig.disk.find_blocks("", tokens(47)) is None, "no whole block more"
    assert rig.disk.find_blocks("other", tokens(200)) is None and rig.disk.find_blocks("", tokens(200, first=2)) is None


@PAGES
def test_block_being_read_is_not_read_twice(page: int) -> None:
    rig = DiskRig(16, page_size=page)
    rig.insert(tokens(64))
    rig.to_disk()
    forget_all(rig)
    fence = read(rig, tokens(64))
    assert fence is not None
    for count in (64, 48, 16):
        found = rig.disk.find_blocks("", tokens(count))
        assert found is not None and found.under_way == fence
    rig.end_disk(fence, most=1)
    rig.check()
    found = rig.disk.find_blocks("", tokens(64))
    assert found is not None and not found.under_way and found.first == 1, "the rest may be tried again"


@PAGES
def test_read_adopts_only_missing_blocks(page: int) -> None:
    """What was computed or brought meanwhile keeps its own copies."""
    rig = DiskRig(16, page_size=page)
    rig.insert(tokens(64))
    rig.to_disk()
    forget_all(rig)
    fence = read(rig, tokens(64))
    assert fence is not None
    rig.insert(np.concatenate([tokens(32), tokens(16, first=500)]))
    rig.store_all()
    rig.end_disk(fence)
    rig.check()
    assert rig.disk.counts.adopted == 32
    match = rig.cache.match_prefix("", tokens(64))
    assert (match.device_len, match.host_len) == (32, 32)


@PAGES
def test_read_adopts_no_block_behind_a_gap(page: int) -> None:
    rig = DiskRig(16, page_size=page, policy=HostPolicy(min_hits=99))
    rig.insert(tokens(64))
    rig.tier.policy = HostPolicy()
    rig.tier.node_inserted(rig.cache.match_prefix("", tokens(64)).handle)
    rig.to_disk()
    forget_all(rig)
    rig.insert(tokens(32))
    rig.store_all()
    fence = read(rig, tokens(64))
    assert fence is not None
    rig.tier.evict(10**9)  # the first 32 are on the device only by now
    rig.end_disk(fence)
    rig.check()
    assert rig.disk.counts.adopted == 0 and rig.cache.match_prefix("", tokens(64)).host_len == 0


@PAGES
def test_read_adopts_no_copy_without_a_host_prefix(page: int) -> None:
    rig = DiskRig(16, page_size=page)
    rig.insert(tokens(64))
    rig.to_disk()
    forget_all(rig)
    rig.insert(tokens(32))
    rig.store_all()
    fence = read(rig, tokens(64))
    assert fence is not None
    rig.tier.policy = HostPolicy(min_hits=99)
    rig.insert(tokens(64))  # all of it is on the device by now, and its end on no other tier
    rig.tier.evict(10**9)
    rig.end_disk(fence)
    rig.check()
    assert rig.disk.counts.read == 32 and rig.disk.counts.adopted == 0


@PAGES
def test_concurrent_reads_take_at_most_a_quarter_of_host(page: int) -> None:
    rig = DiskRig(16, host_tokens=256, page_size=page)
    for first in (0, 1000, 2000):
        rig.insert(tokens(48, first=first + 1))
    rig.to_disk()
    forget_all(rig)
    one = read(rig, tokens(48))
    assert one is not None, "the first may take more"
    assert read(rig, tokens(48, first=1001)) is None
    rig.end_disk(one)
    assert read(rig, tokens(48, first=1001)) is not None
    rig.check()


@PAGES
def test_block_contents_are_kept_during_write(page: int) -> None:
    rig = DiskRig(16, host_tokens=64, page_size=page)
    rig.insert(tokens(64))
    rig.store_all()
    rig.pump_disk()
    assert len(rig.orders) == 4
    rig.tier.evict(64)
    rig.check()
    assert rig.host_allocator.free_tokens == 0 and rig.host_allocator.quarantined_tokens == 64
    rig.insert(tokens(64, first=900))
    rig.store_all()
    rig.check()
    for fence in list(rig.orders):
        rig.end_disk(fence)
    assert rig.host_allocator.free_tokens == 64
    forget_all(rig)
    fence = read(rig, tokens(64))
    assert fence is not None
    rig.end_disk(fence)
    rig.check()


@PAGES
def test_slot_shared_by_two_writes_waits_for_both(page: int) -> None:
    """Two blocks begin with the same node; the second to be ordered ends first."""
    rig = DiskRig(64, host_tokens=128, page_size=page)
    for first in (500, 900):
        rig.insert(np.concatenate([tokens(32), tokens(32, first=first)]))
    rig.store_all()
    rig.pump_disk()
    one, two = rig.orders
    rig.end_disk(two)
    rig.tier.evict(10**9)
    rig.check()
    assert rig.host_allocator.quarantined_tokens == 64, "the block of 64 that is still being read"
    rig.insert(tokens(64, first=2000))
    rig.store_all()
    rig.end_disk(one)
    rig.check()
    assert not rig.host_allocator.quarantined_tokens


@PAGES
def test_block_spanning_nodes_waits_for_all_of_them(page: int) -> None:
    rig = DiskRig(64, page_size=page)
    rig.insert(tokens(32))
    rig.insert(tokens(96))
    rig.pump()
    upper, lower = sorted(rig.copies, key=lambda fence: len(rig.copies[fence].host_slots))
    rig.end(lower)
    rig.pump_disk()
    assert not rig.orders, "the first half of the block is not on the host"
    rig.end(upper)
    rig.pump_disk()
    assert len(rig.orders) == 1
    rig.end_disk(next(iter(rig.orders)))
    rig.check()


@PAGES
def test_failed_write_stores_no_block(page: int) -> None:
    rig = DiskRig(16, page_size=page)
    rig.insert(tokens(32))
    rig.store_all()
    rig.pump_disk()
    for fence in list(rig.orders):
        rig.end_disk(fence, most=0)
    assert rig.disk.counts.failed_writes == 32
    forget_all(rig)
    assert rig.disk.find_blocks("", tokens(32)) is None


@PAGES
@pytest.mark.parametrize("abandon", [False, True])
def test_reset_quarantines_slots_of_disk_orders_in_flight(page: int, abandon: bool) -> None:
    rig = DiskRig(16, page_size=page)
    rig.insert(tokens(64))
    rig.to_disk()
    forget_all(rig)
    rig.insert(tokens(32, first=900))
    rig.store_all()
    rig.pump_disk()
    reading = read(rig, tokens(64))
    assert reading is not None and len(rig.orders) == 3
    rig.cache.discard_all() if abandon else rig.cache.reset()
    held = rig.host_allocator.total_tokens - rig.host_allocator.free_tokens
    assert held == 64 + 32 and rig.host_allocator.quarantined_tokens == held
    rig.check()
    for fence in list(rig.orders):
        rig.end_disk(fence)
    rig.check()
    assert rig.cache.total_nodes == 0 and rig.host_allocator.free_tokens == rig.host_allocator.total_tokens
    again = read(rig, tokens(64))
    assert again is not None, "it may be asked for again"
    rig.end_disk(again)
    rig.check()


@pytest.mark.parametrize("cycles", [2_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_tier_cycles_leak_nothing(cycles: int) -> None:
    """Prompts go round between device, host and disk; memory for a few of them on each."""
    rig = DiskRig(16, host_tokens=96, num_tokens=64, page_size=16)
    sizes = set()
    for cycle in range(cycles):
        ids = tokens(33, first=1 + 1000 * (cycle % 7))
        if (fence := read(rig, ids)) is not None:
            rig.end_disk(fence)
        if (fence := rig.load(ids)) is not None:
            rig.end(fence, ok=cycle % 50 != 0)
        rig.insert(ids)
        rig.pump()
        rig.end_all(ok=cycle % 30 != 0)
        rig.pump_disk()
        for fence in list(rig.orders):
            rig.end_disk(fence)
        if cycle % 250 == 0:
            rig.check()
            sizes.add((rig.cache.total_nodes, len(rig.tier.order), sum(1 for _ in rig.cache.order.entries())))
    assert max(map(max, sizes)) <= 16, sizes
    assert rig.tier.counts.loaded > cycles and rig.disk.counts.adopted > cycles // 10
    assert not len(rig.allocator.fences) and rig.cache.reset()
    assert rig.allocator.free_tokens == 64 and rig.host_allocator.free_tokens == 96


@PAGES
def test_random_tier_operations_keep_invariants(page: int) -> None:
    adopted = [random_life(seed, page) for seed in range(8)]
    assert sum(adopted) > 0, adopted


def random_life(seed: int, page: int) -> int:
    """Returns the tokens that came back from disk."""
    rng = random.Random(seed)
    rig = DiskRig(
        page * rng.choice([1, 1, 4]),
        page * rng.choice([20, 40]),
        policy=HostPolicy(write_back=rng.random() < 0.3),
        num_tokens=page * rng.choice([24, 60]),
        page_size=page,
    )
    stems = [[rng.randrange(3) for _ in range(6 * page + 10)] for _ in range(3)]

    def some_ids() -> np.ndarray:
        stem = rng.choice(stems)
        return int32(*stem[: rng.randrange(1, len(stem))], *(rng.randrange(3) for _ in range(rng.randrange(1, 9))))

    def pick() -> Running | None:
        return rng.choice(rig.running) if rig.running else None

    said: list[np.ndarray] = [some_ids()]

    def insert() -> None:
        if rig.pool.num_free:
            said.append(some_ids())
            whole = rig.start(said[-1])
            rig.finish(whole) if rig.compute(whole) else rig.release(whole)

    def start() -> None:
        if rig.pool.num_free:
            rig.start(some_ids(), rng.choice(["", "salt"]))

    def compute() -> None:
        if (running := pick()) is not None:
            rig.compute(running, rng.randrange(running.committed, len(running.ids) + 1))

    def publish() -> None:
        if (running := pick()) is not None:
            rig.publish(running)

    def leave() -> None:
        if (running := pick()) is not None:
            rng.choice([rig.finish, rig.finish, rig.release])(running)

    def end() -> None:
        if rig.copies:
            bad = rig.end(rng.choice(list(rig.copies)), ok=rng.random() < 0.9)
            if bad is not None:
                for running in list(rig.running):
                    if np.isin(rig.pool.rows[running.kv.row, : running.kv.length], bad).any():
                        rig.release(running)

    def end_disk() -> None:
        if rig.orders:
            rig.end_disk(rng.choice(list(rig.orders)), rng.choice([0, 1, 100, 100, 100]))

    def lose() -> None:
        if rig.blocks.blocks:
            del rig.blocks.blocks[rng.choice(list(rig.blocks.blocks))]

    def distrust() -> None:
        match = rig.cache.match_prefix("", some_ids())
        if match.device_len and not rig.running:
            drop_path(rig.cache, match.handle, kept=0)

    def reset() -> None:
        for running in list(rig.running):
            rig.finish(running)
        assert rig.cache.reset()

    weights = {
        reset: 0.5,
        insert: 8,
        start: 3,
        compute: 6,
        publish: 4,
        leave: 4,
        rig.pump: 4,
        end: 6,
        distrust: 0.3,
        lose: 1,
    }
    weights |= {rig.pump_disk: 4, end_disk: 6, lambda: read(rig, rng.choice(said)): 8}
    weights |= {lambda: rig.load(some_ids(), rng.choice(["", "salt"])): 4}
    weights |= {
        lambda: rig.cache.evict(rng.randrange(20 * page)): 4,
        lambda: rig.tier.evict(rng.randrange(20 * page)): 3,
    }
    for _ in range(400):
        rng.choices(list(weights), list(weights.values()))[0]()
        rig.check()
    rig.end_all()
    for running in list(rig.running):
        rig.release(running)
    for fence in list(rig.orders):
        rig.end_disk(fence)
    rig.cache.reset()
    rig.pump()
    rig.end_all()
    rig.check()
    assert rig.verify().free == rig.allocator.total_tokens and rig.cache.total_nodes == 0, f"seed {seed}"
    assert rig.host_allocator.free_tokens == rig.host_allocator.total_tokens and not len(rig.allocator.fences)
    return rig.disk.counts.adopted
