"""One block of KV in one file: a header that says whose it is, then the payload.

    magic 8 | version 4 | model 20 | key 20 | payload length 8 | checksum of the payload 8 | payload

Integers are little-endian. Every byte of the header has one right value for a given file, and all are compared, so a
file that was truncated, damaged, exchanged for another, or written by another model or version is never taken for
what its name says.

A file is written under a temporary name and renamed when it is whole: a process that is killed leaves no half block.
It is not flushed to the device (fsync): that made writes take 4 to 11 times as long, and what a power cut tears is
found by the checksum and computed again.

The checksum is XXH3, 64 bits. In one thread, with a warm page cache and blocks of 4 MiB, a pool reads 3.8 to 5.0 GB/s
with it and 1.2 to 1.9 GB/s with zlib's CRC-32 (an Intel Xeon, model 207, shared): by itself XXH3 does 23 GB/s
there, CRC-32 4.4, and checking would take longer than reading. Both let other threads run meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import struct
from typing import Literal

import xxhash

from .block_keys import KEY_BYTES

_MAGIC = b"baton-kv"
_VERSION = 1
_IDENTITY = struct.Struct(f"<8sI{KEY_BYTES}s{KEY_BYTES}sQ")
_CHECKSUM = struct.Struct("<Q")
HEADER_BYTES = _IDENTITY.size + _CHECKSUM.size

TEMPORARY_SUFFIX = ".tmp"

_DISK_UNIT = 4096
"""Bytes in which file systems hand out space."""

_NOT_A_FILE = (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENOTDIR)
"""What opening or reading answers where a symbolic link, a socket or a folder has taken the file's place."""

Damage = Literal["not_a_file", "size", "header", "checksum"]


class DamagedBlock(Exception):
    """What stands under a block's name is not that block."""

    def __init__(self, kind: Damage) -> None:
        super().__init__(kind)
        self.kind: Damage = kind


class BlockFiles:
    """Reads and writes the files of one model's blocks, relative to an open folder.

    model: `model_digest`. block_bytes: length of every payload.
    """

    def __init__(self, model: bytes, block_bytes: int) -> None:
        self._model = model
        self.block_bytes = block_bytes
        self.file_bytes = HEADER_BYTES + block_bytes
        self.disk_bytes = -(-self.file_bytes // _DISK_UNIT) * _DISK_UNIT
        """What a file takes of the disk."""

    def write(self, folder_fd: int, key: bytes, payload: memoryview) -> None:
        """Put a block under its name, in place of whatever file is there. Raises OSError, and leaves nothing then.

        payload: bytes [block_bytes].
        """
        name = key.hex()
        temporary = name + TEMPORARY_SUFFIX
        checksum = _CHECKSUM.pack(xxhash.xxh3_64_intdigest(payload))
        fd = _create(folder_fd, temporary)
        try:
            try:
                _write_all(fd, [memoryview(self._identity(key) + checksum), payload])
            finally:
                os.close(fd)  # network file systems report a full disk here
            os.replace(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
        except BaseException:
            with contextlib.suppress(OSError):  # if this fails, too, the next start removes it
                os.unlink(temporary, dir_fd=folder_fd)
            raise

    def read(self, folder_fd: int, key: bytes, into: memoryview) -> None:
        """Read a block's payload. Raises OSError or DamagedBlock; what ``into`` holds then means nothing.

        into: writable bytes [block_bytes].
        """
        try:
            # A pipe under this name would make open wait for a writer.
            fd = os.open(key.hex(), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder_fd)
        except OSError as error:
            if error.errno in _NOT_A_FILE:
                raise DamagedBlock("not_a_file") from error
            raise
        header = bytearray(HEADER_BYTES)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise DamagedBlock("not_a_file")
            if status.st_size != self.file_bytes:
                raise DamagedBlock("size")
            _read_all(fd, [memoryview(header), into])
        finally:
            os.close(fd)
        if header[: _IDENTITY.size] != self._identity(key):
            raise DamagedBlock("header")
        if header[_IDENTITY.size :] != _CHECKSUM.pack(xxhash.xxh3_64_intdigest(into)):
            raise DamagedBlock("checksum")

    def _identity(self, key: bytes) -> bytes:
        """The header without the checksum."""
        return _IDENTITY.pack(_MAGIC, _VERSION, self._model, key, self.block_bytes)


def _create(folder_fd: int, name: str) -> int:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    try:
        return os.open(name, flags, 0o600, dir_fd=folder_fd)
    except FileExistsError:  # a failed write could not remove it
        os.unlink(name, dir_fd=folder_fd)
        return os.open(name, flags, 0o600, dir_fd=folder_fd)


def _write_all(fd: int, parts: list[memoryview]) -> None:
    while parts:
        parts = _after(parts, os.writev(fd, parts))


def _read_all(fd: int, parts: list[memoryview]) -> None:
    while parts:
        count = os.readv(fd, parts)
        if count == 0:  # cut off since its size was looked at
            raise DamagedBlock("size")
        parts = _after(parts, count)


def _after(parts: list[memoryview], count: int) -> list[memoryview]:
    """What is left when ``count`` bytes are done."""
    while parts and count >= len(parts[0]):
        count -= len(parts[0])
        parts = parts[1:]
    return [parts[0][count:], *parts[1:]] if parts else []
