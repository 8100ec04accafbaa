"""One block of KV in one file: its header and its payload (block_frame.py).

A file is written under a temporary name and renamed when it is whole: a process that is killed leaves no half block.
It is not flushed to the device (fsync): that made writes take 4 to 11 times as long. A file torn by a power cut fails
its checksum, and its KV is computed again.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from .block_frame import HEADER_BYTES, BlockFrame, DamagedBlock

TEMPORARY_SUFFIX = ".tmp"

_DISK_UNIT = 4096
"""Bytes in which file systems hand out space."""

_NOT_A_FILE = (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENOTDIR)
"""Errors of opening or reading a symbolic link, a socket or a folder in place of the file."""


class BlockFiles:
    """Reads and writes the files of one model's blocks, relative to an open folder.

    model: `model_digest`. block_bytes: length of every payload.
    """

    def __init__(self, model: bytes, block_bytes: int) -> None:
        self._frame = BlockFrame(model, block_bytes)
        self.file_bytes = self._frame.framed_bytes
        self.disk_bytes = -(-self.file_bytes // _DISK_UNIT) * _DISK_UNIT
        """Bytes of the disk that a file takes."""

    def write_block(self, folder_fd: int, key: bytes, payload: memoryview) -> None:
        """Put a block under its name, in place of whatever file is there. Raises OSError, and leaves nothing then.

        payload: bytes [block_bytes].
        """
        name = key.hex()
        temporary = name + TEMPORARY_SUFFIX
        header = self._frame.header(key, payload)
        fd = _create(folder_fd, temporary)
        try:
            try:
                _write_all(fd, [memoryview(header), payload])
            finally:
                os.close(fd)  # network file systems report a full disk here
            os.replace(temporary, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
        except BaseException:
            with contextlib.suppress(OSError):  # if this fails, too, the next start removes it
                os.unlink(temporary, dir_fd=folder_fd)
            raise

    def read_block(self, folder_fd: int, key: bytes, into: memoryview) -> None:
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
        self._frame.check(key, header, into)


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
    """The parts that are left after ``count`` bytes."""
    while parts and count >= len(parts[0]):
        count -= len(parts[0])
        parts = parts[1:]
    return [parts[0][count:], *parts[1:]] if parts else []
