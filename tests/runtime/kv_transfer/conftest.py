"""What the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from baton.memory_pool.stores.disk_pool import DiskPool
from baton.runtime.kv_transfer.block_io import BlockIO
from tests.doubles.block_io_rig import PAGE, Gate
from tests.doubles.disk_blocks import BLOCK, open_pool


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
