"""The log of ``--record-requests``: a thread that writes what the serving loop hands it, and never makes that wait."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable

from ...memory_pool.stores.block_store import RareWarnings
from ..config import RecordingConfig
from .lines import LineMaker, RecordedRequest
from .log_file import LogFile

logger = logging.getLogger(__name__)

MAX_WAITING_BYTES = 64 << 20
"""Ids that wait to be written; what comes beyond that is not recorded."""

_CLOSE_S = 10.0
"""That the end of a server waits for what is still to be written."""

_REST_S = 0.0005
"""Taken after each few thousand ids: the loop, which waits for the interpreter meanwhile, gets it at once."""


class RequestLog:
    """Takes requests from one thread and writes them in another. Ends with `close`."""

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
        self._file = LogFile(config.record_requests, most, lambda: self._lines.header(time.time()))
        self._path = config.record_requests
        self._waiting: deque[RecordedRequest] = deque()
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        self._closing = False
        self._failing = False
        """The last line could not be written: one warning is enough."""
        self._warnings = RareWarnings()
        self._thread = threading.Thread(target=self._run, name="baton-request-log", daemon=True)
        self._thread.start()
        kind = "salted hashes of their blocks" if config.record_requests_hashed else "token ids"
        logger.info("requests are recorded (%s) to %s", kind, self._path)

    def put(self, request: RecordedRequest) -> None:
        """Have it written soon. If too much waits already, it is counted as not recorded."""
        with self._changed:
            fits = not self._closing and self._waiting_bytes + request.num_bytes <= self._max_waiting
            if fits:
                self._waiting.append(request)
                self._waiting_bytes += request.num_bytes
                self._changed.notify()
        if not fits:
            self._count(False)

    def close(self) -> None:
        """Write what waits, and end. Safe to call twice."""
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
            self._file.append(self._lines.line(request))
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
