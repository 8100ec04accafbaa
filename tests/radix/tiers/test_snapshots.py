"""Recurrent states behind the host: one is found, read and adopted with exactly the KV it stands behind, or not at
all."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from baton.memory_pool.stores.block_keys import MAX_PLACES, block_keys, tail_keys
from baton.radix.node import StateKind
from baton.radix.tiers.block_orders import BlockFind, BlockRead, BlockWrite
from baton.radix.tiers.block_tier import BlockTier
from baton.radix.tiers.host_tier import HostPolicy
from tests.doubles.host_rig import DiskRig, tokens
from tests.doubles.state_disk import StateDiskRig
from tests.doubles.state_rig import path_of

IDS = tokens(40)
"""Two blocks of 16 tokens, and a tail of two pages."""
NEXT = np.concatenate([IDS, tokens(28, 500)])


def on_disk(ids: np.ndarray = IDS, **options: Any) -> StateDiskRig:
    """One turn is on disk and nowhere else."""
    rig = StateDiskRig(**options)
    rig.turn(ids)
    rig.to_disk()
    rig.forget_all()
    return rig


def read(rig: StateDiskRig, ids: np.ndarray, namespace: str = "") -> int | None:
    """Order what the disk has of ``ids``; the fence."""
    found = rig.disk.find_blocks(namespace, ids)
    if found is None or found.under_way:
        return None
    fence = rig.disk.begin_read(found, timeout=1.0)
    rig.pump_disk()
    rig.check()
    return fence


class TestRoundTrip:
    @pytest.mark.parametrize("length", [4, 12, 16, 32, 40, 44])
    def test_state_comes_back_with_exactly_its_tokens(self, length: int) -> None:
        rig = on_disk(NEXT[:length])
        assert len(rig.blocks.blocks) == length // 16 and rig.disk.counts.stored_states == 1
        fence = read(rig, NEXT)
        assert fence is not None
        rig.end_disk(fence)
        rig.check()
        assert rig.cache.match_prefix("", NEXT).host_len == length
        assert (rig.disk.counts.adopted, rig.disk.counts.loaded_states) == (length, 1)
        fence = rig.load(NEXT)
        assert fence is not None
        rig.end(fence)
        rig.check()
        assert rig.start(np.append(NEXT, np.int32(9))).kv.length == length

    def test_deepest_snapshot_that_the_tokens_reach_is_found(self) -> None:
        rig = StateDiskRig()
        rig.turn(IDS)
        rig.to_disk()
        rig.turn(NEXT)
        rig.to_disk()
        rig.forget_all()
        for ids, length in ((NEXT, 68), (NEXT[:67], 40), (IDS, 40), (IDS[:39], 0)):
            found = rig.disk.find_blocks("", ids)
            assert (len(found.ids) if found is not None else 0) == length
        assert rig.disk.find_blocks("other", NEXT) is None, "namespaces share nothing"
        changed = NEXT.copy()
        changed[41] = 7
        found = rig.disk.find_blocks("", changed)
        assert found is not None and len(found.ids) == 40
        changed[37] = 7
        assert rig.disk.find_blocks("", changed) is None, "the tail counts"

    def test_snapshot_whose_blocks_are_gone_is_of_no_use(self) -> None:
        rig = on_disk()
        rig.blocks.blocks.popitem()
        assert rig.disk.find_blocks("", NEXT) is None

    def test_blocks_without_a_snapshot_are_of_no_use(self) -> None:
        rig = on_disk()
        rig.snapshots.by_key.clear()
        assert rig.disk.find_blocks("", NEXT) is None

    def test_state_that_the_host_lost_comes_back_to_its_kv(self) -> None:
        """Only the tail is read with it."""
        rig = StateDiskRig()
        rig.turn(IDS)
        rig.to_disk()
        rig.cache.evict_states(1, kept_too=True)
        assert rig.nodes.evict_from_host() is not None
        assert rig.cache.match_prefix("", NEXT).host_len == 0
        fence = read(rig, NEXT)
        assert fence is not None
        order = rig.orders[fence]
        assert isinstance(order, BlockRead) and not order.keys and len(order.host_slots) == 8
        rig.end_disk(fence)
        rig.check()
        match = rig.cache.match_prefix("", NEXT)
        assert (match.device_len, match.host_len) == (0, 40) and rig.disk.counts.adopted == 0

    def test_state_at_the_end_of_a_block_needs_no_slots_for_tokens(self) -> None:
        rig = StateDiskRig()
        rig.turn(NEXT[:32])
        rig.to_disk()
        rig.cache.evict_states(1, kept_too=True)
        rig.nodes.evict_from_host()
        fence = read(rig, NEXT)
        assert fence is not None and not len(rig.orders[fence].host_slots)  # type: ignore[union-attr]
        rig.end_disk(fence)
        rig.check()
        assert rig.cache.match_prefix("", NEXT).host_len == 32

    def test_state_in_the_middle_of_what_the_host_has_comes_back(self) -> None:
        """The host has more whole blocks than lie before the snapshot."""
        rig = StateDiskRig()
        rig.turn(IDS)
        rig.to_disk()
        rig.turn(NEXT, StateKind.PASSING)
        rig.to_disk()
        rig.cache.evict_states(2, kept_too=True)
        while rig.nodes.evict_from_host() is not None:
            pass
        fence = read(rig, NEXT)
        assert fence is not None
        rig.end_disk(fence)
        rig.check()
        match = rig.cache.match_prefix("", NEXT)
        assert (match.device_len, match.host_len, match.unused) == (0, 40, 28)

    def test_blocks_that_only_the_device_has_are_read_too(self) -> None:
        """A state on the host needs all of its KV there."""
        rig = on_disk()
        rig.tier.policy = HostPolicy(min_hits=99)
        rig.turn(np.concatenate([IDS[:36], tokens(8, 700)]))
        rig.cache.evict_states(1, kept_too=True)
        fence = read(rig, NEXT)
        assert fence is not None
        rig.end_disk(fence)
        rig.check()
        match = rig.cache.match_prefix("", NEXT)
        assert (match.device_len, match.host_len) == (0, 40)

    def test_nothing_is_read_where_the_host_has_the_state(self) -> None:
        rig = StateDiskRig()
        rig.turn(IDS)
        rig.to_disk()
        assert rig.disk.find_blocks("", NEXT) is None

    def test_adopted_state_is_kept_before_others(self) -> None:
        rig = on_disk()
        fence = read(rig, NEXT)
        assert fence is not None
        rig.end_disk(fence)
        node = rig.cache.find_prefix("", IDS)[0]
        assert node.state_kind is StateKind.TURN_END and rig.on_host.rank_of(node.host_state)[1] > 0


class TestWrites:
    def test_passing_states_are_not_written(self) -> None:
        rig = StateDiskRig()
        rig.turn(IDS, StateKind.PASSING)
        rig.to_disk()
        assert rig.host_slots.held == 1 and not rig.snapshots.by_key

    def test_turn_that_a_newer_one_has_followed_is_not_written_any_more(self) -> None:
        rig = StateDiskRig()
        rig.turn(IDS)
        rig.turn(NEXT)
        rig.to_disk()
        assert rig.disk.counts.stored_states == 1
        found = rig.disk.find_blocks("other", NEXT)
        assert found is None and len(rig.snapshots.by_key) == 1

    def test_state_that_reaches_the_host_after_its_kv_is_written(self) -> None:
        rig = StateDiskRig()
        running = rig.start(IDS)
        rig.compute(running)
        rig.publish(running)
        rig.to_disk()
        assert len(rig.blocks.blocks) == 2 and not rig.snapshots.by_key
        rig.leave(running, StateKind.BRANCH)
        rig.pump()
        rig.pump_disk()
        assert not rig.orders, "the copy to the host is under way"
        rig.to_disk()
        assert rig.disk.counts.stored_states == 1

    def test_state_that_is_to_be_kept_after_it_was_stored_is_written(self) -> None:
        """A turn may end in the page where its prompt has left a state."""
        rig = StateDiskRig()
        running = rig.start(IDS)
        rig.compute(running)
        rig.leave(running, StateKind.PASSING)
        rig.to_disk()
        assert rig.host_slots.held == 1 and not rig.snapshots.by_key
        rig.finish_turn(running, StateKind.TURN_END)
        rig.to_disk()
        rig.check()
        assert rig.disk.counts.stored_states == 1

    def test_state_where_a_second_conversation_begins_is_written(self) -> None:
        rig = StateDiskRig()
        rig.turn(IDS, StateKind.PASSING)
        for first in (500, 600):
            rig.turn(np.concatenate([IDS, tokens(12, first)]))
            rig.to_disk()
        assert rig.disk.counts.stored_states == 3
        rig.forget_all()
        found = rig.disk.find_blocks("", np.concatenate([IDS, tokens(12, 700)]))
        assert found is not None and len(found.ids) == 40

    def test_state_being_written_keeps_its_slot(self) -> None:
        rig = StateDiskRig(host_states=1)
        rig.turn(IDS)
        rig.store_all()
        rig.pump_disk()
        (write,) = [order for order in rig.orders.values() if isinstance(order, BlockWrite) and order.host_state]
        rig.tier.evict(10**9)
        rig.check()
        assert rig.host_slots.held == 1 and rig.host_slots.take() is None
        rig.turn(tokens(8, 900))
        rig.store_all()
        rig.check()
        assert rig.tier.counts.no_room_states == 1
        for fence in list(rig.orders):
            rig.end_disk(fence)
        rig.check()
        assert not rig.host_slots.held and write.key in rig.snapshots.by_key

    def test_only_a_quarter_of_the_states_is_written_at_a_time(self) -> None:
        rig = StateDiskRig(host_states=8, num_tokens=512)
        for number in range(4):
            rig.turn(tokens(8, 1 + 100 * number))
        rig.store_all()
        rig.pump_disk()
        assert len(rig.orders) == 2
        rig.to_disk()
        assert rig.disk.counts.stored_states == 4
        rig.check()

    def test_failed_write_is_counted(self) -> None:
        rig = StateDiskRig()
        rig.turn(tokens(8))
        rig.store_all()
        rig.pump_disk()
        (fence,) = rig.orders
        rig.end_disk(fence, most=0)
        assert rig.disk.counts.failed_states == 1 and not rig.disk.counts.failed_writes
        rig.check()

    def test_snapshots_in_use_are_touched(self) -> None:
        rig = StateDiskRig()
        rig.turn(IDS)
        rig.to_disk()
        rig.touches.clear()
        rig.cache.match_prefix("", NEXT)
        rig.pump_disk(now=100.0)
        assert [key for touch in rig.touches for key in touch.snapshots] == list(rig.snapshots.by_key)


class TestReads:
    @pytest.mark.parametrize("most", [0, 1, 2])
    def test_nothing_is_adopted_unless_all_has_come(self, most: int) -> None:
        """Two blocks, or the snapshot, are missing."""
        rig = on_disk()
        fence = read(rig, NEXT)
        assert fence is not None
        rig.end_disk(fence, most)
        rig.check()
        assert rig.cache.total_nodes == 0 and not rig.host_slots.held and not rig.disk.counts.loaded_states
        assert rig.host_allocator.free_tokens == 512 and rig.disk.counts.missed == 40 - 16 * most

    def test_snapshot_being_read_is_not_read_twice(self) -> None:
        rig = on_disk(IDS[:12])
        fence = read(rig, NEXT)
        found = rig.disk.find_blocks("", NEXT)
        assert fence is not None and found is not None and found.under_way == fence
        rig.end_disk(fence, most=0)
        found = rig.disk.find_blocks("", NEXT)
        assert found is not None and not found.under_way

    def test_read_without_room_for_all_is_not_begun(self) -> None:
        rig = on_disk(host_tokens=64)
        blocker, found = rig.tier.allocate(28), rig.disk.find_blocks("", NEXT)
        assert blocker is not None and found is not None and rig.disk.begin_read(found, 1.0) is None
        assert rig.host_allocator.free_tokens == 36 and not rig.host_slots.held
        rig.host_allocator.free(blocker)
        assert read(rig, NEXT) is not None

    def test_read_without_room_for_the_state_is_not_begun(self) -> None:
        rig = on_disk(host_states=1)
        slot, found = rig.host_slots.take(), rig.disk.find_blocks("", NEXT)
        assert slot is not None and found is not None and rig.disk.begin_read(found, 1.0) is None
        assert rig.host_allocator.free_tokens == 512
        rig.host_slots.drop(slot)
        assert read(rig, NEXT) is not None

    def test_state_computed_meanwhile_stays(self) -> None:
        rig = on_disk()
        fence = read(rig, NEXT)
        assert fence is not None
        rig.turn(IDS)
        rig.store_all()
        rig.end_disk(fence)
        rig.check()
        assert rig.host_slots.held == 1 and rig.disk.counts.adopted == 0

    @pytest.mark.parametrize("abandon", [False, True])
    def test_reset_leaves_slots_to_the_orders_under_way(self, abandon: bool) -> None:
        rig = on_disk()
        rig.turn(tokens(8, 900))
        rig.store_all()
        rig.pump_disk()
        fence = read(rig, NEXT)
        assert fence is not None and rig.host_slots.held == 2
        rig.cache.discard_all() if abandon else rig.cache.reset()
        assert (rig.host_slots.held, rig.host_slots.quarantined) == (0, 2)
        for fence in list(rig.orders):
            rig.end_disk(fence)
        rig.check()
        assert rig.host_slots.free == 16 and rig.cache.total_nodes == 0

    def test_gain_is_what_need_not_be_computed(self) -> None:
        rig = on_disk()
        fence = read(rig, NEXT)
        assert fence is not None
        assert rig.disk.gained_tokens(fence, 3) == 40 and rig.disk.gained_tokens(fence, 2) == 0
        rig.end_disk(fence)
        rig.turn(tokens(8, 900))
        rig.store_all()
        rig.pump_disk()
        (fence,) = rig.orders
        assert rig.disk.gained_tokens(fence, 1) is None, "a state says nothing of the rate of KV"


def test_store_is_asked_for_blocks_and_places_of_snapshots() -> None:
    rig = on_disk(asks=True)
    assert rig.disk.begin_find("", NEXT, 1.0) is not None
    rig.pump_disk()
    (find,) = rig.orders.values()
    assert isinstance(find, BlockFind) and find.places is not None and find.first == 0
    assert find.keys[:2] == tuple(rig.blocks.blocks)
    places = dict(find.places.within(2))
    (key,) = rig.snapshots.by_key
    assert places[40] == key and [*places] == [*range(44, 0, -4)]


def test_places_are_bounded() -> None:
    rig = StateDiskRig()
    rig.disk.find_blocks("", tokens(8))
    places = rig.disk._names.snapshot_places("", [b"k"] * 1000, tokens(16_000), 0)
    lengths = [length for length, _ in places.within(1000)]
    assert len(lengths) == MAX_PLACES and lengths[0] == 16_000 and lengths[-1] == 16_000 - 4 * (MAX_PLACES - 1)


def test_no_snapshot_has_the_name_of_another_or_of_a_block() -> None:
    names = [key for number in (1, 2) for key in tail_keys(bytes([number]) * 20, tokens(6), 2)]
    names += block_keys(bytes([1]) * 20, tokens(6), 2) + tail_keys(bytes([1]) * 20, tokens(6, 2), 2)[1:]
    assert len(set(names)) == len(names) == 14
    assert tail_keys(b"x", tokens(7), 2) == tail_keys(b"x", tokens(6), 2)
    with pytest.raises(ValueError, match="int32"):
        tail_keys(b"x", np.arange(4), 1)


def test_tier_needs_snapshots_where_the_host_keeps_states() -> None:
    rig, other = StateDiskRig(), DiskRig(16)
    with pytest.raises(ValueError, match="if, and only if"):
        BlockTier(rig.cache, rig.tier, rig.blocks, rig.disk._names)
    with pytest.raises(ValueError, match="if, and only if"):
        BlockTier(other.cache, other.tier, other.blocks, other.disk._names, snapshots=rig.snapshots)


@pytest.mark.parametrize("seed", range(6))
def test_random_turns_between_three_tiers(seed: int) -> None:
    """Turns of a few conversations in little memory; orders end in any order, in part or not at all."""
    rng = random.Random(seed)
    policy = HostPolicy(write_back=seed % 3 == 2)
    rig = StateDiskRig(
        rng.choice([4, 8, 16]), num_tokens=128, host_tokens=192, host_states=rng.choice([2, 5]), policy=policy
    )
    said = [IDS]
    for _ in range(1500):
        stem = tokens(4 * rng.randrange(1, 6), 1000 * rng.randrange(3))
        ids = np.concatenate([stem, tokens(4 * rng.randrange(1, 4), 100 * rng.randrange(1, 5))])
        match rng.choice([0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 6, 6, 7, 7, 8]):
            case 0:
                at_once = 0 if policy.write_back else rig.cache.evictable_tokens
                if not rig.copies and rig.allocator.free_tokens + at_once >= len(ids):
                    rig.turn(ids, rng.choice([StateKind.TURN_END, StateKind.TURN_END, StateKind.PASSING]))
                    said.append(ids)
                    if rng.random() < 0.7:
                        rig.store_all()
                        rig.pump_disk()
            case 1:
                rig.pump()
            case 2:
                if rig.copies:
                    rig.end(rng.choice(list(rig.copies)), ok=rng.random() < 0.9)
            case 3:
                away = [node for node in rig.on_host.nodes.values() if not node.state]
                if away and rig.slots.free and rig.allocator.free_tokens >= 40:
                    rig.load(np.frombuffer(path_of(rig, rng.choice(away))[1], dtype=np.int32))
            case 4:
                rig.cache.evict_states(rng.randrange(3), kept_too=True)
                rig.cache.evict(rng.choice([0, 8, 500]))
                rig.tier.evict(rng.choice([0, 8, 500]))
            case 5:
                rig.pump_disk(now=rng.random() * 100)
            case 6:
                if rig.orders:
                    rig.end_disk(rng.choice(list(rig.orders)), rng.choice([0, 1, 100, 100, 100]))
            case 7:
                read(rig, np.concatenate([rng.choice(said), ids]))
            case 8:
                if rng.random() < 0.1 and not rig.running:
                    rig.cache.reset()
                elif rng.random() < 0.2 and rig.snapshots.by_key:
                    del rig.snapshots.by_key[rng.choice(list(rig.snapshots.by_key))]
        rig.check()
    while rig.copies or rig.orders:
        rig.end_all()
        for fence in list(rig.orders):
            rig.end_disk(fence)
        rig.pump()
    rig.check()
    assert rig.disk.counts.loaded_states > 1, rig.disk.counts
