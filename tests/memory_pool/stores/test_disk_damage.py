"""Whatever happens to a file behind the pool's back, its block is a miss, counted; the file goes."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from baton.memory_pool.stores.block_frame import HEADER_BYTES
from baton.memory_pool.stores.block_keys import model_digest
from baton.memory_pool.stores.block_store import WARN_S
from baton.memory_pool.stores.disk_pool import TOUCH_S, DiskPool
from tests.doubles.disk_blocks import BLOCK, MODEL, ON_DISK, file_of, fill, holds, key_of, open_pool, payload_of

KEY = key_of(1)
LAST = HEADER_BYTES + BLOCK - 1


@pytest.fixture
def pool(tmp_path: Path):
    pool = open_pool(tmp_path / "kv", blocks=4)
    yield pool
    pool.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return file_of(tmp_path / "kv", KEY)


def is_lost(pool: DiskPool, file: Path, kind: str) -> None:
    """The block is a miss of this kind, has left the disk, and can be stored again."""
    before = pool.stats.failures[kind]
    assert not holds(pool, KEY)
    assert pool.stats.failures[kind] == before + 1
    assert not pool.contains(KEY) and not os.path.lexists(file) and pool.used_bytes == 0
    fill(pool, [1])
    assert holds(pool, KEY)


def flip(file: Path, position: int, bit: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1 << bit
    file.write_bytes(data)


def test_flipped_header_byte_is_detected(pool: DiskPool, file: Path) -> None:
    fill(pool, [1])
    for position in range(HEADER_BYTES):
        flip(file, position, position % 8)
        is_lost(pool, file, "header" if position < HEADER_BYTES - 8 else "checksum")
    assert pool.stats.failures["header"] == 60


@pytest.mark.parametrize("position", [HEADER_BYTES, HEADER_BYTES + 1, HEADER_BYTES + 2500, LAST - 4096, LAST - 1, LAST])
def test_flipped_payload_bit_is_detected(pool: DiskPool, file: Path, position: int) -> None:
    fill(pool, [1])
    for bit in range(8):
        flip(file, position, bit)
        is_lost(pool, file, "checksum")


@pytest.mark.parametrize("size", [0, 1, HEADER_BYTES - 1, HEADER_BYTES, LAST, LAST + 2])
def test_block_file_of_wrong_size_is_removed(pool: DiskPool, file: Path, size: int) -> None:
    fill(pool, [1])
    os.truncate(file, size)
    is_lost(pool, file, "size")


def test_file_truncated_during_read_is_removed(pool: DiskPool, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(pool, [1])
    readv = os.readv

    def cut_and_read(fd: int, parts: list[memoryview]) -> int:
        os.truncate(file, HEADER_BYTES + 10)
        return readv(fd, parts)

    monkeypatch.setattr(os, "readv", cut_and_read)
    assert not holds(pool, KEY)
    assert pool.stats.failures["size"] == 1 and not file.exists()


def test_zero_filled_file_after_power_cut_is_removed(pool: DiskPool, file: Path) -> None:
    fill(pool, [1])
    file.write_bytes(bytes(LAST + 1))
    is_lost(pool, file, "header")


def test_swapped_block_files_are_removed(pool: DiskPool, tmp_path: Path) -> None:
    fill(pool, [1, 2])
    one, two, aside = file_of(tmp_path / "kv", KEY), file_of(tmp_path / "kv", key_of(2)), tmp_path / "aside"
    one.rename(aside)
    two.rename(one)
    aside.rename(two)
    assert not holds(pool, KEY) and not holds(pool, key_of(2))
    assert pool.stats.failures["header"] == 2 and not one.exists() and not two.exists()


def test_block_file_of_another_model_is_removed(pool: DiskPool, file: Path, tmp_path: Path) -> None:
    """Same key, same size: as if somebody had moved it."""
    other = open_pool(tmp_path / "kv", model=b"same shapes, other weights")
    fill(other, [1])
    fill(pool, [1])
    shutil.copyfile(file_of(tmp_path / "kv", KEY, b"same shapes, other weights"), file)
    is_lost(pool, file, "header")
    other.close()


def test_missing_block_file_is_a_miss(pool: DiskPool, file: Path) -> None:
    fill(pool, [1])
    file.unlink()
    pool.touch_blocks([KEY], TOUCH_S)  # goes unnoticed
    is_lost(pool, file, "missing")
    shutil.rmtree(file.parent)
    is_lost(pool, file, "missing")


def put_link(file: Path, outside: Path) -> None:
    shutil.copyfile(file, outside)  # what the link leads to would be right
    file.unlink()
    file.symlink_to(outside)


def put_pipe(file: Path, outside: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def put_socket(file: Path, outside: Path) -> None:
    file.unlink()
    os.mknod(file, stat.S_IFSOCK | 0o600)


@pytest.mark.parametrize("replace", [put_link, put_pipe, put_socket])
def test_link_pipe_or_socket_in_place_of_block_is_removed(
    pool: DiskPool, file: Path, tmp_path: Path, replace: Callable[[Path, Path], None]
) -> None:
    fill(pool, [1])
    outside = tmp_path / "outside"
    outside.write_bytes(b"untouched")
    replace(file, outside)
    before = outside.read_bytes()
    is_lost(pool, file, "not_a_file")
    assert outside.read_bytes() == before


def test_directory_in_place_of_block_file_is_kept(pool: DiskPool, file: Path) -> None:
    """It is not ours, so it stays: that one block cannot be stored, others can."""
    fill(pool, [1])
    file.unlink()
    file.mkdir()
    (file / "theirs").touch()
    assert not holds(pool, KEY) and not pool.contains(KEY)
    assert pool.stats.failures["not_a_file"] == 1
    assert not pool.write_block(KEY, payload_of(KEY), 0.0)
    assert pool.stats.failures["write"] == 1
    fill(pool, [2])
    assert (file / "theirs").exists() and pool.used_bytes == ON_DISK
    assert not list(file.parent.glob("*.tmp"))


@pytest.mark.parametrize("leads_to", ["folder", "file"])
def test_symlink_in_place_of_subfolder_is_not_followed(
    pool: DiskPool, file: Path, tmp_path: Path, leads_to: str
) -> None:
    fill(pool, [1])
    file.parent.rename(tmp_path / "folder")
    (tmp_path / "file").touch()
    file.parent.symlink_to(tmp_path / leads_to)
    assert not holds(pool, KEY) and not pool.contains(KEY)
    assert pool.stats.failures["not_a_file"] == 1 and pool.stats.failures["remove"] == 0 == pool.used_bytes
    assert not pool.write_block(KEY, payload_of(KEY), 0.0)
    assert [path.name for path in (tmp_path / "folder").iterdir()] == [KEY.hex()]
    fill(pool, [2])


def test_symlink_in_place_of_temporary_file_is_not_followed(pool: DiskPool, file: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"untouched")
    file.parent.mkdir()
    file.with_name(file.name + ".tmp").symlink_to(outside)
    fill(pool, [1])
    assert holds(pool, KEY) and outside.read_bytes() == b"untouched"
    assert [path.name for path in file.parent.iterdir()] == [KEY.hex()]


def test_removed_cache_folder_is_not_recreated(pool: DiskPool, tmp_path: Path) -> None:
    """Its lock went with it: another server may have the place by now."""
    fill(pool, [1])
    shutil.rmtree(tmp_path / "kv")
    assert not holds(pool, KEY) and not pool.write_block(KEY, payload_of(KEY), 0.0)
    assert not (tmp_path / "kv").exists()
    assert (pool.stats.failures["missing"], pool.stats.failures["write"]) == (1, 1)


@pytest.mark.parametrize(("code", "kept"), [(errno.EIO, False), (errno.EMFILE, True), (errno.ENOMEM, True)])
def test_read_errors_remove_only_unreadable_files(
    pool: DiskPool, file: Path, monkeypatch: pytest.MonkeyPatch, code: int, kept: bool
) -> None:
    """A file that the disk cannot read is gone; one that there was no descriptor for is not."""
    fill(pool, [1])

    def fail(fd: int, parts: list[memoryview]) -> int:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "readv", fail)
        assert not holds(pool, KEY)
    assert (pool.stats.failures["read"], pool.stats.misses) == (1, 1)
    assert holds(pool, KEY) == kept == file.exists()


def test_short_reads_and_writes_are_resumed(pool: DiskPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A few bytes at a time, across the border between header and payload, as signals and network disks make them."""
    readv, writev = os.readv, os.writev
    counts = iter([1, 66, 1, 1, 1000] * 100)

    def some(parts: list[memoryview]) -> list[memoryview]:
        count, kept = next(counts), []
        for part in parts:
            kept.append(part[:count])
            count -= len(kept[-1])
        return kept

    monkeypatch.setattr(os, "readv", lambda fd, parts: readv(fd, some(parts)))
    monkeypatch.setattr(os, "writev", lambda fd, parts: writev(fd, some(parts)))
    fill(pool, [1, 2])
    assert holds(pool, KEY) and holds(pool, key_of(2))


def test_damage_warnings_are_rate_limited_per_kind(
    pool: DiskPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(pool, range(4))
    for number, (position, now) in enumerate([(0, 0.0), (0, WARN_S - 1), (LAST, WARN_S - 1), (0, WARN_S)]):
        flip(file_of(tmp_path / "kv", key_of(number)), position, 0)
        assert not holds(pool, key_of(number), now)
    kinds = [record.getMessage().split("recomputing it: ")[1].split(" (")[1] for record in caplog.records]
    assert kinds == ["header, 1 so far)", "checksum, 1 so far)", "header, 3 so far)"]
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


def test_block_file_header_is_as_documented(pool: DiskPool, file: Path) -> None:
    fill(pool, [1])
    header = file.read_bytes()[:HEADER_BYTES]
    assert header[:12] == b"baton-kv\1\0\0\0" and header[12:32] == model_digest(MODEL) and header[32:52] == KEY
    assert int.from_bytes(header[52:60], "little") == BLOCK
