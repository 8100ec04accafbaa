"""A worker's records of jobs: tool durations (``--tool-history``) and every event (``--scheduler-trace``).

A file that cannot be written is logged once and never stops the server.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import msgspec

from .pool_sizes import PoolSizes

logger = logging.getLogger(__name__)

SAVE_S = 60.0
"""Seconds between two saves of a history that changes."""


class RecordsError(ValueError):
    """A file named at start-up cannot be used; the message says which, why, and what to change."""


class JobTraceFile:
    """Appends events to a file, one JSON object a line. A server begins with a line that says when it started, as other
    times are those of the scheduler's clock. A symbolic link is not followed."""

    def __init__(self, path: str, now: float) -> None:
        """Raises RecordsError."""
        self._path = path
        try:
            self._file: TextIO | None = open(path, "a", encoding="utf-8", opener=_open_no_link)  # noqa: SIM115
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise RecordsError(f"--scheduler-trace {path} is a symbolic link; name the file itself") from None
            raise RecordsError(f"--scheduler-trace {path} cannot be written: {error.strerror}") from None
        self.write([{"event": "start", "time": now, "unix_time": time.time()}])

    def write_pools(self, sizes: PoolSizes, now: float) -> None:
        """Write what a replay needs to know of the worker."""
        self.write([{"event": "pools", "time": now, **msgspec.to_builtins(sizes)}])

    def write(self, events: list[dict[str, Any]]) -> None:
        if self._file is None or not events:
            return
        try:
            self._file.writelines(msgspec.json.encode(event).decode() + "\n" for event in events)
            self._file.flush()
        except (OSError, UnicodeError) as error:
            logger.error("the trace %s ends here, as it cannot be written: %s", self._path, error)
            self.close()

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


class ToolHistoryFile:
    """Loads a history at start, and saves it when it has changed: into a new file that takes the old one's place."""

    def __init__(self, path: str, load: Callable[[bytes], None], save: Callable[[], bytes]) -> None:
        """load: takes a saved history; raises ValueError if it is invalid. Raises RecordsError."""
        self._path = Path(path)
        self._save = save
        self._failed = False
        try:
            saved = self._path.read_bytes()
        except FileNotFoundError:
            if not self._path.parent.is_dir():
                raise RecordsError(f"--tool-history {path}: there is no folder {self._path.parent}") from None
        except OSError as error:
            raise RecordsError(f"--tool-history {path} cannot be read: {error.strerror}") from None
        else:
            try:
                load(saved)
            except ValueError as error:
                raise RecordsError(
                    f"--tool-history {path} holds no history of tools: {error}. Name another file, or remove it"
                ) from None
        self._written = save()
        self._next = 0.0

    def save(self, now: float, *, at_once: bool = False) -> None:
        if now < self._next and not at_once:
            return
        self._next = now + SAVE_S
        data = self._save()
        if data == self._written:
            return
        unfinished = None
        try:
            with tempfile.NamedTemporaryFile(dir=self._path.parent, prefix=self._path.name, delete=False) as file:
                unfinished = file.name
                file.write(data)
            os.replace(unfinished, self._path)
        except OSError as error:
            if unfinished is not None:
                with contextlib.suppress(OSError):
                    os.unlink(unfinished)
            if not self._failed:
                logger.error("the history of tools cannot be saved to %s: %s", self._path, error.strerror)
            self._failed = True
            return
        self._written, self._failed = data, False


class JobRecords:
    """Writes the two files, as far as they are set. Called by the event loop once a second, and at its end."""

    def __init__(
        self,
        take_events: Callable[[], list[dict[str, Any]]],
        trace: JobTraceFile | None = None,
        history: ToolHistoryFile | None = None,
    ) -> None:
        self._take_events = take_events
        self._trace = trace
        self._history = history

    def heartbeat(self, now: float) -> None:
        if self._trace is not None:
            self._trace.write(self._take_events())
        if self._history is not None:
            self._history.save(now)

    def close(self, now: float) -> None:
        if self._trace is not None:
            self._trace.write(self._take_events())
            self._trace.close()
        if self._history is not None:
            self._history.save(now, at_once=True)
