"""The thread that reads and writes the disk pool, so that a slow disk holds nobody else up.

    scheduler's thread      store, load, touch ─▶ [queues] ─▶ thread ─▶ DiskPool
                            poll ◀──────────────── [done] ◀──────┘

No call here waits for the disk. Every load and store that was accepted comes back from `poll` exactly once, also if
the thread dies. Until then its buffers belong to the thread: they may be read or written at any moment.

Loads go before stores: requests wait for loads, and a store is for later ones. A store that finds too much queued is
dropped; the KV will be computed again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...memory_pool.tiers.disk_pool import DiskPool

logger = logging.getLogger(__name__)

_TOUCH_BYTES = 64
"""What a queued key counts as."""


class Finished(NamedTuple):
    """A load or store that is done with its buffers."""

    tag: Any
    blocks: int
    """A load: how many leading blocks are in their buffers; the other buffers hold nothing of use. A store: 1, or 0 if
    it failed."""


@dataclass(slots=True)
class DiskIOStats:
    stores_dropped: int = 0
    """Stores that were not accepted because too much was queued."""
    late_loads: int = 0
    """Loads that ran into their deadline."""


@dataclass(slots=True, eq=False)
class _Load:
    keys: Sequence[bytes]
    into: Sequence[np.ndarray]
    tag: Any
    deadline: float


@dataclass(slots=True, eq=False)
class _Store:
    key: bytes
    payload: np.ndarray
    tag: Any

    @property
    def queued_bytes(self) -> int:
        return self.payload.nbytes


@dataclass(slots=True, eq=False)
class _Touch:
    keys: Sequence[bytes]

    @property
    def queued_bytes(self) -> int:
        return len(self.keys) * _TOUCH_BYTES


class DiskIO:
    """Owns the thread and its queues; from here on only that thread calls what does I/O in ``pool``.

    max_queued_bytes: the most that unfinished stores may hold of others' memory.
    clock: seconds; what deadlines are measured on.
    """

    def __init__(self, pool: DiskPool, max_queued_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        if max_queued_bytes < pool.block_bytes:
            raise ValueError(f"max_queued_bytes {max_queued_bytes} leaves no room for one block of {pool.block_bytes}")
        self.stats = DiskIOStats()
        self._pool = pool
        self._clock = clock
        self._max_queued_bytes = max_queued_bytes
        self._changed = threading.Condition()
        """Held for a moment at a time, never during I/O. It guards all below."""
        self._loads: deque[_Load] = deque()
        self._stores: deque[_Store | _Touch] = deque()
        self._current: _Load | _Store | _Touch | None = None
        self._finished: list[Finished] = []
        self._queued_bytes = 0
        self._pending = 0
        self._closing = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="baton-disk", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        """Loads and stores that were accepted and have not been polled."""
        with self._changed:
            return self._pending

    @property
    def queued_bytes(self) -> int:
        with self._changed:
            return self._queued_bytes

    def store(self, key: bytes, payload: np.ndarray, tag: Any) -> bool:
        """Store a block. False: it was dropped, and there will be no completion.

        payload: uint8 [block_bytes], unchanged until its completion has been polled.
        """
        self._pool.view(payload)
        return self._enqueue(_Store(key, payload, tag))

    def load(self, keys: Sequence[bytes], into: Sequence[np.ndarray], tag: Any, deadline: float) -> bool:
        """Read consecutive blocks of one sequence, up to the first that is not there. False: nothing will be read, and
        there will be no completion.

        into: a buffer for each key, uint8 [block_bytes].
        deadline: on the clock; no block is begun after it. A disk that hangs within a block is waited for: whoever
            needs an answer keeps the deadline itself, and leaves the buffers alone until the load comes back.
        """
        if len(keys) != len(into):
            raise ValueError(f"{len(keys)} blocks cannot be read into {len(into)} buffers")
        for buffer in into:
            self._pool.view(buffer, writable=True)
        with self._changed:
            if self._closing or self._ended:
                return False
            self._loads.append(_Load(keys, into, tag, deadline))
            self._pending += 1
            self._changed.notify()
            return True

    def touch(self, keys: Sequence[bytes]) -> bool:
        """Mark the blocks of a sequence as used, from its first block on, once the stores before it are done. Worth
        doing after a sequence's last store: see `DiskPool.touch`. No completion; False: it was dropped."""
        return self._enqueue(_Touch(keys))

    def poll(self) -> list[Finished]:
        """What has finished since the last call, in order."""
        with self._changed:
            finished, self._finished = self._finished, []
            self._pending -= len(finished)
            return finished

    def close(self, timeout: float) -> bool:
        """Accept nothing more, give up loads, and go on storing for up to ``timeout`` seconds, then give up the rest.

        Whether the thread has ended. If not, the disk hangs: what is in the thread's hands has not come back, its
        buffers must stay, and so must the pool. May be called again.
        """
        with self._changed:
            self._closing = True
            self._give_up(self._loads)
            self._changed.notify()
        self._thread.join(timeout)
        with self._changed:
            self._give_up(self._stores)
        return not self._thread.is_alive()

    def _enqueue(self, request: _Store | _Touch) -> bool:
        with self._changed:
            if self._closing or self._ended:
                return False
            if self._queued_bytes + request.queued_bytes > self._max_queued_bytes:
                self.stats.stores_dropped += isinstance(request, _Store)
                return False
            self._stores.append(request)
            self._queued_bytes += request.queued_bytes
            self._pending += isinstance(request, _Store)
            self._changed.notify()
            return True

    def _give_up(self, requests: deque[_Load] | deque[_Store | _Touch]) -> None:
        while requests:
            self._finish(requests.popleft(), 0)

    def _finish(self, request: _Load | _Store | _Touch, blocks: int) -> None:
        if not isinstance(request, _Load):
            self._queued_bytes -= request.queued_bytes
        if not isinstance(request, _Touch):
            self._finished.append(Finished(request.tag, blocks))

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take():
                self._complete(self._perform())
        except BaseException:
            logger.exception("the thread for KV on disk has failed; until the next start nothing is read or stored")
        finally:
            self._complete(0)
            with self._changed:
                self._ended = True
                self._give_up(self._loads)
                self._give_up(self._stores)

    def _take(self) -> bool:
        """Wait for the next request and make it the current one; False: there will be none."""
        with self._changed:
            while not (self._loads or self._stores or self._closing):
                self._changed.wait()
            if not (self._loads or self._stores):
                return False
            self._current = self._loads.popleft() if self._loads else self._stores.popleft()
            return True

    def _complete(self, blocks: int) -> None:
        """Hand the current request back, if there is one."""
        with self._changed:
            if self._current is not None:
                self._finish(self._current, blocks)
                self._current = None

    def _perform(self) -> int:
        match self._current:
            case _Store(key, payload):
                return int(self._pool.put(key, payload, self._clock()))
            case _Load() as load:
                return self._read(load)
            case _Touch(keys):
                self._pool.touch(keys, self._clock())
        return 0

    def _read(self, load: _Load) -> int:
        count = 0
        for key, into in zip(load.keys, load.into):
            now = self._clock()
            if now >= load.deadline:
                self.stats.late_loads += 1
                break
            if self._closing or not self._pool.get(key, into, now):
                break
            count += 1
        self._pool.touch(load.keys[:count], self._clock())
        return count
