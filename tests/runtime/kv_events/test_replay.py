"""A follower that asks for earlier batches reaches the state of all others, whichever batches are still kept."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.radix.block_events import AllCleared, BlockAnnouncer, BlocksRemoved, BlocksStored
from baton.runtime.kv_events.replay import KnownBlocks, PastBatches, events_for
from baton.runtime.kv_events.wire import Packer
from tests.doubles.block_mirror import BlockMirror
from tests.doubles.cache_rig import CacheRig
from tests.doubles.event_follower import read_batch


def replayed(past: PastBatches, first: int, mirror: BlockMirror) -> int:
    """The number of the last batch."""
    last = first - 1
    for number, payload in past.batches_since(first):
        assert number > last
        mirror.apply(read_batch(payload, mirror.block_tokens))
        last = number
    return last


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("max_bytes", [1, 2000, 1 << 20])
def test_replayed_batches_lead_to_current_blocks(seed: int, max_bytes: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    rig = CacheRig(num_tokens=200)
    announcer, packer = BlockAnnouncer(rig.cache, 2), Packer(2)
    past = PastBatches(packer, 2, max_bytes, lambda: 0.0)
    now, followers, number = BlockMirror(2), [(0, BlockMirror(2))], 0
    for _ in range(150):
        match rng.randrange(6):
            case 0 | 1 | 2:
                rig.insert(
                    np.array([rng.randrange(3) for _ in range(rng.randrange(2, 20))], np.int32),
                    rng.choice(["", "salt"]),
                )
            case 3:
                rig.cache.evict(rng.randrange(20))
            case 4 if rng.random() < 0.1:
                rig.cache.reset()
            case _:
                first, mirror = followers.pop(rng.randrange(len(followers)))
                assert replayed(past, first, mirror) == max(first, number) - 1
                assert {t: on for t, on in mirror.on.items() if on} == {t: on for t, on in now.on.items() if on}
                followers += [(number, mirror), (0, BlockMirror(2))][: 1 if len(followers) > 4 else 2]
        if events := announcer.take_events():
            now.apply(events)
            past.add_batch(number, packer.payload(events, 0.0), events)
            number += 1


def test_the_kept_batches_are_bounded() -> None:
    packer = Packer(1, "arrays")
    past = PastBatches(packer, 1, 1000, lambda: 0.0)
    for number in range(500):
        events = [BlocksStored("GPU", [number + 1], None, b"abcd"), BlocksRemoved("GPU", [number + 1])]
        past.add_batch(number, packer.payload(events, 0.0), events)
    kept = past.batches_since(492)
    assert [number for number, _ in kept] == list(range(492, 500)) and past._bytes <= 1000
    assert past.batches_since(500) == past.batches_since(2**64 - 1) == []
    [(number, payload)] = past.batches_since(0)
    assert number == 499 and len(read_batch(payload, 1)) == 1, "all cleared, and nothing there"


def test_a_snapshot_is_built_once_for_all_followers() -> None:
    packer = Packer(1, "arrays")
    past = PastBatches(packer, 1, 400, lambda: 0.0)
    for number in range(50):
        past.add_batch(number, packer.payload([], 0.0), [BlocksStored("GPU", [number + 1], None, b"abcd")])
    [first] = past.batches_since(0)
    past.add_batch(50, b"next", [BlocksStored("GPU", [99], None, b"abcd")])
    assert past.batches_since(0) == [first, (50, b"next")]
    for number in range(51, 100):
        past.add_batch(number, packer.payload([], 0.0), [])
    [later] = past.batches_since(0)
    assert later[0] == 99 and len(later[1]) > len(first[1])


def test_follower_of_earlier_server_gets_full_snapshot() -> None:
    packer = Packer(1)
    past = PastBatches(packer, 1, 1 << 20, lambda: 0.0)
    for number in range(5000, 5003):
        events = [BlocksStored("GPU", [number], None, b"abcd")]
        past.add_batch(number, packer.payload(events, 0.0), events)
    for first in (0, 262, 4999):
        [(number, payload)] = past.batches_since(first)
        cleared, *stored = read_batch(payload, 1)
        assert number == 5002 and cleared == AllCleared() and len(stored) == 3
    assert [number for number, _ in past.batches_since(5000)] == [5000, 5001, 5002]


def test_block_stored_twice_is_known_once() -> None:
    known = KnownBlocks(1)
    for _ in range(2):
        known.apply_event(BlocksStored("GPU", [1], None, b"aaaa"))
    assert events_for(known.copy()) == [AllCleared(), BlocksStored("GPU", [1], None, b"aaaa")]
    known.apply_event(BlocksRemoved("GPU", [1]))
    assert known.copy() == []


def test_consecutive_blocks_share_an_event() -> None:
    known = KnownBlocks(1)
    known.apply_event(BlocksStored("GPU", [1, 2, 3], None, b"aaaabbbbcccc", "scope"))
    known.apply_event(BlocksStored("CPU_PINNED", [1, 2], None, b"aaaabbbb", "scope"))
    known.apply_event(BlocksStored("GPU", [9], 2, b"dddd"))
    known.apply_event(BlocksRemoved("GPU", [3]))
    known.apply_event(BlocksRemoved("GPU", [4]))  # of two blocks of one hash, the second
    cleared, *stored = events_for(known.copy())
    assert stored == [
        BlocksStored("GPU", [1, 2, 9], None, b"aaaabbbbdddd", "scope"),
        BlocksStored("CPU_PINNED", [1, 2], None, b"aaaabbbb", "scope"),
    ]
    known.apply_event(BlocksRemoved("GPU", [9, 2]))
    known.apply_event(BlocksRemoved("CPU_PINNED", [1]))
    assert events_for(known.copy()) == [
        cleared,
        BlocksStored("GPU", [1], None, b"aaaa", "scope"),
        BlocksStored("CPU_PINNED", [2], 1, b"bbbb"),
    ]
    known.apply_event(cleared)
    assert known.copy() == []
