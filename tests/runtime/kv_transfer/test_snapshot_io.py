"""Snapshots of recurrent states go to a store and come back behind the blocks of their sequence, byte for byte."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.memory_pool.state_pool import StatePool, StateTensor
from baton.memory_pool.stores.block_keys import SnapshotPlaces, tail_keys
from baton.memory_pool.stores.disk_pool import DiskPool
from baton.memory_pool.stores.host_state_pool import HostStatePool, SnapshotPages
from baton.radix.tiers.block_orders import BlockFind, BlockRead, BlockTouch, BlockWrite
from baton.runtime.kv_transfer.block_io import BlockIO, Kept
from baton.runtime.kv_transfer.tier_io import TierIO, is_finite_snapshot
from tests.doubles.disk_blocks import key_of

PAGE, BLOCK_PAGES = 8, 4
"""Bytes; a snapshot has up to three pages."""
SHAPES = [
    {"conv": StateTensor((2, 3), torch.bfloat16), "recurrent": StateTensor((5,), torch.float32)},
    {"steps": StateTensor((3,), torch.int32)},
]
STATE_BYTES = 12 + 20 + 12


class Scene:
    """A disk with both stores, and memory of the host whose every byte is known."""

    def __init__(self, folder: Path) -> None:
        device = StatePool(2, SHAPES, torch.device("cpu"))
        self.states = HostStatePool(device, 5, pin=False)
        self.states.states_view[:] = np.arange(6, dtype=np.uint8)[:, None] + 10
        self.pages = np.arange(41, dtype=np.uint8)[:, None].repeat(PAGE, axis=1) + 100
        kept = SnapshotPages(self.states.states_view, self.pages, BLOCK_PAGES - 1)
        self.blocks = DiskPool(folder, 2**20, BLOCK_PAGES * PAGE, b"m")
        self.snapshots = DiskPool(folder, 2**20, kept.block_bytes, b"m snapshots")
        sound = partial(is_finite_snapshot, tensors=self.states.tensors, tail_dtype="float16")
        self.io = BlockIO(self.blocks, self.pages, 2**20, snapshots=Kept(self.snapshots, kept, sound))
        transfers: Any = NoCopies()
        self.tiers = TierIO(transfers, 2, {"disk": self.io})

    def run(self, *orders: Any) -> dict[int, int]:
        """Fence -> blocks of each, once all have ended."""
        self.tiers.submit_orders(orders)
        found, give_up = {}, time.monotonic() + 60
        while self.tiers.under_way and time.monotonic() < give_up:
            found |= {ended.fence: ended.blocks for ended in self.tiers.poll()}  # type: ignore[union-attr]
            time.sleep(0.001)
        return found


class NoCopies:
    under_way = 0

    def order_copies(self, copies: list) -> None:
        assert not copies

    def poll(self) -> list:
        return []

    def close(self, timeout: float) -> bool:
        return True


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    scene = Scene(tmp_path)
    yield scene
    assert scene.tiers.close(60)
    scene.blocks.close()
    scene.snapshots.close()


def slots(*pages: int) -> np.ndarray:
    """Slots of these pages of a host with two tokens per page."""
    return np.array([2 * page + place for page in pages for place in (0, 1)], dtype=np.int32)


def write(fence: int, number: int, state: int, *pages: int) -> BlockWrite:
    return BlockWrite("disk", fence, key_of(number), slots(*pages), state)


@pytest.mark.parametrize("tail", [(), (7,), (9, 7, 8)])
def test_snapshot_returns_behind_its_blocks(scene: Scene, tail: tuple[int, ...]) -> None:
    pages, states = scene.pages.copy(), scene.states.states_view.copy()
    assert scene.run(write(1, 1, 0, 1, 2, 3, 4), write(2, 2, 0, 5, 6, 11, 12), write(3, 3, 4, *tail)) == {
        1: 1,
        2: 1,
        3: 1,
    }
    scene.pages[:], scene.states.states_view[:] = 0, 0
    places = [*range(20, 28), *range(30, 30 + len(tail))]
    read = BlockRead("disk", 9, (key_of(1), key_of(2)), slots(*places), 60.0, key_of(3), 2)
    assert scene.run(read) == {9: 3}
    assert np.array_equal(scene.pages[places], pages[[1, 2, 3, 4, 5, 6, 11, 12, *tail]])
    assert np.array_equal(scene.states.states_view[2], states[4])
    others = np.setdiff1d(np.arange(41), places)
    assert not scene.pages[others].any() and not scene.states.states_view[[0, 1, 3, 4, 5]].any()


def test_snapshot_is_read_alone(scene: Scene) -> None:
    scene.run(write(1, 1, 3, 7))
    assert scene.run(BlockRead("disk", 2, (), slots(8), 60.0, key_of(1), 5)) == {2: 1}
    assert (scene.pages[8] == 107).all() and (scene.states.states_view[5] == 13).all()


def test_snapshot_is_not_read_behind_a_missing_block(scene: Scene) -> None:
    scene.run(write(1, 1, 0, 1, 2, 3, 4), write(2, 3, 4))
    read = BlockRead("disk", 3, (key_of(1), key_of(2)), slots(*range(20, 28)), 60.0, key_of(3), 2)
    assert scene.run(read) == {3: 1} and (scene.states.states_view[2] == 12).all()
    assert scene.snapshots.stats.hits == scene.snapshots.stats.misses == 0


def test_missing_snapshot_leaves_its_blocks(scene: Scene) -> None:
    scene.run(write(1, 1, 0, 1, 2, 3, 4))
    read = BlockRead("disk", 3, (key_of(1),), slots(*range(20, 24)), 60.0, key_of(3), 2)
    assert scene.run(read) == {3: 1} and (scene.states.states_view[2] == 12).all()


def test_stored_snapshot_is_not_stored_again(scene: Scene) -> None:
    assert scene.run(write(1, 1, 3, 7), write(2, 1, 3, 7)) == {1: 1, 2: 1}
    assert scene.run(write(3, 1, 3, 7)) == {3: 1} and scene.snapshots.stats.writes == 1
    assert not scene.blocks.contains(key_of(1))


@pytest.mark.parametrize(
    ("at", "is_stored"), [(slice(0, 12), False), (slice(12, 32), False), (slice(32, 44), True), (None, False)]
)
def test_snapshot_that_is_not_finite_is_not_stored(scene: Scene, at: slice | None, is_stored: bool) -> None:
    """NaN of bfloat16, of float32, bits that mean nothing in whole numbers; in the tail, NaN of float16."""
    target = scene.pages[7] if at is None else scene.states.states_view[3, at]
    target[-4:] = 0xFF
    assert scene.run(write(1, 1, 3, 7)) == {1: int(is_stored)}
    assert scene.io.stats.unsound_stores == (not is_stored)


def test_blocks_and_snapshots_are_not_written_in_one_batch(scene: Scene) -> None:
    scene.blocks.store_batch = scene.snapshots.store_batch = 8
    orders = [write(1, 1, 0, 1, 2, 3, 4), write(2, 1, 3, 7), write(3, 2, 4), write(4, 2, 0, 5, 6, 7, 8)]
    with scene.io._changed:  # the thread takes the first when all are queued
        scene.tiers.submit_orders(orders)
    assert scene.run() == {1: 1, 2: 1, 3: 1, 4: 1}
    assert len(scene.blocks) == len(scene.snapshots) == 2


def test_find_looks_for_snapshots_behind_the_blocks_that_are_there(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = np.arange(24, dtype=np.int32)
    previous = [bytes(20), key_of(1), key_of(2), key_of(3)]
    scene.run(write(1, 2, 0, 1, 2, 3, 4))
    asked: list[bytes] = []
    monkeypatch.setattr(scene.snapshots, "find_blocks", lambda keys, now: asked.extend(keys))
    places = SnapshotPlaces(previous, ids, 8, 2, above=10)
    assert scene.run(BlockFind("disk", 2, (key_of(2), key_of(3)), 60.0, 1, places)) == {2: 1}
    expected = tail_keys(key_of(2), ids[16:23], 2)[::-1] + tail_keys(key_of(1), ids[8:15], 2)[:1:-1]
    assert asked == expected


def test_snapshots_in_use_are_touched(scene: Scene) -> None:
    scene.run(write(1, 1, 3), write(2, 2, 4), BlockTouch("disk", (), (key_of(1),)))
    assert scene.tiers.close(60) and scene.snapshots.by_age() == [key_of(2), key_of(1)]


def test_numbers_that_are_not_there_are_refused(scene: Scene) -> None:
    kept = SnapshotPages(scene.states.states_view, scene.pages, 3)
    for state, pages, message in ((0, [1], "state 0"), (6, [1], "state 6"), (1, [0], "page 0"), (1, [41], "page 41")):
        with pytest.raises(ValueError, match=message):
            kept.numbers(state, np.array(pages))
    with pytest.raises(ValueError, match="room for 3 pages, not 4"):
        kept.numbers(1, np.arange(1, 5))


def test_layout_says_what_the_bytes_mean() -> None:
    """Two pools with states of equal size, but other shapes or numbers."""
    cpu, found = torch.device("cpu"), set()
    for shape, dtype, name in (((6,), torch.float32, "a"), ((2, 3), torch.float32, "a"), ((6,), torch.int32, "a")):
        found.add(HostStatePool(StatePool(1, [{name: StateTensor(shape, dtype)}], cpu), 1).layout)
    assert len(found) == 3
