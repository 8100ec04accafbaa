"""A thread that reads and writes a store of blocks, so that a slow disk or network delays no step.

    scheduler's thread      store, load, find, touch ─▶ [queues] ─▶ thread ─▶ BlockStore
                            poll ◀───────────────────── [done] ◀──────┘   ◀─▶ pages of the host pool

No call here waits for I/O, and none copies KV: the thread itself gathers blocks from the host pool's pages and puts
them back there. Every load, find and store that was accepted comes back from `poll` exactly once, also if the thread
dies. Until then its pages belong to the thread: those of a load may be written, those of a store read, at any moment.

Loads go before stores: requests wait for loads, and a store is for later ones. A store that finds too much queued is
dropped; the KV will be computed again.

Where the model has recurrent states, the thread has a second `BlockStore` in the same place, of snapshots. A load reads
the blocks of a sequence, and then the snapshot behind them.
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

from ...memory_pool.stores.block_keys import SnapshotPlaces
from ...memory_pool.stores.block_store import BlockStore
from ...memory_pool.stores.host_pool import BlockPages
from ...memory_pool.stores.host_state_pool import SnapshotPages

logger = logging.getLogger(__name__)

_TOUCH_BYTES = 64
"""Bytes that a queued key counts as."""


class Finished(NamedTuple):
    """A request that is done with its pages."""

    tag: Any
    blocks: int
    """A load: how many leading blocks are in their pages, a snapshot included; the other pages hold nothing of use. A
    find: how many leading blocks are there. A store: 1 if the block is in the store, or 0."""
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


class Kept(NamedTuple):
    """One kind of what the thread stores, all of one size: blocks, or snapshots."""

    store: BlockStore
    pages: BlockPages | SnapshotPages
    is_sound: Callable[[np.ndarray], bool] | None = None
    """True if one, uint8 [n], may be stored: it may still be read after a restart."""


@dataclass(slots=True, eq=False)
class _Load:
    keys: Sequence[bytes]
    pages: np.ndarray | None
    """int64 [blocks, pages per block]. None: find only."""
    tag: Any
    deadline: float
    snapshot: tuple[bytes, np.ndarray] | None = None
    """Key and `SnapshotPages.numbers`."""
    first: int = 0
    places: SnapshotPlaces | None = None
    """Where to look for snapshots behind the blocks that are there, the first of which has number ``first``."""


@dataclass(slots=True, eq=False)
class _Store:
    key: bytes
    pages: np.ndarray
    tag: Any
    kind: Kept

    @property
    def queued_bytes(self) -> int:
        return self.kind.store.block_bytes


@dataclass(slots=True, eq=False)
class _Touch:
    keys: Sequence[bytes]
    snapshots: Sequence[bytes]

    @property
    def queued_bytes(self) -> int:
        return (len(self.keys) + len(self.snapshots)) * _TOUCH_BYTES


_Request = _Load | _Store | _Touch


class BlockIO:
    """Owns the thread and its queues. Only that thread calls the methods of ``pool``, and of the store of snapshots,
    that do I/O.

    pages: uint8 [num_pages, page_nbytes], the host pool's memory itself (`HostPool.pages_view`).
    max_queued_bytes: the most that unfinished stores may hold of it.
    wake: called by the thread when there is something to `poll`, without any lock of ours.
    clock: seconds; what deadlines are measured on.
    name: of the thread, and in the log.
    is_sound: see `Kept`. snapshots: None for models without recurrent states.
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
        snapshots: Kept | None = None,
    ) -> None:
        if max_queued_bytes < pool.block_bytes:
            raise ValueError(f"max_queued_bytes {max_queued_bytes} leaves no room for one block of {pool.block_bytes}")
        self.stats = BlockIOStats()
        self.name = name
        self._pool = pool
        self._pages = BlockPages(pages, pool.block_bytes)
        self._wake = wake
        self._blocks = Kept(pool, self._pages, is_sound)
        self._snapshots = snapshots
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
        return Stored.QUEUED if self._enqueue(_Store(key, numbers, tag, self._blocks)) else Stored.DROPPED

    def store_snapshot(self, key: bytes, state: int, pages: np.ndarray, tag: Any) -> Stored:
        """Store a snapshot; as `store_block`. state: slot on the host. pages: int [n] of the tokens behind the last
        whole block."""
        kind, numbers = self._snapshot(state, pages)
        if kind.store.contains(key):
            return Stored.PRESENT
        return Stored.QUEUED if self._enqueue(_Store(key, numbers, tag, kind)) else Stored.DROPPED

    def _snapshot(self, state: int, pages: np.ndarray) -> tuple[Kept, np.ndarray]:
        assert self._snapshots is not None and isinstance(self._snapshots.pages, SnapshotPages)
        return self._snapshots, self._snapshots.pages.numbers(state, pages)

    def load_blocks(
        self, keys: Sequence[bytes], pages: np.ndarray, tag: Any, deadline: float, snapshot: bytes = b"", state: int = 0
    ) -> bool:
        """Read consecutive blocks of one sequence, up to the first that is not there, and if all are, the snapshot
        behind them. False: nothing will be read, and there will be no completion.

        pages: int [n], where each block goes, and behind them the tokens of the snapshot; no page twice.
        snapshot: its key; empty for none. state: slot on the host for its state.
        deadline: on the clock; no block is begun after it. A disk that hangs within a block is waited for: the caller
            enforces the deadline itself, and leaves the pages alone until the load completes.
        """
        flat = np.asarray(pages).reshape(-1)
        end = len(keys) * self._pages.pages_per_block if snapshot else len(flat)
        numbers = self._pages.numbers(flat[:end], len(keys))
        behind = (snapshot, self._snapshot(state, flat[end:])[1]) if snapshot else None
        return self._ask(_Load(keys, numbers, tag, deadline, behind))

    def find_blocks(
        self, keys: Sequence[bytes], tag: Any, deadline: float, first: int = 0, places: SnapshotPlaces | None = None
    ) -> bool:
        """Count the leading blocks that could be loaded, for a store that knows only part of its contents locally.
        Queued and completed like a load. first: number of the first of them in the sequence. places: where a snapshot
        may be; the index of the store of snapshots then knows those that are there."""
        return self._ask(_Load(keys, None, tag, deadline, None, first, places))

    def touch_blocks(self, keys: Sequence[bytes], snapshots: Sequence[bytes] = ()) -> bool:
        """Mark the blocks of a sequence as used, from its first block on, once the stores before it are done. Worth
        doing after a sequence's last store: see `DiskPool.touch_blocks`. No completion; False: it was dropped."""
        return self._enqueue(_Touch(keys, snapshots))

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
        first = self._stores.popleft()
        taken = [first]
        while isinstance(first, _Store) and self._stores and len(taken) < first.kind.store.store_batch:
            after = self._stores[0]
            if not isinstance(after, _Store) or after.kind is not first.kind:
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
            case (_Touch(keys, snapshots),):
                if keys:
                    self._pool.touch_blocks(keys, now)
                if snapshots and self._snapshots is not None:
                    self._snapshots.store.touch_blocks(snapshots, now)
                return [0]
            case (_Load() as load,):
                return [self._read(load, now)]
            case stores:
                return self._write([store for store in stores if isinstance(store, _Store)], now)

    def _read(self, load: _Load, now: float) -> int:
        target = _Pages(self, self._blocks, [] if load.pages is None else load.pages, load.deadline)
        if load.pages is None:
            count = self._pool.find_blocks(load.keys, now) if target.wanted() else 0
            if load.places is not None and self._snapshots is not None and target.wanted():
                places = [key for _, key in load.places.within(load.first + count)]
                self._snapshots.store.find_blocks(places, now)
        else:
            count = self._pool.read_blocks(load.keys, target, now) if load.keys else 0
            if load.snapshot is not None and self._snapshots is not None and count == len(load.keys):
                key, numbers = load.snapshot
                target = _Pages(self, self._snapshots, [numbers], load.deadline)
                count += self._snapshots.store.read_blocks([key], target, now)
        self.stats.late_loads += target.late
        return count

    def _write(self, stores: list[_Store], now: float) -> list[int]:
        """Skips blocks that have reached the store meanwhile."""
        kind = stores[0].kind
        there = [kind.store.contains(store.key) for store in stores]
        wanted = [store for store, known in zip(stores, there) if not known]
        sound = wanted
        if kind.is_sound is not None:
            sound = [store for store in wanted if kind.is_sound(kind.pages.gather(store.pages))]
        if len(sound) < len(wanted):
            self.stats.unsound_stores += len(wanted) - len(sound)
            logger.warning("%d blocks of KV are not finite and are not stored", len(wanted) - len(sound))
        source = _Pages(self, kind, [store.pages for store in sound])
        written = kind.store.write_blocks([store.key for store in sound], source, now) if sound else []
        kept = {store.key for store, done in zip(sound, written, strict=True) if done}
        return [int(known or store.key in kept) for store, known in zip(stores, there)]


class _Pages:
    """The blocks of a load or of some stores: a `BlockTarget` and `BlockSource` in the host pool.

    numbers: of the pages of each, int64 [n].
    """

    def __init__(
        self, owner: BlockIO, kind: Kept, numbers: Sequence[np.ndarray] | np.ndarray, deadline: float = float("inf")
    ) -> None:
        self.late = False
        self._owner = owner
        self._pages = kind.pages
        self._numbers = numbers
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
