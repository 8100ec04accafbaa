"""A prefix that every request uses stays on a disk that others overflow, though it is never read from there."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from pathlib import Path

import numpy as np
import pytest

from baton.memory_pool.stores.block_store import StoreSize
from baton.memory_pool.stores.disk_pool import DiskPool
from tests.doubles.kv_echo import expected_output, prompt_of
from tests.doubles.scheduler_harness import Harness
from tests.doubles.tier_rig import FakeBlocks

BLOCK = 16
"""Tokens."""
PREFIX = prompt_of(6 * BLOCK, 1)


class BlocksOnDisk(FakeBlocks, MutableMapping[bytes, np.ndarray]):
    """A real pool on disk, with room for 40 blocks."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.pool = DiskPool(folder, 40 * 4096, 8 * BLOCK, b"echo")
        self.blocks = self

    def __getitem__(self, key: bytes) -> np.ndarray:
        block = np.zeros(BLOCK, dtype=np.uint64)
        assert self.pool.read_block(key, block.view(np.uint8), 0.0)
        return block

    def __setitem__(self, key: bytes, block: np.ndarray) -> None:
        assert self.pool.write_block(key, block.view(np.uint8), 0.0)

    def __delitem__(self, key: bytes) -> None:
        raise NotImplementedError

    def __contains__(self, key: object) -> bool:
        return isinstance(key, bytes) and self.pool.contains(key)

    def __len__(self) -> int:
        return len(self.pool)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.pool.by_age())

    def touch(self, keys: tuple[bytes, ...]) -> None:
        self.pool.touch_blocks(keys, 0.0)

    def size(self) -> StoreSize:
        return self.pool.size()


class ForgetfulBlocks(BlocksOnDisk):
    """They hear of no use but reads and writes."""

    def touch(self, keys: tuple[bytes, ...]) -> None:
        pass


@pytest.mark.parametrize(("blocks_on_disk", "found"), [(BlocksOnDisk, 96), (ForgetfulBlocks, 0)])
@pytest.mark.parametrize("tail", [20, 1], ids=["longer each time", "the same each time"])
def test_hot_prefix_stays_on_disk_across_restart(
    tail: int, blocks_on_disk: type[BlocksOnDisk], found: int, tmp_path: Path
) -> None:
    disk = blocks_on_disk(tmp_path)
    harness = Harness(host_tokens=512, block_tokens=BLOCK, blocks=(disk, FakeBlocks()))
    for turn in range(12):
        harness.add(f"hot {turn}", PREFIX + prompt_of(tail, 100 + turn if tail > 1 else 0), 1)
        harness.add(f"cold {turn}", prompt_of(10 * BLOCK + 1, 200 + turn), 1)
        harness.run()
        assert not turn or harness.cache.match_len("", np.array(PREFIX, dtype=np.int32)) == len(PREFIX)
        request = harness.outcomes[f"hot {turn}", 0].request
        assert request is not None and request.found.disk == 0 and (request.found.total >= len(PREFIX)) == (turn > 0)
    assert disk.pool.stats.evictions > 40 and disk.pool.stats.hits == 0
    _, on_disk, remote = harness.scheduler.stats().tiers
    assert (on_disk.total_tokens, on_disk.used_tokens, on_disk.free_tokens) == (40 * BLOCK, 40 * BLOCK, 0)
    assert (on_disk.total_bytes, on_disk.used_bytes) == (40 * 4096, 40 * 4096)
    assert on_disk.evicted_tokens == disk.pool.stats.evictions * BLOCK
    assert (remote.total_tokens, remote.used_tokens, remote.free_tokens) == (None, None, None), "it does not know"
    disk.pool.close()

    again = BlocksOnDisk(tmp_path)
    harness = Harness(host_tokens=512, block_tokens=BLOCK, blocks=(again, FakeBlocks()))
    prompt = PREFIX + prompt_of(5, 300)
    harness.add("first", prompt, 4)
    harness.run()
    request = harness.outcomes["first", 0].request
    assert request is not None and request.found.disk == found
    assert harness.outcomes["first", 0].tokens == expected_output(prompt, 4)
    again.pool.close()
