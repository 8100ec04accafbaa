"""A thread that reads and writes a store of blocks, so that a slow disk or network delays no step.

    scheduler's thread      store, load, find, touch ─▶ [queues] ─▶ thread ─▶ BlockStore
                            poll ◀───────────────────── [done] ◀──────┘   ◀─▶ pages of the host pool

No call here waits for I/O, and none copies KV: the thread itself gathers blocks from the host pool's pages and puts
them back there. Every load, find and store that was accepted comes back from `poll` exactly once, also if the thread
dies. Until then its pages belong to the thread: those of a load may be written, those of a store read, at any moment.

Loads go before stores: requests wait for loads, and a store is for later ones. A store that finds too much queued is
dropped; the KV will be computed again.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ...memory_pool.stores.block_store import BlockStore
from ...memory_pool.stores.host_pool import BlockPages

logger = logging.getLogger(__name__)

_TOUCH_BYTES = 64
"""Bytes that a queued key counts as."""


class Finished(NamedTuple):
    """A request that is done with its pages."""

    tag: Any
    blocks: int
    """A load: how many leading blocks are in their pages; the other pages hold nothing of use. A find: how many leading
    blocks are there. A store: 1 if the block is in the store, or 0."""
    seconds: float
    """Seconds of I/O, without time in the queue; stores written together share their time."""


class Stored(enum.Enum):
    """Result of `BlockIO.store_block`. True, as a condition, if there will be a completion."""

    QUEUED = "queued"
    PRESENT = "present"
    """Not needed: the store has it."""
    DROPPED = "dropped"
    """Too much is queued, or the thread has ended."""

    def __bool__(self) -> bool:
        return self is Stored.QUEUED


@dataclass(slots=True)
class BlockIOStats:
    stores_dropped: int = 0
    """Stores that were not accepted because too much was queued."""
    late_loads: int = 0
    """Loads that ran into their deadline."""
    unsound_stores: int = 0
    """Blocks that were not stored because `is_sound` rejected them."""


@dataclass(slots=True, eq=False)
class _Load:
    keys: Sequence[bytes]
    pages: np.ndarray | None
    """None: find only."""
    tag: Any
    deadline: float


@dataclass(slots=True, eq=False)
class _Store:
    key: bytes
    pages: np.ndarray
    tag: Any
    queued_bytes: int


@dataclass(slots=True, eq=False)
class _Touch:
    keys: Sequence[bytes]

    @property
    def queued_bytes(self) -> int:
        return len(self.keys) * _TOUCH_BYTES


_Request = _Load | _Store | _Touch


class BlockIO:
    """Owns the thread and its queues. Only that thread calls the methods of ``pool`` that do I/O.

    pages: uint8 [num_pages, page_nbytes], the host pool's memory itself (`HostPool.pages_view`).
    max_queued_bytes: the most that unfinished stores may hold of it.
    wake: called by the thread when there is something to `poll`, without any lock of ours.
    clock: seconds; what deadlines are measured on.
    name: of the thread, and in the log.
    is_sound: True if a block, uint8 [block_bytes], may be stored: stored blocks are still read after a restart.
    """

    def __init__(
        self,
        pool: BlockStore,
        pages: np.ndarray,
        max_queued_bytes: int,
        *,
        wake: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        name: str = "disk",
        is_sound: Callable[[np.ndarray], bool] | None = None,
    ) -> None:
        if max_queued_bytes < pool.block_bytes:
            raise ValueError(f"max_queued_bytes {max_queued_bytes} leaves no room for one block of {pool.block_bytes}")
        self.stats = BlockIOStats()
        self.name = name
        self._pool = pool
        self._pages = BlockPages(pages, pool.block_bytes)
        self._wake = wake
        self._is_sound = is_sound
        self._clock = clock
        self._max_queued_bytes = max_queued_bytes
        self._changed = threading.Condition()
        """Held for a moment at a time, never during I/O. It guards all below."""
        self._loads: deque[_Load] = deque()
        self._stores: deque[_Store | _Touch] = deque()
        self._current: Sequence[_Request] = ()
        self._finished: list[Finished] = []
        self._queued_bytes = 0
        self._pending = 0
        self._closing = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=f"baton-{name}", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        """Loads, finds and stores that were accepted and have not been polled."""
        with self._changed:
            return self._pending

    @property
    def queued_bytes(self) -> int:
        with self._changed:
            return self._queued_bytes

    def store_block(self, key: bytes, pages: np.ndarray, tag: Any) -> Stored:
        """Store a block. Only if this is true will there be a completion.

        pages: int [pages per block], the host pages of the block in order; what is in them stays as it is until the
            completion has been polled.
        """
        (numbers,) = self._pages.numbers(pages, 1)
        if self._pool.contains(key):
            return Stored.PRESENT
        return Stored.QUEUED if self._enqueue(_Store(key, numbers, tag, self._pool.block_bytes)) else Stored.DROPPED

    def load_blocks(self, keys: Sequence[bytes], pages: np.ndarray, tag: Any, deadline: float) -> bool:
        """Read consecutive blocks of one sequence, up to the first that is not there. False: nothing will be read, and
        there will be no completion.

        pages: int [len(keys), pages per block], where each block goes, no page twice.
        deadline: on the clock; no block is begun after it. A disk that hangs within a block is waited for: the caller
            enforces the deadline itself, and leaves the pages alone until the load completes.
        """
        return self._ask(_Load(keys, self._pages.numbers(pages, len(keys)), tag, deadline))

    def find_blocks(self, keys: Sequence[bytes], tag: Any, deadline: float) -> bool:
        """Count the leading blocks that could be loaded, for a store that knows only part of its contents locally.
        Queued and completed like a load."""
        return self._ask(_Load(keys, None, tag, deadline))

    def touch_blocks(self, keys: Sequence[bytes]) -> bool:
        """Mark the blocks of a sequence as used, from its first block on, once the stores before it are done. Worth
        doing after a sequence's last store: see `DiskPool.touch_blocks`. No completion; False: it was dropped."""
        return self._enqueue(_Touch(keys))

    def poll(self) -> list[Finished]:
        """Completions since the last call, in order."""
        with self._changed:
            finished, self._finished = self._finished, []
            self._pending -= len(finished)
            return finished

    def close(self, timeout: float) -> bool:
        """Accept nothing more, cancel the loads, and continue storing for up to ``timeout`` seconds; then cancel the
        rest.

        True if the thread has ended. If not, the store hangs: the pages of its current request, and the store itself,
        must stay. May be called again.
        """
        with self._changed:
            self._closing = True
            self._give_up(self._loads)
            self._changed.notify()
        self._thread.join(timeout)
        with self._changed:
            self._give_up(self._stores)
        return not self._thread.is_alive()

    def _ask(self, request: _Load) -> bool:
        with self._changed:
            if self._closing or self._ended:
                return False
            self._loads.append(request)
            self._pending += 1
            self._changed.notify()
            return True

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
            self._finish(requests.popleft(), 0, 0.0)

    def _finish(self, request: _Request, blocks: int, seconds: float) -> None:
        if not isinstance(request, _Load):
            self._queued_bytes -= request.queued_bytes
        if not isinstance(request, _Touch):
            self._finished.append(Finished(request.tag, blocks, seconds))

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._take():
                started = self._clock()
                blocks = self._perform(started)
                self._complete(blocks, self._clock() - started)
                self._wake_up()
        except BaseException:
            logger.exception(
                "the thread for KV on %s has failed; until the next start nothing is read or stored", self.name
            )
        finally:
            with self._changed:
                self._ended = True
                self._complete([0] * len(self._current), 0.0)
                self._give_up(self._loads)
                self._give_up(self._stores)
            self._wake_up()

    def _take(self) -> bool:
        """Wait for the next requests and make them the current ones; False: there will be none."""
        with self._changed:
            while not (self._loads or self._stores or self._closing):
                self._changed.wait()
            if self._loads:
                self._current = (self._loads.popleft(),)
            elif self._stores:
                self._current = self._take_stores()
            else:
                return False
            return True

    def _take_stores(self) -> list[_Store | _Touch]:
        """Stores that go together, or one touch."""
        taken = [self._stores.popleft()]
        while isinstance(taken[0], _Store) and self._stores and len(taken) < self._pool.store_batch:
            if not isinstance(self._stores[0], _Store):
                break
            taken.append(self._stores.popleft())
        return taken

    def _complete(self, blocks: Sequence[int], seconds: float) -> None:
        """Hand the current requests back, if there are any."""
        with self._changed:
            done, self._current = self._current, ()
            for request, count in zip(done, blocks):
                self._finish(request, count, seconds / len(done))

    def _wake_up(self) -> None:
        if self._finished:
            self._wake()

    def _perform(self, now: float) -> list[int]:
        """Do the current requests; returns `Finished.blocks` for each."""
        match self._current:
            case (_Touch(keys),):
                self._pool.touch_blocks(keys, now)
                return [0]
            case (_Load() as load,):
                return [self._read(load, now)]
            case stores:
                return self._write([store for store in stores if isinstance(store, _Store)], now)

    def _read(self, load: _Load, now: float) -> int:
        target = _Pages(self, load.pages, load.deadline)
        if load.pages is not None:
            count = self._pool.read_blocks(load.keys, target, now)
        else:
            count = self._pool.find_blocks(load.keys, now) if target.wanted() else 0
        self.stats.late_loads += target.late
        return count

    def _write(self, stores: list[_Store], now: float) -> list[int]:
        """Skips blocks that have reached the store meanwhile."""
        there = [self._pool.contains(store.key) for store in stores]
        wanted = [store for store, known in zip(stores, there) if not known]
        sound = wanted
        if self._is_sound is not None:
            sound = [store for store in wanted if self._is_sound(self._pages.gather(store.pages))]
        if len(sound) < len(wanted):
            self.stats.unsound_stores += len(wanted) - len(sound)
            logger.warning("%d blocks of KV are not finite and are not stored", len(wanted) - len(sound))
        source = _Pages(self, np.array([store.pages for store in sound]))
        written = self._pool.write_blocks([store.key for store in sound], source, now) if sound else []
        kept = {store.key for store, done in zip(sound, written, strict=True) if done}
        return [int(known or store.key in kept) for store, known in zip(stores, there)]


class _Pages:
    """The blocks of a load or of some stores: a `BlockTarget` and `BlockSource` in the host pool.

    numbers: int64 [blocks, pages per block].
    """

    def __init__(self, owner: BlockIO, numbers: np.ndarray | None, deadline: float = float("inf")) -> None:
        self.late = False
        self._owner = owner
        self._pages = owner._pages
        self._numbers = np.empty((0, 0), np.int64) if numbers is None else numbers
        self._deadline = deadline

    def wanted(self) -> bool:
        self.late = self.late or self._owner._clock() >= self._deadline
        return not (self.late or self._owner._closing)

    def block(self, index: int) -> np.ndarray:
        return self._pages.gather(self._numbers[index])

    def room(self, index: int) -> np.ndarray:
        return self._pages.room(self._numbers[index])

    def accept(self, index: int) -> None:
        self._pages.scatter(self._numbers[index])
