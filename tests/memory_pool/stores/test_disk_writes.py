"""A disk that refuses writes costs blocks, never requests: nothing is left behind, and writing pauses for a while."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from baton.memory_pool.stores.block_frame import HEADER_BYTES
from baton.memory_pool.stores.block_store import WARN_S
from baton.memory_pool.stores.disk_pool import PAUSE_S, DiskPool
from tests.doubles import disk_blocks
from tests.doubles.disk_blocks import BLOCK, ON_DISK, file_of, fill, holds, key_of, open_pool, payload_of

ROOT = Path(__file__).parents[3]


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[DiskPool]:
    pool = open_pool(tmp_path, blocks=3)
    yield pool
    pool.close()


def put(pool: DiskPool, number: int, now: float = 0.0) -> bool:
    return pool.write_block(key_of(number), payload_of(key_of(number)), now)


def fails_with(code: int):
    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    return fail


@pytest.mark.parametrize(
    ("code", "kind"),
    [(errno.ENOSPC, "no_space"), (errno.EDQUOT, "no_space"), (errno.EIO, "write"), (errno.EROFS, "write")],
)
def test_failed_write_pauses_disk_writes(
    pool: DiskPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: str
) -> None:
    fill(pool, [1], now=100.0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", fails_with(code))
        assert not put(pool, 2, now=100.0)
        assert pool.stats.failures[kind] == 1
    assert not put(pool, 2, now=99.0 + PAUSE_S) and not put(pool, 3, now=99.0 + PAUSE_S)
    assert pool.stats.writes_skipped == 2 and sum(pool.stats.failures.values()) == 1
    assert holds(pool, key_of(1), now=100.0)  # it still reads
    assert {file.name for file in tmp_path.rglob("??/*")} == {key_of(1).hex()}
    assert put(pool, 2, now=100.0 + PAUSE_S) and holds(pool, key_of(2))


def test_persistently_full_disk_is_retried_and_logged_sparsely(
    pool: DiskPool, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    monkeypatch.setattr(os, "writev", fails_with(errno.ENOSPC))
    for now in range(120):
        assert not put(pool, 1, float(now))
    assert pool.stats.failures["no_space"] == 120 / PAUSE_S
    assert [record.getMessage().split(": ", 1)[1].split(": ")[1] for record in caplog.records] == [
        "No space left on device (no_space, 1 so far)",
        f"No space left on device (no_space, {int(WARN_S / PAUSE_S) + 1} so far)",
    ]


def test_partial_block_write_leaves_no_file(pool: DiskPool, tmp_path: Path) -> None:
    """The kernel writes a part and refuses the rest, as a disk does that fills up meanwhile."""
    fill(pool, [1])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (HEADER_BYTES + BLOCK - 1, limits[1]))
    try:
        assert not put(pool, 2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert pool.stats.failures["write"] == 1 and not pool.contains(key_of(2))
    assert {file.name for file in tmp_path.rglob("??/*")} == {key_of(1).hex()}


@pytest.mark.parametrize("step", ["close", "replace", "mkdir", "open"])
def test_failure_of_any_write_step_leaves_no_file(
    pool: DiskPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    real, failed = getattr(os, step), []

    def fail_once(*args, **kwargs):
        result = real(*args, **kwargs) if step == "close" else None  # the descriptor is gone even so
        if step == "open" and not args[1] & os.O_CREAT:
            return real(*args, **kwargs)
        if not failed:
            failed.append(True)
            raise OSError(errno.ENOSPC, "full")
        return result if step == "close" else real(*args, **kwargs)

    monkeypatch.setattr(os, step, fail_once)
    assert not put(pool, 1)
    assert failed and pool.stats.failures["no_space"] == 1
    assert not [path for path in tmp_path.rglob("??/*") if path.suffix == ".tmp"]
    assert not pool.contains(key_of(1)) and pool.used_bytes == 0
    assert put(pool, 1, PAUSE_S) and holds(pool, key_of(1))


def test_unremovable_blocks_count_toward_capacity(
    pool: DiskPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(pool, [1, 2, 3])
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", fails_with(errno.EPERM))
        assert not put(pool, 4)
    assert len(pool) == 0 and pool.used_bytes == 3 * ON_DISK == pool.capacity_bytes
    assert pool.stats.failures["remove"] == 3
    assert not put(pool, 4)  # there is no room that could be made
    pool.close()
    pool = open_pool(tmp_path, blocks=3)
    assert len(pool) == 3 and all(holds(pool, key_of(number)) for number in (1, 2, 3))


def test_unremovable_blocks_at_start_count_toward_capacity(tmp_path: Path, monkeypatch, caplog) -> None:
    pool = open_pool(tmp_path, blocks=3)
    fill(pool, [1, 2, 3])
    pool.close()
    monkeypatch.setattr(os, "unlink", fails_with(errno.EPERM))
    pool = open_pool(tmp_path, blocks=1)
    assert pool.stats.failures["remove"] == 3 and len(caplog.records) == 1
    assert (len(pool), pool.used_bytes) == (0, 3 * ON_DISK) and not put(pool, 1, 0.0)
    pool.close()


def test_leftover_temporary_file_is_replaced(pool: DiskPool, tmp_path: Path, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", fails_with(errno.EIO))
        patch.setattr(os, "replace", fails_with(errno.EIO))
        assert not put(pool, 1)
    assert file_of(tmp_path, key_of(1)).with_suffix(".tmp").exists()
    assert put(pool, 1, PAUSE_S) and holds(pool, key_of(1))
    assert {file.name for file in tmp_path.rglob("??/*")} == {key_of(1).hex()}


@pytest.mark.parametrize("seed", range(5))
def test_disk_pool_survives_kill_at_any_moment(tmp_path: Path, seed: int) -> None:
    """What bears a block's name is that block, whole; the next start removes the rest."""
    block_bytes, capacity = 4 << 20, 13 << 20
    rng = np.random.default_rng(seed)
    command = [sys.executable, disk_blocks.__file__, str(tmp_path), str(block_bytes), str(capacity), "7"]
    paths = [str(ROOT / ".typing"), *filter(None, [os.environ.get("PYTHONPATH")])]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
    try:
        assert child.stdout is not None and child.stdout.readline() == b"storing\n"
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(rng.uniform(0.005, 0.08))
    finally:
        child.kill()
        child.communicate()
    assert child.returncode == -signal.SIGKILL
    files = [path for path in tmp_path.rglob("??/*") if path.suffix != ".tmp"]
    for file in files:
        key = bytes.fromhex(file.name)
        assert file.read_bytes()[HEADER_BYTES:] == payload_of(key, block_bytes).tobytes(), "a torn file"
    pool = DiskPool(tmp_path, capacity, block_bytes, disk_blocks.MODEL)
    assert {file.name for file in files} == {key.hex() for key in pool.by_age()}
    assert files and all(holds(pool, key) for key in pool.by_age())
    assert not list(tmp_path.rglob("*.tmp")) and pool.used_bytes <= capacity
    pool.close()
