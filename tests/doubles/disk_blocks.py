"""Blocks of KV for tests of the disk pool: a key says what its payload is, so that any process can check a block.

As a program, ``python disk_blocks.py FOLDER BLOCK_BYTES CAPACITY SEED`` stores blocks until it is killed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from baton.memory_pool.stores.block_keys import KEY_BYTES, model_digest
from baton.memory_pool.stores.disk_pool import DiskPool

BLOCK = 5000
"""Bytes; with its header a block takes two units of the disk."""
ON_DISK = 8192
MODEL = b"a model"


def key_of(number: int) -> bytes:
    """Numbers that are next to each other get different sub-folders."""
    return number.to_bytes(4, "little") + bytes(KEY_BYTES - 4)


def payload_of(key: bytes, block_bytes: int = BLOCK) -> np.ndarray:
    seed = int.from_bytes(key[:4], "little")
    return np.random.default_rng(seed).integers(0, 256, block_bytes, dtype=np.uint8)


def open_pool(folder: Path, blocks: int = 100, *, block_bytes: int = BLOCK, model: bytes = MODEL) -> DiskPool:
    return DiskPool(folder, blocks * -(-(block_bytes + 68) // 4096) * 4096, block_bytes, model)


def fill(pool: DiskPool, numbers: Iterable[int], now: float = 0.0) -> None:
    for number in numbers:
        assert pool.write_block(key_of(number), payload_of(key_of(number), pool.block_bytes), now)


def holds(pool: DiskPool, key: bytes, now: float = 0.0) -> bool:
    """Whether the pool gives the block; it must then be the right one."""
    into = np.full(pool.block_bytes, 85, dtype=np.uint8)
    if not pool.read_block(key, into, now):
        return False
    assert np.array_equal(into, payload_of(key, pool.block_bytes)), "a wrong block was handed out"
    return True


def file_of(folder: Path, key: bytes, model: bytes = MODEL) -> Path:
    return folder / model_digest(model).hex() / key[:1].hex() / key.hex()


def main() -> None:
    folder, block_bytes, capacity, seed = Path(sys.argv[1]), *map(int, sys.argv[2:])
    pool = DiskPool(folder, capacity, block_bytes, MODEL)
    numbers = np.random.default_rng(seed).permutation(10_000).tolist()
    blocks = [(key_of(number), payload_of(key_of(number), block_bytes)) for number in numbers[:8]]
    for turn in range(1_000_000):
        assert pool.write_block(*blocks[turn % len(blocks)], 0.0)
        if turn == 0:
            print("storing", flush=True)


if __name__ == "__main__":
    main()
