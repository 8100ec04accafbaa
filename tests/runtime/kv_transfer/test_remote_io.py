"""The same thread serves a store in the network: what one server stores another loads, page by page."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from baton.memory_pool.stores.redis_link import SOCKET_BYTES
from baton.memory_pool.stores.remote_store import PAUSE_S, RemoteStore
from baton.runtime.kv_transfer.block_io import BlockIO, Finished, Stored
from tests.doubles.redis_servers import RedisServer

PAGE = SOCKET_BYTES // 3
PER_BLOCK = 4
KEYS = [bytes([number]) * 20 for number in range(5)]
NEVER = float("inf")


@pytest.fixture
def server() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.stop()


def open_io(server: RedisServer, clock=time.monotonic, **options) -> tuple[BlockIO, np.ndarray]:
    memory = np.zeros((1 + 5 * PER_BLOCK, PAGE), dtype=np.uint8)
    store = RemoteStore(server.url, PER_BLOCK * PAGE, b"a model", **options)
    return BlockIO(store, memory, 2**24, clock=clock, name="the remote store"), memory


def wait(io: BlockIO, count: int) -> list[Finished]:
    found: list[Finished] = []
    give_up = time.monotonic() + 60
    while len(found) < count and time.monotonic() < give_up:
        found += io.poll()
        time.sleep(0.001)
    return found


def test_two_servers_share_blocks(server: RedisServer) -> None:
    rng = np.random.default_rng(3)
    (ours, our_memory), (others, other_memory) = open_io(server), open_io(server)
    our_memory[1:] = rng.integers(0, 256, our_memory[1:].shape, dtype=np.uint8)
    here, there = (rng.permutation(5 * PER_BLOCK).reshape(5, PER_BLOCK) + 1 for _ in range(2))
    assert all(ours.store_block(key, pages, key) for key, pages in zip(KEYS[:4], here))
    assert [(done.tag, done.blocks) for done in wait(ours, 4)] == [(key, 1) for key in KEYS[:4]]
    assert ours.store_block(KEYS[0], here[0], None) is Stored.PRESENT
    assert others.find_blocks(KEYS, "find", NEVER) and others.load_blocks(KEYS, there, "load", NEVER)
    assert [(done.tag, done.blocks) for done in wait(others, 2)] == [("find", 4), ("load", 4)]
    assert np.array_equal(other_memory[there[:4]], our_memory[here[:4]]) and not other_memory[there[4]].any()
    assert ours.close(60) and others.close(60)
    for io in (ours, others):
        io._pool.close()


def test_unreachable_remote_store_causes_only_misses(server: RedisServer) -> None:
    now = 0.0
    io, memory = open_io(server, clock=lambda: now)
    pages = np.arange(1, 1 + PER_BLOCK)
    server.stop()
    for _ in range(4):
        assert io.load_blocks(KEYS[:1], pages, "load", NEVER) and wait(io, 1)[0].blocks == 0
        assert io.store_block(KEYS[0], pages, "store") and wait(io, 1)[0].blocks == 0
    server.start()
    now = PAUSE_S
    assert io.store_block(KEYS[0], pages, "store") and wait(io, 1)[0].blocks == 1
    assert io.load_blocks(KEYS[:1], pages + PER_BLOCK, "load", NEVER) and wait(io, 1)[0].blocks == 1
    assert io.close(60) and not memory.any()
    io._pool.close()
