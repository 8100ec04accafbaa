"""Records requests for ``--record-requests``.

    TokenizerManager ──▶ RequestRecorder: the ids of each open request ──at its end──▶ RequestLog ──thread──▶ LogFile

The serving loop never waits for the disk. A request that does not fit into the queue is counted and left out.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ...memory_pool.stores.block_store import RareWarnings
from ...scheduler.outcome import missed_by_reason
from ...scheduler.request_spec import RequestSpec
from ..config import RecordingConfig
from ..messages import TokenOutput
from ..metrics import ServerMetrics
from ..prompt import Prompt
from .lines import LineMaker, RecordedRequest

logger = logging.getLogger(__name__)

MAX_WAITING_BYTES = 64 << 20
"""Limit for requests that wait to be written; further ones are not recorded."""

_CLOSE_S = 10.0
"""Seconds that a closing server waits for requests still to be written."""

_REST_S = 0.0005
"""Sleep after each few thousand ids, so that the serving loop gets the interpreter at once."""


class RecordingError(ValueError):
    """The log cannot be written to the given file; the message says why, and what to change."""


@dataclass(slots=True)
class _Open:
    spec: RequestSpec
    time: float
    started: float
    prompt_ids: bytes
    """Empty for a continuation until its first output."""
    outputs: dict[int, bytearray] = field(default_factory=dict)
    cached_tokens: int = 0
    missed: dict[str, int] = field(default_factory=dict)
    finish: str = ""


class RequestRecorder:
    """Collects each request of a TokenizerManager until it ends, then logs it."""

    def __init__(self, log: RequestLog) -> None:
        self._log = log
        self._open: dict[str, _Open] = {}

    @staticmethod
    def ask_for_prompt(spec: RequestSpec) -> RequestSpec:
        """The spec to send in place of ``spec``: with a continuation it asks for the whole prompt, which only the
        worker has."""
        return spec if spec.continuation is None else msgspec.structs.replace(spec, returns_prompt=True)

    def open_request(self, prompt: Prompt, spec: RequestSpec) -> None:
        """Start recording a request that was sent. The server's own probes, which belong to no call, are skipped."""
        if prompt.group:
            known = spec.input_ids if spec.continuation is None else b""
            self._open[spec.rid] = _Open(spec, time.time(), time.monotonic(), known)

    def record_output(self, output: TokenOutput) -> None:
        """Add new tokens, or the end, of an output."""
        request = self._open.get(output.rid)
        if request is None:
            return
        if output.prompt_ids:
            request.prompt_ids = output.prompt_ids
        request.outputs.setdefault(output.index, bytearray()).extend(output.new_ids)
        if output.finish is not None:
            request.finish = output.finish.type
            if output.index == 0:  # the other samples find what the first one has computed
                request.cached_tokens = output.found.total
                request.missed = missed_by_reason(output.cache_report)

    def end_request(self, rid: str) -> None:
        """Log a request with all its outputs ended. One aborted before its first token is skipped: its prompt may be
        unknown, as it may have waited for its parent."""
        request = self._open.pop(rid, None)
        if (
            request is None
            or not request.prompt_ids
            or (request.finish == "abort" and not any(request.outputs.values()))
        ):
            return
        spec = request.spec
        recorded = RecordedRequest(
            rid=rid,
            prompt_ids=request.prompt_ids,
            output_ids=tuple(bytes(ids) for _, ids in sorted(request.outputs.items()) if ids),
            time=request.time,
            seconds=time.monotonic() - request.started,
            finish=request.finish,
            cached_tokens=request.cached_tokens,
            namespace=f"{spec.namespace}\0{spec.adapter}" if spec.adapter else spec.namespace,
            job_id=spec.job_id,
            parent_rid=spec.continuation.parent_rid if spec.continuation is not None else None,
            no_reuse_from=spec.no_reuse_from,
            missed=request.missed,
            state_points=spec.state_points,
            retain_states=spec.retain_states,
        )
        self._log.add_request(recorded)

    def forget_request(self, rid: str) -> None:
        """Drop a request that was refused or failed."""
        self._open.pop(rid, None)

    def close(self) -> None:
        """Write the requests that wait to be written. Those still open are not recorded."""
        self._open.clear()
        self._log.close()


def open_recorder(config: RecordingConfig, metrics: ServerMetrics) -> RequestRecorder | None:
    """The recorder that the settings ask for, if any. Raises RecordingError."""
    if not config.record_requests:
        return None

    def count(recorded: bool) -> None:
        (metrics.recorded_requests if recorded else metrics.unrecorded_requests).inc()

    return RequestRecorder(RequestLog(config, count))


class RequestLog:
    """Takes requests from one thread and writes them in another, until `close`."""

    def __init__(
        self,
        config: RecordingConfig,
        count: Callable[[bool], object],
        *,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
    ) -> None:
        """count: called for each request, with whether it was recorded. Raises RecordingError."""
        self._count = count
        self._max_waiting = max_waiting_bytes
        self._lines = LineMaker(hashed=config.record_requests_hashed, breathe=lambda: time.sleep(_REST_S))
        most = int(config.record_requests_gb * 2**30)
        self._file = LogFile(config.record_requests, most, lambda: self._lines.make_header(time.time()))
        self._path = config.record_requests
        self._waiting: deque[RecordedRequest] = deque()
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        self._closing = False
        self._failing = False
        """True if the last line could not be written: one warning is enough."""
        self._warnings = RareWarnings()
        self._thread = threading.Thread(target=self._run, name="baton-request-log", daemon=True)
        self._thread.start()
        kind = "salted hashes of their blocks" if config.record_requests_hashed else "token ids"
        logger.info("requests are recorded (%s) to %s", kind, self._path)

    def add_request(self, request: RecordedRequest) -> None:
        """Queue a request for writing. If too much waits already, count it as not recorded."""
        with self._changed:
            fits = not self._closing and self._waiting_bytes + request.num_bytes <= self._max_waiting
            if fits:
                self._waiting.append(request)
                self._waiting_bytes += request.num_bytes
                self._changed.notify()
        if not fits:
            self._count(False)

    def close(self) -> None:
        """Write the waiting requests, and end the thread. Safe to call twice."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(_CLOSE_S)
        if self._thread.is_alive():
            logger.warning("%s: the last requests were not written within %g s", self._path, _CLOSE_S)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closing:
                    self._changed.wait()
                if not self._waiting:
                    break
                request = self._waiting.popleft()
                self._waiting_bytes -= request.num_bytes
            self._write(request)
        self._file.close()

    def _write(self, request: RecordedRequest) -> None:
        try:
            self._file.append_line(self._lines.make_line(request))
        except (OSError, ValueError) as error:
            self._count(False)
            if not self._failing:
                reason = getattr(error, "strerror", None) or error
                logger.warning("requests are not recorded for now, %s cannot be written: %s", self._path, reason)
            self._failing = True
            return
        except Exception:
            self._count(False)
            if self._warnings.due("line", time.monotonic()):
                logger.exception("%s: a request could not be recorded", self._path)
            return
        if self._failing:
            logger.warning("requests are recorded again")
        self._failing = False
        self._count(True)


class LogFile:
    """Appends whole lines to a file of mode 0600. A file that has grown to half of ``max_bytes`` is renamed to PATH.1,
    in place of the one before it, and a new one is begun."""

    def __init__(self, path: str, max_bytes: int, header: Callable[[], bytes]) -> None:
        """header: makes the first line of each file and of each start. Raises RecordingError."""
        self._path = Path(path)
        self._most = max_bytes // 2
        self._header = header
        try:
            self._fd, self._size = self._open(self._path)
        except OSError as error:
            raise RecordingError(f"--record-requests {path} cannot be written: {error.strerror}") from None

    def _open(self, path: Path) -> tuple[int, int]:
        """Open a file and write its header; returns its descriptor and its size. Raises OSError, RecordingError."""
        # O_NONBLOCK: opening a FIFO would wait for a reader. O_NOFOLLOW: in a folder that others may write to, a link
        # could lead to any file of the server's user.
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
                raise RecordingError(f"--record-requests {self._path} is not a regular file; name one, or a new one")
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RecordingError(
                    f"--record-requests {self._path} is being written by another server; give each its own"
                ) from None
            if status.st_mode & 0o077:
                os.fchmod(fd, 0o600)
            # A line that a killed server left unfinished stays a line of its own.
            torn = status.st_size > 0 and os.pread(fd, 1, status.st_size - 1) != b"\n"
            return fd, self._write(fd, status.st_size, b"\n" * torn + self._header())
        except BaseException:
            os.close(fd)
            raise

    def append_line(self, line: bytes) -> None:
        """Write a line, all of it or nothing. Raises OSError, ValueError for one that is longer than a file may be."""
        if self._size + len(line) > self._most:
            header = len(self._header())
            if header + len(line) > self._most:
                raise ValueError(f"a line of {len(line)} bytes is longer than half of --record-requests-gb")
            self._begin_anew()
        self._size = self._write(self._fd, self._size, line)

    def _begin_anew(self) -> None:
        """Begin a new file. If that raises OSError, the old one stays in use: the new file takes its place only once
        its header is written."""
        fresh = self._path.with_name(self._path.name + ".new")
        try:
            fd, size = self._open(fresh)
        except (OSError, RecordingError) as error:
            with contextlib.suppress(OSError):
                fresh.unlink()
            raise OSError(getattr(error, "errno", 0), str(error)) from None
        with contextlib.suppress(FileNotFoundError):  # an operator moved it
            os.replace(self._path, self._path.with_name(self._path.name + ".1"))
        os.replace(fresh, self._path)
        os.close(self._fd)
        self._fd, self._size = fd, size

    @staticmethod
    def _write(fd: int, size: int, data: bytes) -> int:
        """Append to a file of this size and return its new size. If it does not fit whole, none of it stays."""
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
