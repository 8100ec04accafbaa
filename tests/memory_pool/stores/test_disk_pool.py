"""What is stored comes back byte for byte; room is made from what was used least recently, also after a restart."""

from __future__ import annotations

import os
import tempfile
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.memory_pool.stores.block_keys import block_keys, root_key
from baton.memory_pool.stores.block_store import StoreSize
from baton.memory_pool.stores.disk_pool import TOUCH_S, DiskPool, DiskPoolError
from tests.doubles.disk_blocks import BLOCK, MODEL, ON_DISK, file_of, fill, holds, key_of, open_pool, payload_of


def taken(folder: Path) -> int:
    """Bytes of the disk, in units of 4096."""
    return sum(-(-file.stat().st_size // 4096) * 4096 for file in folder.rglob("??/*"))


@pytest.mark.parametrize("block_bytes", [1, 4028, 4029, 70_000, 1 << 20])
def test_stored_blocks_read_back_unchanged(tmp_path: Path, block_bytes: int) -> None:
    pool = open_pool(tmp_path, block_bytes=block_bytes)
    fill(pool, range(5))
    assert all(holds(pool, key_of(number)) for number in range(5))
    assert pool.used_bytes == taken(tmp_path)
    pool.close()


def test_unstored_block_is_a_miss(tmp_path: Path) -> None:
    pool = open_pool(tmp_path)
    assert not holds(pool, key_of(1)) and not pool.contains(key_of(1))
    assert (pool.stats.misses, sum(pool.stats.failures.values())) == (1, 0)
    pool.close()


def test_disk_pool_statistics(tmp_path: Path) -> None:
    pool = open_pool(tmp_path, blocks=3)
    fill(pool, [1, 2, 3, 1, 4])
    assert holds(pool, key_of(4)) and not holds(pool, key_of(2))
    stats = pool.stats
    assert (stats.writes, stats.bytes_written, stats.evictions) == (4, 4 * BLOCK, 1)
    assert (stats.hits, stats.bytes_read, stats.misses) == (1, BLOCK, 1)
    assert (len(pool), pool.used_bytes) == (3, 3 * ON_DISK)
    assert pool.size() == StoreSize(3, 3, 3 * ON_DISK, 3 * ON_DISK, 1)
    pool.close()


def test_size_includes_blocks_of_earlier_processes(tmp_path: Path) -> None:
    pool = open_pool(tmp_path, blocks=3)
    fill(pool, [1, 2])
    pool.close()
    pool = open_pool(tmp_path, blocks=5)
    assert pool.size() == StoreSize(2, 5, 2 * ON_DISK, 5 * ON_DISK, 0)
    pool.close()


def test_longest_counts_leading_keys(tmp_path: Path) -> None:
    pool = open_pool(tmp_path)
    fill(pool, [0, 1, 3])
    keys = [key_of(number) for number in range(5)]
    assert [pool.longest(keys[start:]) for start in range(5)] == [2, 1, 0, 1, 0]
    assert pool.longest([]) == 0
    pool.close()


def test_present_block_is_not_rewritten(tmp_path: Path) -> None:
    pool = open_pool(tmp_path, blocks=2)
    fill(pool, [1, 2])
    inode = file_of(tmp_path, key_of(1)).stat().st_ino
    fill(pool, [1, 3])  # 1 was marked as used: 2 goes
    assert file_of(tmp_path, key_of(1)).stat().st_ino == inode
    assert [pool.contains(key_of(number)) for number in (1, 2, 3)] == [True, False, True]
    pool.close()


def test_eviction_starts_at_sequence_ends(tmp_path: Path) -> None:
    pool = open_pool(tmp_path, blocks=3)
    fill(pool, [1, 2, 3])
    pool.touch_blocks([key_of(1), key_of(9), key_of(2), key_of(3)], 0.0)
    assert pool.by_age() == [key_of(3), key_of(2), key_of(1)]
    pool.close()


STEPS = st.tuples(st.sampled_from(["put", "get", "touch", "reopen"]), st.integers(0, 9))


@given(capacity=st.integers(1, 6), steps=st.lists(STEPS, max_size=40))
@settings(deadline=None, derandomize=True, max_examples=60)
def test_disk_pool_matches_lru_model(capacity: int, steps: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder, model = Path(name) / "kv", OrderedDict[bytes, None]()
        pool = open_pool(folder, capacity)
        for action, number in steps:
            key = key_of(number)
            if action == "put":
                fill(pool, [number])
                model[key] = None
                model.move_to_end(key)
                if len(model) > capacity:
                    model.popitem(last=False)
            elif action == "get":
                assert holds(pool, key) == (key in model)
                if key in model:
                    model.move_to_end(key)
            elif action == "touch":
                pool.touch_blocks([key], 0.0)
                if key in model:
                    model.move_to_end(key)
            else:
                for age, block in enumerate(model):  # the file system's clock is too coarse for this test
                    os.utime(file_of(folder, block), ns=(0, age))
                pool.close()
                pool = open_pool(folder, capacity)
            assert pool.by_age() == list(model)
            files = {file.name for file in folder.rglob("??/*")}
            assert files == {block.hex() for block in model}
            assert pool.used_bytes == len(model) * ON_DISK <= pool.capacity_bytes
        pool.close()


def test_smaller_pool_keeps_most_recently_used_blocks(tmp_path: Path) -> None:
    pool = open_pool(tmp_path)
    fill(pool, range(6))
    for age, number in enumerate([3, 1, 0, 5, 2, 4]):
        os.utime(file_of(tmp_path, key_of(number)), (age, age))
    pool.close()
    pool = open_pool(tmp_path, blocks=2)
    assert pool.by_age() == [key_of(2), key_of(4)]
    assert {file.name for file in tmp_path.rglob("??/*")} == {key_of(2).hex(), key_of(4).hex()}
    pool.close()


def test_use_times_on_disk_are_rate_limited(tmp_path: Path) -> None:
    pool = open_pool(tmp_path)
    file = file_of(tmp_path, key_of(1))

    def noted_at(now: float) -> bool:
        os.utime(file, (1, 1))
        assert holds(pool, key_of(1), now)
        return file.stat().st_mtime != 1

    fill(pool, [1], now=1000.0)
    times = (1000.0, 999.0 + TOUCH_S, 1000.0 + TOUCH_S, 1001.0 + TOUCH_S, 1000.0 + 2 * TOUCH_S)
    assert [noted_at(now) for now in times] == [False, False, True, False, True]
    pool.close()
    pool = open_pool(tmp_path)
    assert noted_at(5.0)  # the first use after a start always is
    pool.close()


def test_block_being_written_counts_toward_capacity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pool = open_pool(tmp_path, blocks=2)
    fill(pool, [1, 2])
    sizes, replace = [], os.replace

    def look(*args, **kwargs) -> None:
        sizes.append(taken(tmp_path))
        replace(*args, **kwargs)

    monkeypatch.setattr(os, "replace", look)
    fill(pool, [3])
    assert sizes == [pool.capacity_bytes]
    pool.close()


def test_models_sharing_a_folder_are_independent(tmp_path: Path) -> None:
    pools = [open_pool(tmp_path, blocks=2, model=model) for model in (b"one", b"two")]
    fill(pools[0], [1, 2])
    fill(pools[1], [3, 4, 5])
    assert pools[0].by_age() == [key_of(1), key_of(2)] and not pools[1].contains(key_of(1))
    for pool in pools:
        pool.close()


def test_namespaces_and_fingerprints_do_not_reach_the_disk(tmp_path: Path) -> None:
    pool = open_pool(tmp_path, model=b"the-model")
    (key,) = block_keys(root_key(b"the-model", "secret-salt"), np.arange(8, dtype=np.int32), 8)
    assert pool.write_block(key, np.zeros(BLOCK, dtype=np.uint8), 0.0)
    for path in tmp_path.rglob("*"):
        data = str(path).encode() + (path.read_bytes() if path.is_file() else b"")
        assert b"secret-salt" not in data and b"the-model" not in data
    pool.close()


class TestArguments:
    def test_capacity_below_one_block_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(DiskPoolError, match="8191 bytes cannot hold one block, which takes 8192"):
            DiskPool(tmp_path / "kv", 8191, BLOCK, MODEL)
        assert not (tmp_path / "kv").exists()
        DiskPool(tmp_path / "kv", 8192, BLOCK, MODEL).close()

    def test_empty_blocks_are_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="block_bytes must be at least 1, not 0"):
            DiskPool(tmp_path, 1 << 20, 0, MODEL)

    def test_block_buffers_of_wrong_shape_are_refused(self, tmp_path: Path) -> None:
        pool = open_pool(tmp_path)
        good = payload_of(key_of(1))
        for buffer in (good[:-1], np.append(good, good[:1]), np.repeat(good, 2)[::2]):
            with pytest.raises(ValueError, match="a buffer for a block is 5000 contiguous bytes"):
                pool.write_block(key_of(1), buffer, 0.0)
        fill(pool, [1])
        good.flags.writeable = False
        with pytest.raises(ValueError, match="contiguous, writable bytes"):
            pool.read_block(key_of(1), good, 0.0)
        pool.close()

    @pytest.mark.parametrize("size", [0, 19, 21])
    def test_keys_of_wrong_length_are_refused(self, tmp_path: Path, size: int) -> None:
        """Cut or padded, one would name the block of another."""
        pool = open_pool(tmp_path)
        with pytest.raises(ValueError, match=f"key has 20 bytes, not {size}"):
            pool.write_block(bytes(size), payload_of(key_of(1)), 0.0)
        assert len(pool) == 0 and not [path for path in tmp_path.rglob("??/*") if path.is_file()]
        pool.close()
