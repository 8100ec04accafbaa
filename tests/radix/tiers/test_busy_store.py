"""A store that refuses, hangs or is behind costs nobody more than its own blocks."""

from __future__ import annotations

import numpy as np

from baton.radix.tiers.block_orders import BlockWrite
from tests.doubles.host_rig import DiskRig, names, tokens


def test_refused_block_is_written_only_once() -> None:
    rig = DiskRig(16)
    rig.insert(tokens(16 * 20))  # more blocks than may be under way at a time
    rig.store_all()
    asked: list[bytes] = []
    rig.pump_disk()
    while rig.orders:
        assert len(asked) < 100, "it is asked again and again"
        for fence in list(rig.orders):
            asked.append(rig.disk.writing[fence].key)
            rig.end_disk(fence, most=0)
        rig.pump_disk()
    assert len(asked) == len(set(asked)) == 20
    rig.insert(tokens(16 * 21))  # what goes on from there is a reason to try again
    rig.to_disk()
    assert len(rig.blocks.blocks) == 21


def test_blocks_are_written_in_order_of_storing() -> None:
    """Also where it has to wait for its prefix, or for room."""
    rig = DiskRig(16, host_tokens=1024)
    prefix, tails = tokens(16), [np.concatenate([tokens(16), tokens(16, first=first)]) for first in (100, 200)]
    rig.insert(prefix)
    for tail in tails:
        rig.insert(tail)
    rig.pump()
    for fence in sorted(rig.copies)[1:]:
        rig.end(fence)
    rig.pump_disk()
    assert not rig.orders
    rig.end_all()
    rig.insert(tokens(16 * 20, first=500))
    rig.insert(tokens(16, first=900))
    rig.store_all()
    written: list[bytes] = []
    rig.pump_disk()
    while rig.orders:
        written += [order.key for order in rig.orders.values() if isinstance(order, BlockWrite)]
        for fence in list(rig.orders):
            rig.end_disk(fence)
        rig.pump_disk()
    expected = [key for ids in (*tails, tokens(16 * 20, first=500), tokens(16, first=900)) for key in names(rig, ids)]
    assert written == [*dict.fromkeys(expected)]


def test_host_eviction_waits_only_for_own_writes() -> None:
    """A store may hang in one write for good."""
    rig = DiskRig(16, host_tokens=64)
    rig.insert(tokens(32))
    rig.to_disk()
    rig.insert(tokens(16, first=100))
    rig.store_all()
    rig.pump_disk()
    assert len(rig.orders) == 1
    assert rig.tier.evict(32) == 32 and rig.host_allocator.quarantined_tokens == 0
    assert rig.tier.evict(16) == 16 and rig.host_allocator.quarantined_tokens == 16
    rig.end_disk(next(iter(rig.orders)))
    rig.check()
    assert rig.host_allocator.quarantined_tokens == 0
    rig.insert(tokens(16, first=200))
    rig.to_disk()
    assert rig.tier.evict(16) == 16 and rig.host_allocator.quarantined_tokens == 0


def test_host_makes_room_beside_hanging_writes() -> None:
    rig = DiskRig(16, host_tokens=64)
    rig.insert(tokens(32))
    rig.store_all()
    rig.pump_disk()
    assert len(rig.orders) == 2  # they hang
    rig.insert(tokens(32, first=100))
    rig.store_all()
    rig.insert(tokens(32, first=200))
    rig.store_all()
    assert rig.cache.find_prefix("", tokens(32, first=200))[0].host is not None and not rig.tier.counts.no_room
    rig.check()


def test_read_does_not_evict_its_own_host_prefix() -> None:
    rig = DiskRig(16, host_tokens=96)
    rig.insert(tokens(64))
    rig.to_disk()
    rig.cache.evict(10**9)
    rig.tier.evict(32)
    rig.insert(tokens(32, first=200))
    rig.insert(tokens(32, first=300))
    rig.store_all()  # used later than the rest of the first, and the host is full
    found = rig.disk.find_blocks("", tokens(64))
    assert found is not None and found.first == 2
    fence = rig.disk.begin_read(found, timeout=1.0)
    assert fence is not None
    rig.pump_disk()
    while rig.orders:
        rig.end_disk(next(iter(rig.orders)))
        rig.pump_disk()
    match = rig.cache.match_prefix("", tokens(64))
    assert (match.device_len, match.host_len) == (0, 64)
    rig.check()
