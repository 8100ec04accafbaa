"""A log of requests on disk: whole lines only, and never more than it may take."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Callable
from pathlib import Path


class RecordingError(ValueError):
    """The log cannot be written as asked; the message says why, and what to change."""


class LogFile:
    """Appends to a file of mode 0600. When it has grown to half of ``max_bytes`` it is renamed to PATH.1, in place of
    the one before it, and a new one is begun."""

    def __init__(self, path: str, max_bytes: int, header: Callable[[], bytes]) -> None:
        """header: makes the line that each file begins with, and each start. Raises RecordingError."""
        self._path = Path(path)
        self._most = max_bytes // 2
        self._header = header
        try:
            self._fd, self._size = self._open(self._path)
        except OSError as error:
            raise RecordingError(f"--record-requests {path} cannot be written: {error.strerror}") from None

    def _open(self, path: Path) -> tuple[int, int]:
        """A file's descriptor, and its size once its header is there. Raises OSError, RecordingError."""
        # Without waiting, for a FIFO would make the server wait for a reader. No link is followed: in a folder that
        # others may write to, one could lead to any file of the server's user.
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
        try:
            fd = os.open(path, flags, 0o600)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise RecordingError(f"--record-requests {path} is a symbolic link; name the file itself") from None
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise RecordingError(f"--record-requests {self._path} is no regular file; name one, or a new one")
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RecordingError(
                    f"--record-requests {self._path} is being written by another server; give each its own"
                ) from None
            if status.st_mode & 0o077:
                os.fchmod(fd, 0o600)
            # What another server left unfinished when it was killed stays a line of its own.
            torn = status.st_size > 0 and os.pread(fd, 1, status.st_size - 1) != b"\n"
            return fd, self._write(fd, status.st_size, b"\n" * torn + self._header())
        except BaseException:
            os.close(fd)
            raise

    def append(self, line: bytes) -> None:
        """Write a line, all of it or nothing. Raises OSError, ValueError for one that is longer than a file may be."""
        if self._size + len(line) > self._most:
            header = len(self._header())
            if header + len(line) > self._most:
                raise ValueError(f"a line of {len(line)} bytes is longer than half of --record-requests-gb")
            self._begin_anew()
        self._size = self._write(self._fd, self._size, line)

    def _begin_anew(self) -> None:
        """Raises OSError; then all is as it was: the new file takes its place only once its header is there."""
        fresh = self._path.with_name(self._path.name + ".new")
        try:
            fd, size = self._open(fresh)
        except (OSError, RecordingError) as error:
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise OSError(getattr(error, "errno", 0), str(error)) from None
        with contextlib.suppress(FileNotFoundError):  # it has been moved
            os.replace(self._path, self._path.with_name(self._path.name + ".1"))
        os.replace(fresh, self._path)
        os.close(self._fd)
        self._fd, self._size = fd, size

    @staticmethod
    def _write(fd: int, size: int, data: bytes) -> int:
        """Append to a file of this size; returns its new one. If not all of it finds room, none of it stays."""
        view, written = memoryview(data), 0
        try:
            while written < len(data):
                written += os.write(fd, view[written:])
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(fd, size)
            raise
        return size + written

    def close(self) -> None:
        os.close(self._fd)
