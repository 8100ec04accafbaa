"""No call waits for the disk, every request that was accepted comes back once, whatever happens to the thread."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from disk_blocks import BLOCK, file_of, fill, holds, key_of, open_pool, payload_of

from baton.memory_pool.tiers.block_store import BlockSource, BlockTarget
from baton.memory_pool.tiers.disk_pool import PAUSE_S, TOUCH_S, DiskPool
from baton.runtime.tiers.block_io import BlockIO, BlockIOStats, Finished, Stored

NEVER = float("inf")
PAGE = 1000
"""Bytes; a block has five pages."""


class Gate:
    """A disk whose reads and writes wait at a gate, if it is closed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open, self.reached = threading.Event(), threading.Semaphore(0)
        self.open.set()
        for name in ("readv", "writev"):
            monkeypatch.setattr(os, name, self.guarded(getattr(os, name)))

    def guarded(self, call: Callable) -> Callable:
        def wait_and_call(*args):
            if threading.current_thread().name == "baton-disk":
                self.reached.release()
                assert self.open.wait(60)
            return call(*args)

        return wait_and_call


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[DiskPool]:
    pool = open_pool(tmp_path)
    yield pool
    pool.close()


@pytest.fixture
def io(gate: Gate, pool: DiskPool, memory: np.ndarray) -> Iterator[BlockIO]:
    io = BlockIO(pool, memory, 3 * BLOCK + 200)
    yield io
    gate.open.set()
    assert io.close(60)


@pytest.fixture
def memory() -> np.ndarray:
    return np.zeros((61, PAGE), dtype=np.uint8)


def collect(io: BlockIO, count: int) -> list[tuple[object, int]]:
    """(tag, blocks) of the next ``count`` completions."""
    found: list[Finished] = []
    give_up = time.monotonic() + 60
    while len(found) < count and time.monotonic() < give_up:
        found += io.poll()
        time.sleep(0.001)
    assert len(found) == count
    return brief(found)


def brief(found: list[Finished]) -> list[tuple[object, int]]:
    return [(done.tag, done.blocks) for done in found]


def pages(*blocks: int) -> np.ndarray:
    """int32 [blocks, 5]: the pages of the first, second, … eleventh block of the memory, which lie apart."""
    return np.array([[1 + block, 13 + block, 49 + block, 37 + block, 25 + block] for block in blocks], dtype=np.int32)


def payload_in(memory: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    return memory[numbers].reshape(-1)


def store(io: BlockIO, memory: np.ndarray, number: int, tag: object = None) -> Stored:
    """Store block ``number`` from its place in memory."""
    (numbers,) = pages(number % 11)
    memory[numbers] = payload_of(key_of(number)).reshape(-1, PAGE)
    return io.store(key_of(number), numbers, number if tag is None else tag)


def keys(*numbers: int) -> list[bytes]:
    return [key_of(number) for number in numbers]


def hold(gate: Gate, io: BlockIO, memory: np.ndarray) -> None:
    """Keep the thread busy with the store of block 99 until the gate opens."""
    gate.open.clear()
    assert store(io, memory, 99, "held")
    assert gate.reached.acquire(timeout=60)


def raise_full(*args) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_what_was_stored_is_loaded(io: BlockIO, pool: DiskPool, memory: np.ndarray) -> None:
    assert all(store(io, memory, number) for number in (1, 2, 3))
    assert collect(io, 3) == [(1, 1), (2, 1), (3, 1)]
    memory[:] = 7
    assert io.load(keys(1, 2, 3), pages(4, 0, 8), "load", NEVER)
    assert collect(io, 1) == [("load", 3)]
    for key, numbers in zip(keys(1, 2, 3), pages(4, 0, 8)):
        assert np.array_equal(payload_in(memory, numbers), payload_of(key))
    others = np.setdiff1d(np.arange(len(memory)), pages(4, 0, 8))
    assert (memory[others] == 7).all()
    assert io.poll() == [] and io.pending == 0 == io.queued_bytes
    assert pool.by_age() == keys(3, 2, 1)  # room is made from the end of what was loaded


@pytest.mark.parametrize("page", [BLOCK, BLOCK // 2])
def test_blocks_in_one_piece_are_not_copied(pool: DiskPool, page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(np, "take", None)
    memory = np.zeros((8, page), dtype=np.uint8)
    places = np.arange(1, 1 + 3 * BLOCK // page).reshape(3, -1)
    io = BlockIO(pool, memory, BLOCK)
    for number, place in zip((1, 2), places):
        memory[place] = payload_of(key_of(number)).reshape(-1, page)
        assert io.store(key_of(number), place, number) and collect(io, 1) == [(number, 1)]
    assert io.load(keys(2, 1), places[1:], "load", NEVER) and collect(io, 1) == [("load", 2)]
    assert [bytes(payload_in(memory, place)) for place in places[1:]] == [bytes(payload_of(key)) for key in keys(2, 1)]
    assert io._pages._scratch is None and io.close(60)


def test_pages_in_the_wrong_order_are_not_one_piece(pool: DiskPool) -> None:
    memory = np.zeros((4, BLOCK // 2), dtype=np.uint8)
    fill(pool, [1])
    io = BlockIO(pool, memory, BLOCK)
    assert io.load(keys(1), np.array([[3, 2]]), "load", NEVER) and collect(io, 1) == [("load", 1)]
    assert np.array_equal(memory[[3, 2]].reshape(-1), payload_of(key_of(1)))
    assert io.store(key_of(2), np.array([3, 2]), "store") and collect(io, 1) == [("store", 1)]
    into = np.zeros(BLOCK, dtype=np.uint8)
    assert pool.get(key_of(2), into, 0.0) and np.array_equal(into, payload_of(key_of(1))) and io.close(60)


def test_a_load_ends_at_the_first_block_that_is_not_there(io: BlockIO, pool: DiskPool, memory: np.ndarray) -> None:
    fill(pool, [1, 2, 4])
    assert io.load(keys(1, 2, 3, 4), pages(0, 1, 2, 3), "a", NEVER) and io.load(keys(9, 1), pages(4, 5), "b", NEVER)
    assert io.load([], pages()[:0].reshape(0, 5), "c", NEVER)
    assert collect(io, 3) == [("a", 2), ("b", 0), ("c", 0)]
    assert not memory[pages(2, 3, 4, 5)].any() and pool.stats.misses == 2


def test_a_damaged_block_does_not_reach_the_pages(
    io: BlockIO, pool: DiskPool, memory: np.ndarray, tmp_path: Path
) -> None:
    fill(pool, [1, 2])
    file = file_of(tmp_path, key_of(2))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    assert io.load(keys(1, 2), pages(0, 1), "load", NEVER) and collect(io, 1) == [("load", 1)]
    assert np.array_equal(payload_in(memory, pages(0)), payload_of(key_of(1))) and not memory[pages(1)].any()
    assert pool.stats.failures["checksum"] == 1


def test_find_counts_leading_blocks(io: BlockIO, pool: DiskPool, memory: np.ndarray) -> None:
    fill(pool, [1, 2, 4])
    assert io.find(keys(1, 2, 3, 4), "two", NEVER) and io.find(keys(3), "none", NEVER)
    assert io.find(keys(1), "late", float("-inf"))
    assert collect(io, 3) == [("two", 2), ("none", 0), ("late", 0)]
    assert not memory.any() and io.stats.late_loads == 1


def test_what_is_there_is_not_stored_again(
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


def test_touch_comes_after_the_stores_before_it(gate: Gate, io: BlockIO, pool: DiskPool, memory: np.ndarray) -> None:
    hold(gate, io, memory)
    assert store(io, memory, 1) and store(io, memory, 2) and io.touch(keys(1, 2)) and io.pending == 3
    gate.open.set()
    assert collect(io, 3) == [("held", 1), (1, 1), (2, 1)]
    assert io.find([], "after", NEVER) and collect(io, 1)  # the touch may be in progress
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
    assert io.touch(keys(1)) and io.find(keys(1), "find", NEVER) and woken.acquire(timeout=60)
    assert io.close(60) and brief(polled) == [(1, 1), (2, 1), ("find", 1)] and not woken.acquire(blocking=False)


def test_a_request_says_what_it_took(pool: DiskPool, memory: np.ndarray) -> None:
    now = [0.0]
    io = BlockIO(pool, memory, BLOCK, clock=lambda: now.append(now[-1] + 1.0) or now[-1])
    assert io.load(keys(1), pages(0), "load", NEVER)
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

    def find(self, keys: Sequence[bytes], now: float) -> int:
        return len(keys)

    def get_many(self, keys: Sequence[bytes], target: BlockTarget, now: float) -> int:
        assert self.open.wait(60)
        return 0

    def put_many(self, keys: Sequence[bytes], source: BlockSource, now: float) -> list[bool]:
        self.batches.append([*keys])
        self.payloads += [bytes(source.block(index)) for index in range(len(keys))]
        return [key != key_of(3) for key in keys]

    def touch(self, keys: Sequence[bytes], now: float) -> None:
        self.batches.append([b"touch"])

    def close(self) -> None: ...


def test_stores_go_together_where_that_is_of_use(memory: np.ndarray) -> None:
    batches = Batches()
    io = BlockIO(batches, memory, 10 * BLOCK)
    assert io.load(keys(9), pages(9), "load", NEVER)
    assert all(store(io, memory, number) for number in (1, 2, 3, 4)) and io.touch(keys(1)) and store(io, memory, 5)
    batches.open.set()
    assert collect(io, 6) == [("load", 0), (1, 1), (2, 1), (3, 0), (4, 1), (5, 1)]
    assert batches.batches == [keys(1, 2, 3), keys(4), [b"touch"], keys(5)]
    assert batches.payloads == [bytes(payload_of(key)) for key in keys(1, 2, 3, 4, 5)]
    assert io.close(60) and io.queued_bytes == 0


def test_what_came_to_be_there_is_left_out_of_a_batch(memory: np.ndarray) -> None:
    batches, now = Batches(), [0.0]
    io = BlockIO(batches, memory, 10 * BLOCK, clock=lambda: now.append(now[-1] + 1.0) or now[-1])
    assert io.load(keys(9), pages(9), "load", NEVER)
    assert all(store(io, memory, number) for number in (1, 2, 3))
    batches.known.add(key_of(1))
    batches.open.set()
    assert io.close(60) and batches.batches == [keys(2, 3)]
    assert io.poll()[1:] == [(1, 1, 1 / 3), (2, 1, 1 / 3), (3, 0, 1 / 3)]  # a tick of the clock, shared


class TestSlowDisk:
    def test_nothing_waits_for_it(self, gate: Gate, io: BlockIO, pool: DiskPool, memory: np.ndarray) -> None:
        fill(pool, [5])
        hold(gate, io, memory)
        assert store(io, memory, 1) and store(io, memory, 2) and io.load(keys(5), pages(5), "load", NEVER)
        assert io.poll() == [] and io.pending == 4 and io.queued_bytes == 3 * BLOCK
        assert not memory[pages(5)].any()
        assert pool.contains(key_of(5)) and pool.longest(keys(5, 1)) == 1  # nor do look-ups
        gate.open.set()
        assert collect(io, 4) == [("held", 1), ("load", 1), (1, 1), (2, 1)]  # loads first

    def test_stores_beyond_the_limit_are_dropped(
        self, gate: Gate, io: BlockIO, pool: DiskPool, memory: np.ndarray
    ) -> None:
        hold(gate, io, memory)  # it counts until it is done
        answers = [store(io, memory, number) for number in (1, 2, 3, 4)]
        assert answers == [Stored.QUEUED, Stored.QUEUED, Stored.DROPPED, Stored.DROPPED]
        assert not io.touch(keys(1, 2, 3, 4)) and io.touch(keys(1))
        assert io.stats == BlockIOStats(stores_dropped=2)
        gate.open.set()
        assert collect(io, 3) == [("held", 1), (1, 1), (2, 1)]
        assert store(io, memory, 3) and collect(io, 1) == [(3, 1)] and not pool.contains(key_of(4))

    def test_loads_that_come_too_late(self, gate: Gate, pool: DiskPool, memory: np.ndarray) -> None:
        fill(pool, [1, 2, 3])
        now = 0.0

        def clock() -> float:
            nonlocal now
            now += 1.0
            return now

        io = BlockIO(pool, memory, BLOCK, clock=clock)
        for tag, deadline, blocks in (("in time", 5.0, 3), ("two", 4.0, 2), ("none", 2.0, 0)):
            now = 0.0
            assert io.load(keys(1, 2, 3), pages(1, 2, 3), tag, deadline) and collect(io, 1) == [(tag, blocks)]
        assert io.stats.late_loads == 2 and io.close(60)

    def test_closing_does_not_wait_for_ever(self, gate: Gate, io: BlockIO, pool: DiskPool, memory: np.ndarray) -> None:
        fill(pool, [5])
        hold(gate, io, memory)
        assert store(io, memory, 1) and io.load(keys(5), pages(5), "load", NEVER)
        assert not io.close(0.01)
        assert brief(io.poll()) == [("load", 0), (1, 0)] and io.pending == 1  # the pages of "held" are still in use
        assert store(io, memory, 2) is Stored.DROPPED
        assert not io.load(keys(5), pages(5), "again", NEVER) and not io.touch(keys(5))
        gate.open.set()
        assert io.close(60) and brief(io.poll()) == [("held", 1)] and io.pending == 0
        assert not memory[pages(5)].any() and not pool.contains(key_of(1))

    def test_a_load_in_progress_ends_with_its_block(
        self, gate: Gate, io: BlockIO, pool: DiskPool, memory: np.ndarray
    ) -> None:
        fill(pool, [1, 2, 3])
        gate.open.clear()
        assert io.load(keys(1, 2, 3), pages(1, 2, 3), "load", NEVER) and gate.reached.acquire(timeout=60)
        assert not io.close(0.01)
        gate.open.set()
        assert io.close(60) and brief(io.poll()) == [("load", 1)]


def test_closing_finishes_the_stores(gate: Gate, io: BlockIO, pool: DiskPool, memory: np.ndarray) -> None:
    hold(gate, io, memory)
    assert store(io, memory, 1) and store(io, memory, 2)
    threading.Timer(0.05, gate.open.set).start()
    assert io.close(60)
    assert brief(io.poll()) == [("held", 1), (1, 1), (2, 1)] and holds(pool, key_of(2))


def test_a_disk_that_refuses_is_no_end(io: BlockIO, pool: DiskPool, memory, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(pool, [5])
    gathered = []
    gather = io._pages.gather
    monkeypatch.setattr(io._pages, "gather", lambda numbers: gathered.append(1) or gather(numbers))
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", raise_full)
        assert store(io, memory, 1) and store(io, memory, 2)
        assert collect(io, 2) == [(1, 0), (2, 0)]
    assert pool.stats.failures["no_space"] == 1 and pool.stats.writes_skipped == 1 == len(gathered)
    assert io.load(keys(5), pages(5), "load", NEVER) and collect(io, 1) == [("load", 1)]


def test_the_pool_goes_by_the_clock_it_was_given(pool: DiskPool, memory, tmp_path: Path, monkeypatch) -> None:
    now = 1000.0
    io = BlockIO(pool, memory, 3 * BLOCK, clock=lambda: now)
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", raise_full)
        assert store(io, memory, 1) and collect(io, 1) == [(1, 0)]
    now += PAUSE_S
    assert store(io, memory, 1) and collect(io, 1) == [(1, 1)]
    now += TOUCH_S
    os.utime(file_of(tmp_path, key_of(1)), (1, 1))
    assert io.touch(keys(1)) and io.close(60)
    assert file_of(tmp_path, key_of(1)).stat().st_mtime != 1


@pytest.mark.parametrize("call", ["get_many", "put_many", "touch"])
@pytest.mark.parametrize("error", [RuntimeError, MemoryError, SystemExit])
def test_a_thread_that_dies_leaves_nobody_waiting(
    gate: Gate, io: BlockIO, pool: DiskPool, memory, monkeypatch, caplog: pytest.LogCaptureFixture, call: str, error
) -> None:
    def fail(*args) -> bool:
        raise error("out of the blue")

    hold(gate, io, memory)
    monkeypatch.setattr(DiskPool, call, fail)
    assert store(io, memory, 1) and io.touch(keys(1))
    assert io.load(keys(1), pages(1), "one", NEVER) and io.load(keys(2), pages(2), "two", NEVER)
    gate.open.set()
    assert collect(io, 4) == [("held", 1), ("one", 0), ("two", 0), (1, 0)]
    io._thread.join(60)
    assert store(io, memory, 3) is Stored.DROPPED and not io.load(keys(1), pages(1), "late", NEVER)
    assert not io.touch(keys(1)) and not io.find(keys(1), "late", NEVER)
    assert io.poll() == [] and io.pending == 0 == io.queued_bytes
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1 and errors[0].exc_info is not None and "KV on disk" in errors[0].getMessage()


def test_a_thread_that_dies_wakes_its_owner(pool: DiskPool, memory: np.ndarray, monkeypatch, caplog) -> None:
    woken = threading.Event()
    monkeypatch.setattr(DiskPool, "put_many", None)
    io = BlockIO(pool, memory, BLOCK, wake=woken.set)
    assert store(io, memory, 1) and woken.wait(60) and brief(io.poll()) == [(1, 0)] and len(caplog.records) == 1
    assert io.close(60)


class TestArguments:
    def test_a_queue_for_less_than_a_block(self, pool: DiskPool, memory: np.ndarray) -> None:
        with pytest.raises(ValueError, match="max_queued_bytes 4999 leaves no room for one block of 5000"):
            BlockIO(pool, memory, BLOCK - 1)

    def test_pages_that_are_no_memory_of_a_pool(self, pool: DiskPool, memory: np.ndarray) -> None:
        constant = memory.copy()
        constant.flags.writeable = False
        for wrong in (memory[:, ::2], memory.astype(np.int16), memory[0], constant):
            with pytest.raises(ValueError, match="pages must be contiguous, writable uint8"):
                BlockIO(pool, wrong, BLOCK)
        with pytest.raises(ValueError, match="a block of 5000 bytes is no whole number of pages of 999"):
            BlockIO(pool, memory[:, :999].copy(), BLOCK)

    def test_page_numbers_are_checked_before_they_are_queued(self, io: BlockIO) -> None:
        (one,) = pages(1)
        for wrong in (one[:4], one.astype(float), pages(1, 2)):
            with pytest.raises(ValueError, match="1 blocks need 5 page numbers each"):
                io.store(key_of(1), wrong, None)
        with pytest.raises(ValueError, match="2 blocks need 5 page numbers each"):
            io.load(keys(1, 2), pages(1), None, NEVER)
        for page in (-1, 0, 61):
            with pytest.raises(ValueError, match=f"page {page} is not one of 1 … 60"):
                io.load(keys(1), np.array([[1, 2, page, 3, 4]]), None, NEVER)
        assert io.pending == 0

    def test_page_numbers_are_copied(self, gate: Gate, io: BlockIO, pool: DiskPool, memory: np.ndarray) -> None:
        """They may be a view of something that goes on changing."""
        fill(pool, [5])
        hold(gate, io, memory)
        numbers = pages(1)
        assert io.load(keys(5), numbers, "load", NEVER)
        numbers[:] = 60
        gate.open.set()
        assert collect(io, 2) == [("held", 1), ("load", 1)]
        assert np.array_equal(payload_in(memory, pages(1)), payload_of(key_of(5)))
