"""A thread of block I/O on a real disk pool, whose disk can be held up."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from baton.runtime.kv_transfer.block_io import BlockIO, Finished, Stored
from tests.doubles.disk_blocks import key_of, payload_of

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
    return io.store_block(key_of(number), numbers, number if tag is None else tag)


def keys(*numbers: int) -> list[bytes]:
    return [key_of(number) for number in numbers]


def hold(gate: Gate, io: BlockIO, memory: np.ndarray) -> None:
    """Keep the thread busy with the store of block 99 until the gate opens."""
    gate.open.clear()
    assert store(io, memory, 99, "held")
    assert gate.reached.acquire(timeout=60)
