"""No call waits for the disk, every request that was accepted comes back once, whatever happens to the thread."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from disk_blocks import BLOCK, file_of, fill, holds, key_of, open_pool, payload_of

from baton.memory_pool.tiers.disk_pool import PAUSE_S, TOUCH_S, DiskPool
from baton.runtime.tiers.disk_io import DiskIO, DiskIOStats, Finished

NEVER = float("inf")


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
def io(gate: Gate, pool: DiskPool) -> Iterator[DiskIO]:
    io = DiskIO(pool, 3 * BLOCK + 200)
    yield io
    gate.open.set()
    assert io.close(60)


def collect(io: DiskIO, count: int) -> list[Finished]:
    """The next ``count`` completions."""
    found: list[Finished] = []
    give_up = time.monotonic() + 60
    while len(found) < count and time.monotonic() < give_up:
        found += io.poll()
        time.sleep(0.001)
    assert len(found) == count
    return found


def store(io: DiskIO, number: int, tag: object = None) -> bool:
    return io.store(key_of(number), payload_of(key_of(number)), number if tag is None else tag)


def buffers(count: int) -> list[np.ndarray]:
    return [np.zeros(BLOCK, dtype=np.uint8) for _ in range(count)]


def keys(*numbers: int) -> list[bytes]:
    return [key_of(number) for number in numbers]


def hold(gate: Gate, io: DiskIO) -> None:
    """Keep the thread busy with the store of block 99 until the gate opens."""
    gate.open.clear()
    assert store(io, 99, "held")
    assert gate.reached.acquire(timeout=60)


def raise_full(*args) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_what_was_stored_is_loaded(io: DiskIO, pool: DiskPool) -> None:
    assert all(store(io, number) for number in (1, 2, 3))
    assert collect(io, 3) == [(1, 1), (2, 1), (3, 1)]
    into = buffers(3)
    assert io.load(keys(1, 2, 3), into, "load", NEVER)
    assert collect(io, 1) == [Finished("load", 3)]
    assert all(np.array_equal(found, payload_of(key)) for found, key in zip(into, keys(1, 2, 3)))
    assert io.poll() == [] and io.pending == 0 == io.queued_bytes
    assert pool.by_age() == keys(3, 2, 1)  # room is made from the end of what was loaded


def test_a_load_ends_at_the_first_block_that_is_not_there(io: DiskIO, pool: DiskPool) -> None:
    fill(pool, [1, 2, 4])
    into = buffers(4)
    assert io.load(keys(1, 2, 3, 4), into, "a", NEVER) and io.load(keys(9, 1), buffers(2), "b", NEVER)
    assert io.load([], [], "c", NEVER)
    assert collect(io, 3) == [("a", 2), ("b", 0), ("c", 0)]
    assert not into[3].any() and pool.stats.misses == 2


def test_touch_comes_after_the_stores_before_it(gate: Gate, io: DiskIO, pool: DiskPool) -> None:
    hold(gate, io)
    assert store(io, 1) and store(io, 2) and io.touch(keys(1, 2)) and io.pending == 3
    gate.open.set()
    assert collect(io, 3) == [("held", 1), (1, 1), (2, 1)]
    assert io.load([], [], "after", NEVER) and collect(io, 1)  # the touch may be in progress
    assert io.close(60) and pool.by_age() == keys(99, 2, 1)
    assert io.queued_bytes == 0 == io.pending


class TestSlowDisk:
    def test_nothing_waits_for_it(self, gate: Gate, io: DiskIO, pool: DiskPool) -> None:
        fill(pool, [5])
        hold(gate, io)
        into = buffers(1)
        assert store(io, 1) and store(io, 2) and io.load(keys(5), into, "load", NEVER)
        assert io.poll() == [] and io.pending == 4 and io.queued_bytes == 3 * BLOCK
        assert not into[0].any()
        assert pool.contains(key_of(5)) and pool.longest(keys(5, 1)) == 1  # nor do look-ups
        gate.open.set()
        assert collect(io, 4) == [("held", 1), ("load", 1), (1, 1), (2, 1)]  # loads first

    def test_stores_beyond_the_limit_are_dropped(self, gate: Gate, io: DiskIO, pool: DiskPool) -> None:
        hold(gate, io)  # it counts until it is done
        assert [store(io, number) for number in (1, 2, 3, 4)] == [True, True, False, False]
        assert not io.touch(keys(1, 2, 3, 4)) and io.touch(keys(1))
        assert io.stats == DiskIOStats(stores_dropped=2)
        gate.open.set()
        assert collect(io, 3) == [("held", 1), (1, 1), (2, 1)]
        assert store(io, 3) and collect(io, 1) == [(3, 1)] and not pool.contains(key_of(4))

    def test_loads_that_come_too_late(self, gate: Gate, pool: DiskPool) -> None:
        fill(pool, [1, 2, 3])
        now = 0.0

        def clock() -> float:
            nonlocal now
            now += 1.0
            return now

        io = DiskIO(pool, BLOCK, clock)
        assert io.load(keys(1, 2, 3), buffers(3), "in time", 4.0) and collect(io, 1) == [("in time", 3)]
        now = 0.0
        assert io.load(keys(1, 2, 3), buffers(3), "two", 3.0) and collect(io, 1) == [("two", 2)]
        assert io.load(keys(1, 2, 3), buffers(3), "none", 2.0) and collect(io, 1) == [("none", 0)]
        assert io.stats.late_loads == 2 and io.close(60)

    def test_closing_does_not_wait_for_ever(self, gate: Gate, io: DiskIO, pool: DiskPool) -> None:
        fill(pool, [5])
        hold(gate, io)
        into = buffers(1)
        assert store(io, 1) and io.load(keys(5), into, "load", NEVER)
        assert not io.close(0.01)
        assert io.poll() == [("load", 0), (1, 0)] and io.pending == 1  # the buffer of "held" is still in use
        assert not store(io, 2) and not io.load(keys(5), into, "again", NEVER) and not io.touch(keys(5))
        gate.open.set()
        assert io.close(60) and io.poll() == [("held", 1)] and io.pending == 0
        assert not into[0].any() and not pool.contains(key_of(1))

    def test_a_load_in_progress_ends_with_its_block(self, gate: Gate, io: DiskIO, pool: DiskPool) -> None:
        fill(pool, [1, 2, 3])
        gate.open.clear()
        assert io.load(keys(1, 2, 3), buffers(3), "load", NEVER) and gate.reached.acquire(timeout=60)
        assert not io.close(0.01)
        gate.open.set()
        assert io.close(60) and io.poll() == [("load", 1)]


def test_closing_finishes_the_stores(gate: Gate, io: DiskIO, pool: DiskPool) -> None:
    hold(gate, io)
    assert store(io, 1) and store(io, 2)
    threading.Timer(0.05, gate.open.set).start()
    assert io.close(60)
    assert io.poll() == [("held", 1), (1, 1), (2, 1)] and holds(pool, key_of(2))


def test_a_disk_that_refuses_is_no_end(io: DiskIO, pool: DiskPool, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(pool, [5])
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", raise_full)
        assert store(io, 1) and store(io, 2)
        assert collect(io, 2) == [(1, 0), (2, 0)]
    assert pool.stats.failures["no_space"] == 1 and pool.stats.writes_skipped == 1
    assert io.load(keys(5), buffers(1), "load", NEVER) and collect(io, 1) == [("load", 1)]


def test_the_pool_goes_by_the_clock_it_was_given(pool: DiskPool, tmp_path: Path, monkeypatch) -> None:
    now = 1000.0
    io = DiskIO(pool, 3 * BLOCK, lambda: now)
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", raise_full)
        assert store(io, 1) and collect(io, 1) == [(1, 0)]
    now += PAUSE_S
    assert store(io, 1) and collect(io, 1) == [(1, 1)]
    now += TOUCH_S
    os.utime(file_of(tmp_path, key_of(1)), (1, 1))
    assert io.touch(keys(1)) and io.close(60)
    assert file_of(tmp_path, key_of(1)).stat().st_mtime != 1


@pytest.mark.parametrize("call", ["get", "put", "touch"])
@pytest.mark.parametrize("error", [RuntimeError, MemoryError, SystemExit])
def test_a_thread_that_dies_leaves_nobody_waiting(
    gate: Gate, io: DiskIO, pool: DiskPool, monkeypatch, caplog: pytest.LogCaptureFixture, call: str, error: type
) -> None:
    def fail(*args) -> bool:
        raise error("out of the blue")

    hold(gate, io)
    monkeypatch.setattr(DiskPool, call, fail)
    assert store(io, 1) and io.touch(keys(1))
    assert io.load(keys(1), buffers(1), "one", NEVER) and io.load(keys(2), buffers(1), "two", NEVER)
    gate.open.set()
    assert collect(io, 4) == [("held", 1), ("one", 0), ("two", 0), (1, 0)]
    io._thread.join(60)
    assert not store(io, 3) and not io.load(keys(1), buffers(1), "late", NEVER) and not io.touch(keys(1))
    assert io.poll() == [] and io.pending == 0 == io.queued_bytes
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1 and errors[0].exc_info is not None


class TestArguments:
    def test_a_queue_for_less_than_a_block(self, pool: DiskPool) -> None:
        with pytest.raises(ValueError, match="max_queued_bytes 4999 leaves no room for one block of 5000"):
            DiskIO(pool, BLOCK - 1)

    def test_buffers_are_checked_before_they_are_queued(self, io: DiskIO) -> None:
        short = np.zeros(BLOCK - 1, dtype=np.uint8)
        constant = np.zeros(BLOCK, dtype=np.uint8)
        constant.flags.writeable = False
        with pytest.raises(ValueError, match="5000 contiguous bytes, not 4999"):
            io.store(key_of(1), short, None)
        for into in ([short], [constant]):
            with pytest.raises(ValueError, match="5000 contiguous, writable bytes"):
                io.load(keys(1), into, None, NEVER)
        with pytest.raises(ValueError, match="2 blocks cannot be read into 1 buffers"):
            io.load(keys(1, 2), buffers(1), None, NEVER)
        assert io.store(key_of(1), constant, "kept") and collect(io, 1) == [("kept", 1)]


def test_buffers_that_came_back_are_not_kept(io: DiskIO, pool: DiskPool) -> None:
    """An idle thread must not hold the memory of its last request."""
    fill(pool, [1])
    (into,) = buffers(1)
    assert io.load([key_of(1)], [into], "load", NEVER)
    collect(io, 1)
    freed = weakref.ref(into)
    del into
    give_up = time.monotonic() + 20
    while freed() is not None and time.monotonic() < give_up:
        time.sleep(0.001)
    assert freed() is None
