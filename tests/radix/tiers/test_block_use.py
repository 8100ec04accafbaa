"""A store hears of use that it does not see: what is on the device or the host is never read from it."""

from __future__ import annotations

import numpy as np
import pytest

from baton.radix.discarding import drop_path
from baton.radix.tiers import block_tier
from baton.radix.tiers.block_orders import BlockTouch
from baton.radix.tiers.block_tier import TOUCH_S
from baton.radix.tiers.host_tier import HostPolicy
from tests.doubles.host_rig import DiskRig, names, tokens


def with_tail(first: int, prefix: int = 64, tail: int = 16) -> np.ndarray:
    return np.concatenate([tokens(prefix), tokens(tail, first=first)])


def settle(rig: DiskRig) -> list[tuple[bytes, ...]]:
    """All is written; the touches ordered since the last time, when the next may be."""
    rig.to_disk()
    rig.now += TOUCH_S
    rig.pump_disk()
    touches, rig.touches = rig.touches, []
    return touches


def test_extended_sequence_touches_its_prefix_blocks() -> None:
    rig = DiskRig(16)
    rig.insert(tokens(64))
    assert settle(rig) == [names(rig, tokens(64))]
    rig.insert(with_tail(500))
    assert settle(rig) == [names(rig, with_tail(500))] and rig.disk.counts.written == 80
    assert settle(rig) == [], "once for each use"


def test_touch_follows_writes_of_its_blocks() -> None:
    rig = DiskRig(16)
    rig.insert(tokens(64))
    rig.store_all()
    *writes, touch = rig.disk.take_orders(0.0)
    assert isinstance(touch, BlockTouch) and touch.store == "disk"
    assert [getattr(write, "key", None) for write in writes] == [*touch.keys] == [*names(rig, tokens(64))]


@pytest.mark.parametrize("policy", [HostPolicy(), HostPolicy(min_hits=2), HostPolicy(write_back=True)])
def test_match_touches_store_blocks(policy: HostPolicy) -> None:
    """Whatever becomes of the copy on the host, and whether or not anything new is computed."""
    rig = DiskRig(16)
    rig.insert(tokens(64))
    settle(rig)
    rig.tier.policy = policy
    assert rig.cache.match_prefix("", tokens(200)).device_len == 64
    assert settle(rig) == [names(rig, tokens(64))]
    rig.tier.evict(10**9)
    rig.cache.match_prefix("", tokens(40))
    assert settle(rig) == [names(rig, tokens(40))]
    rig.cache.match_prefix("", tokens(40, first=900))
    assert settle(rig) == [], "nothing was found"


def test_touches_of_store_are_rate_limited() -> None:
    rig = DiskRig(16)
    rig.insert(tokens(16 * 4))
    settle(rig)
    rig.cache.match_prefix("", tokens(64))
    rig.pump_disk()
    assert len(rig.touches) == 1
    for _ in range(100):
        rig.cache.match_prefix("", tokens(64))
        rig.pump_disk()
    rig.now += TOUCH_S - 0.1
    rig.pump_disk()
    assert len(rig.touches) == 1
    rig.now += 0.1
    rig.pump_disk()
    assert len(rig.touches) == 2


def test_many_writes_flush_touches_sooner() -> None:
    """What a full disk gives up depends on how much was written since."""
    rig = DiskRig(16, host_tokens=1024)
    rig.insert(tokens(64))
    settle(rig)
    rig.cache.match_prefix("", tokens(64))
    rig.pump_disk()
    rig.touches.clear()
    rig.cache.match_prefix("", tokens(64))
    rig.insert(tokens(16 * 5, first=500))
    rig.to_disk()
    assert rig.touches == [], "two paths and five blocks"
    rig.insert(tokens(16, first=900))
    rig.to_disk()
    assert rig.touches == [names(rig, tokens(64)), names(rig, tokens(80, first=500)), names(rig, tokens(16, first=900))]


def test_many_matches_flush_touches_sooner() -> None:
    rig = DiskRig(16, host_tokens=1024)
    for first in range(8):
        rig.insert(tokens(16, first=1 + 100 * first))
    settle(rig)
    rig.cache.match_prefix("", tokens(16))
    rig.pump_disk()
    rig.touches.clear()
    for first in range(8):
        assert rig.touches == []
        rig.cache.match_prefix("", tokens(16, first=1 + 100 * first))
        rig.pump_disk()
    assert len(rig.touches) == 8


def test_each_block_is_touched_once_in_order_of_last_use() -> None:
    rig = DiskRig(16)
    for first in (300, 400, 500):
        rig.insert(with_tail(first))
    settle(rig)
    for first in (400, 500, 300, 400):
        rig.cache.match_prefix("", with_tail(first))
    whole = {first: names(rig, with_tail(first)) for first in (300, 400, 500)}
    assert settle(rig) == [whole[500][4:], whole[300][4:], whole[400]]


def test_only_stored_blocks_are_touched() -> None:
    rig = DiskRig(16)
    rig.insert(tokens(64))
    rig.store_all()
    rig.pump_disk()
    for fence, count in zip(list(rig.orders), (1, 0, 1, 0)):
        rig.end_disk(fence, most=count)
    keys = names(rig, tokens(64))
    settle(rig)
    rig.cache.match_prefix("", tokens(64))
    assert settle(rig) == [(keys[0], keys[2])]


def test_long_sequences_are_touched_in_parts_from_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_tier, "MAX_ASKED", 3)
    rig = DiskRig(16)
    rig.insert(tokens(16 * 8))
    keys = names(rig, tokens(16 * 8))
    assert settle(rig) == [keys[6:], keys[3:6], keys[:3]]


def test_touch_waits_until_sequence_is_written() -> None:
    """What is written after its beginning was touched would outlive it."""
    rig = DiskRig(16)
    rig.insert(tokens(16 * 20))  # more than may be under way at a time
    rig.store_all()
    while rig.disk.counts.written < 16 * 20:
        assert rig.touches == []
        rig.pump_disk()
        for fence in list(rig.orders):
            rig.end_disk(fence)
    assert rig.touches == [names(rig, tokens(16 * 20))]


@pytest.mark.parametrize("end", ["evicted", "hidden", "reset"])
def test_removed_nodes_are_not_touched(end: str) -> None:
    rig = DiskRig(16)
    rig.insert(tokens(64))
    settle(rig)
    handle = rig.cache.match_prefix("", tokens(64)).handle
    match end:
        case "evicted":
            rig.cache.evict(10**9)
            rig.tier.evict(10**9)
        case "hidden":
            rig.cache.lock(handle)
            drop_path(rig.cache, handle)
            rig.cache.unlock(handle)
        case "reset":
            assert rig.cache.reset() and not rig.disk._used
    assert settle(rig) == []
