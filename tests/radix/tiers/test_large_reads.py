"""A read that is larger than the host's memory reads as much as fits, from its start."""

from __future__ import annotations

import numpy as np
import pytest

from baton.radix.tiers.block_orders import BlockRead
from baton.radix.tiers.host_tier import HostPolicy
from tests.doubles.host_rig import DiskRig, tokens

PAGES = pytest.mark.parametrize("page", [1, 4, 16])


def rig_with(host_tokens: int, page: int, stored: int = 160) -> DiskRig:
    """So many tokens are on disk, in blocks of 16; nothing is in memory."""
    first = DiskRig(16, page_size=page)
    first.insert(tokens(stored))
    first.to_disk()
    rig = DiskRig(16, host_tokens=host_tokens, page_size=page)
    rig.blocks = first.blocks
    rig.disk._index = first.blocks
    return rig


def begin(rig: DiskRig, ids: np.ndarray) -> BlockRead | None:
    found = rig.disk.find_blocks("", ids)
    assert found is not None
    fence = rig.disk.begin_read(found, timeout=1.0)
    rig.check()
    if fence is None:
        return None
    rig.pump_disk()
    order = rig.orders[fence]
    assert isinstance(order, BlockRead)
    return order


def end(rig: DiskRig, order: BlockRead) -> None:
    rig.end_disk(order.fence)
    rig.check()


@PAGES
def test_large_read_is_cut_to_host_capacity(page: int) -> None:
    rig = rig_with(host_tokens=64, page=page)
    order = begin(rig, tokens(160))
    assert order is not None and len(order.keys) == 4 and len(order.host_slots) == 64
    end(rig, order)
    match = rig.cache.match_prefix("", tokens(160))
    assert (match.device_len, match.host_len) == (0, 64) and rig.disk.counts.missed == 0
    fence = rig.load(tokens(160))
    assert fence is not None
    rig.end(fence)
    rig.check()
    assert begin(rig, tokens(160)) is None, "what it goes on from fills the host"
    assert rig.cache.match_prefix("", tokens(160)).device_len == 64


@PAGES
def test_large_read_evicts_others_but_not_its_own_prefix(page: int) -> None:
    rig = rig_with(host_tokens=112, page=page)
    rig.insert(tokens(32))
    rig.insert(tokens(48, first=900))
    rig.store_all()
    order = begin(rig, tokens(160))
    assert order is not None and len(order.keys) == 5
    end(rig, order)
    assert rig.disk.counts.adopted == 80 and rig.tier.counts.evicted == 48
    match = rig.cache.match_prefix("", tokens(160))
    assert (match.device_len, match.host_len) == (32, 80)


@PAGES
def test_large_read_continues_from_host_prefix(page: int) -> None:
    """The end of what is cached is on the device alone."""
    rig = rig_with(host_tokens=96, page=page)
    rig.insert(tokens(32))
    rig.store_all()
    rig.tier.policy = HostPolicy(min_hits=99)
    rig.insert(tokens(64))
    order = begin(rig, tokens(160))
    assert order is not None and len(order.keys) == 4
    end(rig, order)
    match = rig.cache.match_prefix("", tokens(160))
    assert (match.device_len, match.host_len) == (64, 32)


@PAGES
def test_copies_in_flight_reduce_room_for_reads(page: int) -> None:
    rig = rig_with(host_tokens=112, page=page)
    rig.insert(tokens(48, first=900))
    rig.pump()
    order = begin(rig, tokens(160))
    assert order is not None and len(order.keys) == 4
    rig.end_all()
    end(rig, order)
    assert rig.cache.match_prefix("", tokens(160)).host_len == 64


@PAGES
def test_nothing_is_read_without_room_for_a_block(page: int) -> None:
    rig = rig_with(host_tokens=64, page=page)
    rig.insert(tokens(64, first=900))
    rig.pump()
    assert begin(rig, tokens(160)) is None and not rig.disk.take_orders(0.0)
    rig.end_all()
    assert begin(rig, tokens(160)) is not None


@PAGES
@pytest.mark.parametrize(("host_tokens", "blocks"), [(64, 0), (80, 5)])
def test_read_must_reach_beyond_device_prefix(host_tokens: int, blocks: int, page: int) -> None:
    """64 tokens are on the device, and have no copy on the host."""
    rig = rig_with(host_tokens=host_tokens, page=page)
    rig.tier.policy = HostPolicy(min_hits=99)
    rig.insert(tokens(64))
    order = begin(rig, tokens(160))
    assert (len(order.keys) if order is not None else 0) == blocks
    if order is not None:
        end(rig, order)
        match = rig.cache.match_prefix("", tokens(160))
        assert (match.device_len, match.host_len) == (64, 16)


@PAGES
def test_second_request_joins_read_and_reads_the_rest(page: int) -> None:
    rig = rig_with(host_tokens=64, page=page)
    order = begin(rig, tokens(160))
    assert order is not None
    again = rig.disk.find_blocks("", tokens(100))
    assert again is not None and again.under_way == order.fence
    end(rig, order)
    rest = rig.disk.find_blocks("", tokens(160))
    assert rest is not None and not rest.under_way and rest.first == 4
