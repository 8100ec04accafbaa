"""A disk that is slow, refuses, or ends the thread: nothing waits for it, and every request comes back once."""

from __future__ import annotations

import errno
import logging
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from baton.memory_pool.stores.disk_pool import PAUSE_S, TOUCH_S, DiskPool
from baton.runtime.kv_transfer.block_io import BlockIO, BlockIOStats, Stored
from tests.doubles.block_io_rig import NEVER, Gate, brief, collect, hold, keys, pages, store
from tests.doubles.disk_blocks import BLOCK, file_of, fill, holds, key_of


def raise_full(*args) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


class TestSlowDisk:
    def test_hanging_disk_blocks_no_caller(self, gate: Gate, io: BlockIO, pool: DiskPool, memory: np.ndarray) -> None:
        fill(pool, [5])
        hold(gate, io, memory)
        assert store(io, memory, 1) and store(io, memory, 2) and io.load_blocks(keys(5), pages(5), "load", NEVER)
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
        assert not io.touch_blocks(keys(1, 2, 3, 4)) and io.touch_blocks(keys(1))
        assert io.stats == BlockIOStats(stores_dropped=2)
        gate.open.set()
        assert collect(io, 3) == [("held", 1), (1, 1), (2, 1)]
        assert store(io, memory, 3) and collect(io, 1) == [(3, 1)] and not pool.contains(key_of(4))

    def test_late_loads_are_cut_at_their_deadline(self, gate: Gate, pool: DiskPool, memory: np.ndarray) -> None:
        fill(pool, [1, 2, 3])
        now = 0.0

        def clock() -> float:
            nonlocal now
            now += 1.0
            return now

        io = BlockIO(pool, memory, BLOCK, clock=clock)
        for tag, deadline, blocks in (("in time", 5.0, 3), ("two", 4.0, 2), ("none", 2.0, 0)):
            now = 0.0
            assert io.load_blocks(keys(1, 2, 3), pages(1, 2, 3), tag, deadline) and collect(io, 1) == [(tag, blocks)]
        assert io.stats.late_loads == 2 and io.close(60)

    def test_close_times_out_on_hanging_disk(self, gate: Gate, io: BlockIO, pool: DiskPool, memory: np.ndarray) -> None:
        fill(pool, [5])
        hold(gate, io, memory)
        assert store(io, memory, 1) and io.load_blocks(keys(5), pages(5), "load", NEVER)
        assert not io.close(0.01)
        assert brief(io.poll()) == [("load", 0), (1, 0)] and io.pending == 1  # the pages of "held" are still in use
        assert store(io, memory, 2) is Stored.DROPPED
        assert not io.load_blocks(keys(5), pages(5), "again", NEVER) and not io.touch_blocks(keys(5))
        gate.open.set()
        assert io.close(60) and brief(io.poll()) == [("held", 1)] and io.pending == 0
        assert not memory[pages(5)].any() and not pool.contains(key_of(1))

    def test_close_ends_load_after_current_block(
        self, gate: Gate, io: BlockIO, pool: DiskPool, memory: np.ndarray
    ) -> None:
        fill(pool, [1, 2, 3])
        gate.open.clear()
        assert io.load_blocks(keys(1, 2, 3), pages(1, 2, 3), "load", NEVER) and gate.reached.acquire(timeout=60)
        assert not io.close(0.01)
        gate.open.set()
        assert io.close(60) and brief(io.poll()) == [("load", 1)]


def test_close_finishes_queued_stores(gate: Gate, io: BlockIO, pool: DiskPool, memory: np.ndarray) -> None:
    hold(gate, io, memory)
    assert store(io, memory, 1) and store(io, memory, 2)
    threading.Timer(0.05, gate.open.set).start()
    assert io.close(60)
    assert brief(io.poll()) == [("held", 1), (1, 1), (2, 1)] and holds(pool, key_of(2))


def test_block_io_survives_disk_write_errors(
    io: BlockIO, pool: DiskPool, memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(pool, [5])
    gathered = []
    gather = io._pages.gather
    monkeypatch.setattr(io._pages, "gather", lambda numbers: gathered.append(1) or gather(numbers))
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", raise_full)
        assert store(io, memory, 1) and store(io, memory, 2)
        assert collect(io, 2) == [(1, 0), (2, 0)]
    assert pool.stats.failures["no_space"] == 1 and pool.stats.writes_skipped == 1 == len(gathered)
    assert io.load_blocks(keys(5), pages(5), "load", NEVER) and collect(io, 1) == [("load", 1)]


def test_disk_pool_uses_given_clock(pool: DiskPool, memory, tmp_path: Path, monkeypatch) -> None:
    now = 1000.0
    io = BlockIO(pool, memory, 3 * BLOCK, clock=lambda: now)
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", raise_full)
        assert store(io, memory, 1) and collect(io, 1) == [(1, 0)]
    now += PAUSE_S
    assert store(io, memory, 1) and collect(io, 1) == [(1, 1)]
    now += TOUCH_S
    os.utime(file_of(tmp_path, key_of(1)), (1, 1))
    assert io.touch_blocks(keys(1)) and io.close(60)
    assert file_of(tmp_path, key_of(1)).stat().st_mtime != 1


@pytest.mark.parametrize("call", ["read_blocks", "write_blocks", "touch_blocks"])
@pytest.mark.parametrize("error", [RuntimeError, MemoryError, SystemExit])
def test_a_dead_thread_leaves_no_request_waiting(
    gate: Gate, io: BlockIO, pool: DiskPool, memory, monkeypatch, caplog: pytest.LogCaptureFixture, call: str, error
) -> None:
    def fail(*args) -> bool:
        raise error("out of the blue")

    hold(gate, io, memory)
    monkeypatch.setattr(DiskPool, call, fail)
    assert store(io, memory, 1) and io.touch_blocks(keys(1))
    assert io.load_blocks(keys(1), pages(1), "one", NEVER) and io.load_blocks(keys(2), pages(2), "two", NEVER)
    gate.open.set()
    assert collect(io, 4) == [("held", 1), ("one", 0), ("two", 0), (1, 0)]
    io._thread.join(60)
    assert store(io, memory, 3) is Stored.DROPPED and not io.load_blocks(keys(1), pages(1), "late", NEVER)
    assert not io.touch_blocks(keys(1)) and not io.find_blocks(keys(1), "late", NEVER)
    assert io.poll() == [] and io.pending == 0 == io.queued_bytes
    errors = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert len(errors) == 1 and errors[0].exc_info is not None and "KV on disk" in errors[0].getMessage()


def test_dead_io_thread_wakes_its_owner(pool: DiskPool, memory: np.ndarray, monkeypatch, caplog) -> None:
    woken = threading.Event()
    monkeypatch.setattr(DiskPool, "write_blocks", None)
    io = BlockIO(pool, memory, BLOCK, wake=woken.set)
    assert store(io, memory, 1) and woken.wait(60) and brief(io.poll()) == [(1, 0)] and len(caplog.records) == 1
    assert io.close(60)
