"""What was stored is loaded, in turn; what cannot be done is refused before it is queued."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from baton.memory_pool.stores.block_store import BlockSource, BlockTarget
from baton.memory_pool.stores.disk_pool import DiskPool
from baton.runtime.kv_transfer.block_io import BlockIO, Finished, Stored
from tests.doubles.block_io_rig import NEVER, Gate, brief, collect, hold, keys, pages, payload_in, store
from tests.doubles.disk_blocks import BLOCK, file_of, fill, key_of, payload_of


def test_stored_blocks_are_loaded_into_pages(io: BlockIO, pool: DiskPool, memory: np.ndarray) -> None:
    assert all(store(io, memory, number) for number in (1, 2, 3))
    assert collect(io, 3) == [(1, 1), (2, 1), (3, 1)]
    memory[:] = 7
    assert io.load_blocks(keys(1, 2, 3), pages(4, 0, 8), "load", NEVER)
    assert collect(io, 1) == [("load", 3)]
    for key, numbers in zip(keys(1, 2, 3), pages(4, 0, 8)):
        assert np.array_equal(payload_in(memory, numbers), payload_of(key))
    others = np.setdiff1d(np.arange(len(memory)), pages(4, 0, 8))
    assert (memory[others] == 7).all()
    assert io.poll() == [] and io.pending == 0 == io.queued_bytes
    assert pool.by_age() == keys(3, 2, 1)  # room is made from the end of what was loaded


@pytest.mark.parametrize("page", [BLOCK, BLOCK // 2])
def test_contiguous_blocks_are_not_copied(pool: DiskPool, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "take", None)
    memory = np.zeros((8, page), dtype=np.uint8)
    places = np.arange(1, 1 + 3 * BLOCK // page).reshape(3, -1)
    io = BlockIO(pool, memory, BLOCK)
    for number, place in zip((1, 2), places):
        memory[place] = payload_of(key_of(number)).reshape(-1, page)
        assert io.store_block(key_of(number), place, number) and collect(io, 1) == [(number, 1)]
    assert io.load_blocks(keys(2, 1), places[1:], "load", NEVER) and collect(io, 1) == [("load", 2)]
    assert [bytes(payload_in(memory, place)) for place in places[1:]] == [bytes(payload_of(key)) for key in keys(2, 1)]
    assert io._pages._scratch is None and io.close(60)


def test_pages_out_of_order_are_not_treated_as_contiguous(pool: DiskPool) -> None:
    memory = np.zeros((4, BLOCK // 2), dtype=np.uint8)
    fill(pool, [1])
    io = BlockIO(pool, memory, BLOCK)
    assert io.load_blocks(keys(1), np.array([[3, 2]]), "load", NEVER) and collect(io, 1) == [("load", 1)]
    assert np.array_equal(memory[[3, 2]].reshape(-1), payload_of(key_of(1)))
    assert io.store_block(key_of(2), np.array([3, 2]), "store") and collect(io, 1) == [("store", 1)]
    into = np.zeros(BLOCK, dtype=np.uint8)
    assert pool.read_block(key_of(2), into, 0.0) and np.array_equal(into, payload_of(key_of(1))) and io.close(60)


def test_load_ends_at_first_missing_block(io: BlockIO, pool: DiskPool, memory: np.ndarray) -> None:
    fill(pool, [1, 2, 4])
    assert io.load_blocks(keys(1, 2, 3, 4), pages(0, 1, 2, 3), "a", NEVER) and io.load_blocks(
        keys(9, 1), pages(4, 5), "b", NEVER
    )
    assert io.load_blocks([], pages()[:0].reshape(0, 5), "c", NEVER)
    assert collect(io, 3) == [("a", 2), ("b", 0), ("c", 0)]
    assert not memory[pages(2, 3, 4, 5)].any() and pool.stats.misses == 2


def test_damaged_block_is_not_written_to_pages(io: BlockIO, pool: DiskPool, memory: np.ndarray, tmp_path: Path) -> None:
    fill(pool, [1, 2])
    file = file_of(tmp_path, key_of(2))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert io.load_blocks(keys(1, 2), pages(0, 1), "load", NEVER) and collect(io, 1) == [("load", 1)]
    assert np.array_equal(payload_in(memory, pages(0)), payload_of(key_of(1))) and not memory[pages(1)].any()
    assert pool.stats.failures["checksum"] == 1


def test_find_counts_leading_blocks(io: BlockIO, pool: DiskPool, memory: np.ndarray) -> None:
    fill(pool, [1, 2, 4])
    assert io.find_blocks(keys(1, 2, 3, 4), "two", NEVER) and io.find_blocks(keys(3), "none", NEVER)
    assert io.find_blocks(keys(1), "late", float("-inf"))
    assert collect(io, 3) == [("two", 2), ("none", 0), ("late", 0)]
    assert not memory.any() and io.stats.late_loads == 1


def test_a_stored_block_is_not_stored_again(
    gate: Gate, io: BlockIO, pool: DiskPool, memory: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(pool, [1])
    assert store(io, memory, 1) is Stored.PRESENT and io.pending == 0
    hold(gate, io, memory)
    assert store(io, memory, 2) is Stored.QUEUED is store(io, memory, 2, "again")
    assert store(io, memory, 3) is Stored.DROPPED and io.stats.stores_dropped == 1
    gathered = []
    gather = io._pages.gather
    monkeypatch.setattr(io._pages, "gather", lambda numbers: gathered.append(1) or gather(numbers))
    gate.open.set()
    assert collect(io, 3) == [("held", 1), (2, 1), ("again", 1)]
    assert len(gathered) == 1 and pool.stats.writes == 3
    assert [bool(answer) for answer in Stored] == [True, False, False]


def test_touch_follows_earlier_stores(gate: Gate, io: BlockIO, pool: DiskPool, memory: np.ndarray) -> None:
    hold(gate, io, memory)
    assert store(io, memory, 1) and store(io, memory, 2) and io.touch_blocks(keys(1, 2)) and io.pending == 3
    gate.open.set()
    assert collect(io, 3) == [("held", 1), (1, 1), (2, 1)]
    assert io.find_blocks([], "after", NEVER) and collect(io, 1)  # the touch may be in progress
    assert io.close(60) and pool.by_age() == keys(99, 2, 1)
    assert io.queued_bytes == 0 == io.pending


def test_the_owner_is_woken_for_every_completion(pool: DiskPool, memory: np.ndarray) -> None:
    """By then it is there to be polled, and no lock of the thread is held."""
    polled: list[Finished] = []
    woken = threading.Semaphore(0)

    def wake() -> None:
        polled.extend(io.poll())
        woken.release()

    io = BlockIO(pool, memory, BLOCK, wake=wake)
    for number in (1, 2):
        assert store(io, memory, number) and woken.acquire(timeout=60) and polled[-1].tag == number
    assert io.touch_blocks(keys(1)) and io.find_blocks(keys(1), "find", NEVER) and woken.acquire(timeout=60)
    assert io.close(60) and brief(polled) == [(1, 1), (2, 1), ("find", 1)] and not woken.acquire(blocking=False)


def test_block_io_reports_elapsed_time(pool: DiskPool, memory: np.ndarray) -> None:
    now = [0.0]
    io = BlockIO(pool, memory, BLOCK, clock=lambda: now.append(now[-1] + 1.0) or now[-1])
    assert io.load_blocks(keys(1), pages(0), "load", NEVER)
    give_up = time.monotonic() + 60
    while not (done := io.poll()) and time.monotonic() < give_up:
        time.sleep(0.001)
    assert done == [("load", 0, 2.0)]  # the clock is read before, at its only block, and after
    assert io.close(60)


class Batches:
    """A store that takes three blocks at once, and remembers which it was given together."""

    block_bytes, store_batch = BLOCK, 3

    def __init__(self) -> None:
        self.batches: list[list[bytes]] = []
        self.payloads: list[bytes] = []
        self.known: set[bytes] = set()
        self.open = threading.Event()

    def contains(self, key: bytes) -> bool:
        return key in self.known

    def size(self) -> None:
        """It does not know."""

    def find_blocks(self, keys: Sequence[bytes], now: float) -> int:
        return len(keys)

    def read_blocks(self, keys: Sequence[bytes], target: BlockTarget, now: float) -> int:
        assert self.open.wait(60)
        return 0

    def write_blocks(self, keys: Sequence[bytes], source: BlockSource, now: float) -> list[bool]:
        self.batches.append([*keys])
        self.payloads += [bytes(source.block(index)) for index in range(len(keys))]
        return [key != key_of(3) for key in keys]

    def touch_blocks(self, keys: Sequence[bytes], now: float) -> None:
        self.batches.append([b"touch"])

    def close(self) -> None: ...


def test_block_stores_are_batched(memory: np.ndarray) -> None:
    batches = Batches()
    io = BlockIO(batches, memory, 10 * BLOCK)
    assert io.load_blocks(keys(9), pages(9), "load", NEVER)
    assert (
        all(store(io, memory, number) for number in (1, 2, 3, 4)) and io.touch_blocks(keys(1)) and store(io, memory, 5)
    )
    batches.open.set()
    assert collect(io, 6) == [("load", 0), (1, 1), (2, 1), (3, 0), (4, 1), (5, 1)]
    assert batches.batches == [keys(1, 2, 3), keys(4), [b"touch"], keys(5)]
    assert batches.payloads == [bytes(payload_of(key)) for key in keys(1, 2, 3, 4, 5)]
    assert io.close(60) and io.queued_bytes == 0


def test_blocks_stored_meanwhile_are_left_out_of_a_batch(memory: np.ndarray) -> None:
    batches, now = Batches(), [0.0]
    io = BlockIO(batches, memory, 10 * BLOCK, clock=lambda: now.append(now[-1] + 1.0) or now[-1])
    assert io.load_blocks(keys(9), pages(9), "load", NEVER)
    assert all(store(io, memory, number) for number in (1, 2, 3))
    batches.known.add(key_of(1))
    batches.open.set()
    assert io.close(60) and batches.batches == [keys(2, 3)]
    assert io.poll()[1:] == [(1, 1, 1 / 3), (2, 1, 1 / 3), (3, 0, 1 / 3)]  # a tick of the clock, shared


class TestArguments:
    def test_queue_smaller_than_one_block_is_refused(self, pool: DiskPool, memory: np.ndarray) -> None:
        with pytest.raises(ValueError, match="max_queued_bytes 4999 leaves no room for one block of 5000"):
            BlockIO(pool, memory, BLOCK - 1)

    def test_invalid_page_memory_is_refused(self, pool: DiskPool, memory: np.ndarray) -> None:
        constant = memory.copy()
        constant.flags.writeable = False
        for wrong in (memory[:, ::2], memory.astype(np.int16), memory[0], constant):
            with pytest.raises(ValueError, match="pages must be contiguous, writable uint8"):
                BlockIO(pool, wrong, BLOCK)
        with pytest.raises(ValueError, match="a block of 5000 bytes is no whole number of pages of 999"):
            BlockIO(pool, memory[:, :999].copy(), BLOCK)

    def test_page_numbers_are_checked_before_queueing(self, io: BlockIO) -> None:
        (one,) = pages(1)
        for wrong in (one[:4], one.astype(float), pages(1, 2)):
            with pytest.raises(ValueError, match="1 blocks need 5 page numbers each"):
                io.store_block(key_of(1), wrong, None)
        with pytest.raises(ValueError, match="2 blocks need 5 page numbers each"):
            io.load_blocks(keys(1, 2), pages(1), None, NEVER)
        for page in (-1, 0, 61):
            with pytest.raises(ValueError, match=f"page {page} is not one of 1 … 60"):
                io.load_blocks(keys(1), np.array([[1, 2, page, 3, 4]]), None, NEVER)
        assert io.pending == 0

    def test_page_numbers_are_copied(self, gate: Gate, io: BlockIO, pool: DiskPool, memory: np.ndarray) -> None:
        """They may be a view of something that goes on changing."""
        fill(pool, [5])
        hold(gate, io, memory)
        numbers = pages(1)
        assert io.load_blocks(keys(5), numbers, "load", NEVER)
        numbers[:] = 60
        gate.open.set()
        assert collect(io, 2) == [("held", 1), ("load", 1)]
        assert np.array_equal(payload_in(memory, pages(1)), payload_of(key_of(5)))
