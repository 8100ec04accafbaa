"""The folder in which a disk pool keeps its blocks, held by one process at a time.

    FOLDER/                       the operator's; models share it
      <digest of the model>/      one pool's, mode 0700
        lock                      names the holder; a flock, which is released when the holder dies, however it dies
        00/ … ff/                 first byte of the key
          <key>                   a block, mode 0600
          <key>.tmp               a block being written

Nothing below FOLDER is reached through a symbolic link, and everything goes through the file descriptor of the model's
folder: a folder put in its place later is not touched.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from .block_frame import HEADER_BYTES, BlockFrame, DamagedBlock
from .block_keys import KEY_BYTES

logger = logging.getLogger(__name__)

TEMPORARY_SUFFIX = ".tmp"

_LOCK = "lock"

_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW

_SUBFOLDER = re.compile(r"[0-9a-f]{2}")

_BLOCK = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}")

_TEMPORARY = re.compile(rf"[0-9a-f]{{{2 * KEY_BYTES}}}{re.escape(TEMPORARY_SUFFIX)}")

_TRUSTED = (0,)
"""Users that may own the folder without a warning: root can access everything anyway."""

_BAR_AFTER_S = 2.0
"""A scan that takes longer shows a progress bar."""

_DISK_UNIT = 4096
"""Bytes in which file systems hand out space."""

_NOT_A_FILE = (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENOTDIR)
"""Errors of opening or reading a symbolic link, a socket or a folder in place of the file."""


class DiskPoolError(RuntimeError):
    """The disk pool cannot be used as it was asked for; the message says what to change."""


@dataclass(slots=True)
class Scan:
    """The contents of the folder."""

    keys: list[bytes] = field(default_factory=list)
    """Blocks of the right size, least recently used first."""
    removed: int = 0
    """Files of ours that were no use and are gone: temporaries, and blocks of a wrong size."""
    foreign: list[str] = field(default_factory=list)
    """Files that are not ours, and were left alone."""


class PoolFolder:
    """Owns the model's folder and its lock. Raises DiskPoolError.

    folder: made if it is not there. model: `model_digest`.
    """

    def __init__(self, folder: Path, model: bytes) -> None:
        self.path = folder / model.hex()
        self._lock_fd = -1
        self._fd = _open_folder(folder, self.path)
        try:
            self._lock_fd = self._lock()
        except BaseException:
            os.close(self._fd)
            raise

    def close(self) -> None:
        """Release the folder for the next process. Later calls fail with EBADF."""
        descriptors, self._fd, self._lock_fd = (self._fd, self._lock_fd), -1, -1
        for fd in descriptors:
            if fd >= 0:  # not closed twice: the number may belong to another file by then
                os.close(fd)

    def _lock(self) -> int:
        try:
            fd = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600, dir_fd=self._fd)
        except OSError as error:
            raise DiskPoolError(f"cannot write in {self.path}: {error.strerror}; give the disk cache a folder "
                                "of its own that this user may write in") from error  # fmt: skip
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(fd, 200, 0).decode(errors="replace") or "another process"
            os.close(fd)
            if error.errno == errno.EWOULDBLOCK:
                raise DiskPoolError(f"{self.path} is in use by {holder}; end that server, or give this one another "
                                    "folder for its disk cache") from error  # fmt: skip
            raise DiskPoolError(f"cannot lock {self.path}: {error.strerror}; give the disk cache a folder on a local "
                                "disk") from error  # fmt: skip
        with contextlib.suppress(OSError):  # a full disk can still be read from
            os.truncate(fd, 0)
            os.pwrite(fd, f"process {os.getpid()} on {os.uname().nodename}".encode(), 0)
        return fd

    # -- blocks --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def subfolder(self, key: bytes, *, make: bool = False) -> Iterator[int]:
        """The file descriptor of the folder that a block belongs in. Raises OSError."""
        name = key[:1].hex()
        if make:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self._fd)
        fd = os.open(name, _OPEN_FOLDER, dir_fd=self._fd)
        try:
            yield fd
        finally:
            os.close(fd)

    def remove_block(self, key: bytes) -> None:
        """Remove a block's file, or the link that has taken its place. Raises OSError."""
        with self.subfolder(key) as fd:
            os.unlink(key.hex(), dir_fd=fd)

    def touch_block(self, key: bytes) -> None:
        """Note on disk that a block was used now. Raises OSError."""
        with self.subfolder(key) as fd:
            os.utime(key.hex(), dir_fd=fd, follow_symlinks=False)

    # -- at start ------------------------------------------------------------------------------------------------------

    def scan(self, file_bytes: int) -> Scan:
        """Find the blocks of earlier processes and remove what they left unfinished. Raises DiskPoolError.

        Files are not opened: a block is checked when it is read. Modification times say when each was last used.
        """
        found, ages = Scan(), []
        try:
            names = sorted(set(os.listdir(self._fd)) - {_LOCK})
            for name in tqdm(names, desc="Finding KV on disk", unit="folder", disable=None, delay=_BAR_AFTER_S):
                try:
                    fd = os.open(name, _OPEN_FOLDER, dir_fd=self._fd) if _SUBFOLDER.fullmatch(name) else -1
                except NotADirectoryError:  # nor a link to one
                    fd = -1
                if fd < 0:
                    found.foreign.append(name)
                    continue
                try:
                    ages += _scan_subfolder(fd, name, file_bytes, found)
                finally:
                    os.close(fd)
        except OSError as error:
            raise DiskPoolError(f"cannot read {self.path}: {error.strerror}; check the disk, or give the disk cache "
                                "another folder") from error  # fmt: skip
        found.keys = [bytes.fromhex(name) for _, name in sorted(ages)]
        return found


def _scan_subfolder(fd: int, subfolder: str, file_bytes: int, found: Scan) -> list[tuple[int, str]]:
    """(modification time in ns, name) of each block; the rest goes to ``found``."""
    ages = []
    with os.scandir(fd) as entries:
        for entry in entries:
            name = entry.name
            ours = name.startswith(subfolder) and (_BLOCK.fullmatch(name) or _TEMPORARY.fullmatch(name))
            with contextlib.suppress(FileNotFoundError):  # removed by another process meanwhile
                status = entry.stat(follow_symlinks=False)
                if not (ours and stat.S_ISREG(status.st_mode)):
                    found.foreign.append(f"{subfolder}/{name}")
                elif status.st_size == file_bytes and not name.endswith(TEMPORARY_SUFFIX):
                    ages.append((status.st_mtime_ns, name))
                else:
                    os.unlink(name, dir_fd=fd)
                    found.removed += 1
    return ages


def _open_folder(folder: Path, path: Path) -> int:
    """Make both folders where they are missing, and open the inner one."""
    try:
        os.makedirs(folder, 0o700, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        fd = os.open(path, _OPEN_FOLDER)
    except OSError as error:
        raise DiskPoolError(f"{folder} cannot hold the disk cache: {error.strerror}; give it a folder of its own that "
                            "this user may write in") from error  # fmt: skip
    for name, status in ((folder, os.stat(folder)), (path, os.fstat(fd))):
        if stat.S_IMODE(status.st_mode) & 0o077 or status.st_uid not in (*_TRUSTED, os.geteuid()):
            logger.warning(
                "other users can access %s (mode %o, owner %d). KV is the users' text in another form, and anyone with "
                "write access can change answers: make it yours alone (chown, chmod 700)",
                name, stat.S_IMODE(status.st_mode), status.st_uid,
            )  # fmt: skip
    return fd


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
