"""Blocks of KV on disk, by key: the index, eviction when room is needed, and checks of what is read.

A pool is a `BlockStore` of one model (`PoolFolder`), of blocks of one size (`BlockFiles`). Its index is in memory:
looking up costs no I/O.

The methods that do I/O, those that take ``now``, are for one thread. `contains`, `longest`, `size`, `used_bytes` and
`stats` may be read from any other: they look at single entries of a dict and at numbers, and may be out of date when
they are used.

``now`` is in seconds, on any clock that does not go back.
"""

from __future__ import annotations

import errno
import itertools
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from .block_frame import DamagedBlock, check_key
from .block_keys import model_digest
from .block_store import BlockSource, BlockTarget, RareWarnings, StoreSize
from .pool_folder import BlockFiles, DiskPoolError, PoolFolder

logger = logging.getLogger(__name__)

PAUSE_S = 10.0
"""Seconds without writes after the disk refused one."""
TOUCH_S = 60.0
"""Least seconds between two notes on disk of a block's use. The order there is for the next start only."""

FAILURES = ("missing", "not_a_file", "size", "header", "checksum", "read", "no_space", "write", "remove")
"""Reads: a file that is gone, that a folder, link, … has replaced, of another size, with a wrong header (another key,
model or version), with a wrong payload; that the disk cannot read. Writes: a full disk, any other reason. Removing."""

_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""Reasons not to read a file that say nothing about it."""
_ONE_PATH = (errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST, errno.ELOOP)
"""Reasons not to write a file that say nothing about the next one."""


@dataclass(slots=True)
class DiskStats:
    """Counts since the pool was opened."""

    hits: int = 0
    """Blocks read."""
    misses: int = 0
    """Blocks asked for that were not there, or not to be trusted."""
    writes: int = 0
    evictions: int = 0
    """Blocks removed to make room."""
    bytes_read: int = 0
    bytes_written: int = 0
    writes_skipped: int = 0
    """Blocks not written because the disk had just refused one."""
    failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FAILURES, 0))
    """Failures by kind."""


class DiskPool:
    """Owns the blocks of one model in a folder. Raises DiskPoolError if the folder cannot be used.

    folder: made if it is not there; pools of several models may share it.
    capacity_bytes: the most that all blocks of this model take of the disk, the one being written and those of earlier
        processes included. Blocks of other models in the folder do not count, and neither does what is not ours.
    block_bytes: length of every payload. fingerprint: see `model_digest`; block_bytes must follow from it.
    """

    def __init__(self, folder: str | Path, capacity_bytes: int, block_bytes: int, fingerprint: bytes) -> None:
        model = model_digest(fingerprint)
        self._files = BlockFiles(model, block_bytes)
        if capacity_bytes < self._files.disk_bytes:
            raise DiskPoolError(
                f"a disk cache of {capacity_bytes} bytes cannot hold one block, which takes {self._files.disk_bytes}: "
                "give it room for hundreds of them"
            )
        self.block_bytes = block_bytes
        self.store_batch = 1
        self.capacity_bytes = capacity_bytes
        self.stats = DiskStats()
        self._index: OrderedDict[bytes, float] = OrderedDict()
        """Key -> when its use was last noted on disk; least recently used first."""
        self._lost_bytes = 0
        """On disk, and not to be removed."""
        self._paused_until = float("-inf")
        self._warnings = RareWarnings()
        self._folder = PoolFolder(Path(folder), model)
        try:
            self._take_stock()
        except BaseException:
            self._folder.close()
            raise

    def close(self) -> None:
        """Give the folder up. No call that does I/O may be running; later ones find nothing and store nothing."""
        self._folder.close()

    def _take_stock(self) -> None:
        """Start with the blocks that earlier processes left."""
        found = self._folder.scan(self._files.file_bytes)
        self._index.update(dict.fromkeys(found.keys, float("-inf")))
        if found.removed or found.foreign:
            logger.warning(
                "the disk cache in %s removed %d unfinished or truncated blocks; left %d files that are not its own: "
                "%s",
                self._folder.path, found.removed, len(found.foreign), ", ".join(found.foreign[:5]) or "-",
            )  # fmt: skip
        self._make_room(self.capacity_bytes, float("-inf"))

    # -- without I/O ---------------------------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """Bytes of the disk that the blocks take; never more than the capacity."""
        return len(self._index) * self._files.disk_bytes + self._lost_bytes

    def __len__(self) -> int:
        return len(self._index)

    def contains(self, key: bytes) -> bool:
        return key in self._index

    def size(self) -> StoreSize:
        return StoreSize(
            used_blocks=len(self._index),
            total_blocks=self.capacity_bytes // self._files.disk_bytes,
            used_bytes=self.used_bytes,
            total_bytes=self.capacity_bytes,
            evicted_blocks=self.stats.evictions,
        )

    def longest(self, keys: Sequence[bytes]) -> int:
        """The number of leading keys that are there."""
        return sum(1 for _ in itertools.takewhile(self._index.__contains__, keys))

    def view(self, buffer: np.ndarray, *, writable: bool = False) -> memoryview:
        """The bytes of a buffer. Raises ValueError if it is none for a block of this pool."""
        data = buffer.data
        if data.nbytes != self.block_bytes or not data.c_contiguous or (writable and data.readonly):
            kind = "contiguous, writable" if writable else "contiguous"
            raise ValueError(
                f"a buffer for a block is {self.block_bytes} {kind} bytes, not {data.nbytes} "
                f"(contiguous: {data.c_contiguous}, writable: {not data.readonly})"
            )
        return data.cast("B")

    def by_age(self) -> list[bytes]:
        """All keys, least recently used first. For the thread that does I/O."""
        return list(self._index)

    # -- with I/O ------------------------------------------------------------------------------------------------------

    def write_block(self, key: bytes, payload: np.ndarray, now: float) -> bool:
        """Store a block, in the place of the least recently used if need be. Returns True if it is on disk afterwards.

        A key stands for what is stored under it, so one that is there already is only marked as used.
        payload: uint8 [block_bytes], contiguous.
        """
        self.view(payload)
        return self._write_block(key, lambda: payload, now)

    def write_blocks(self, keys: Sequence[bytes], source: BlockSource, now: float) -> list[bool]:
        """`write_block` for several, each looked at only if it is written."""
        return [self._write_block(key, partial(source.block, index), now) for index, key in enumerate(keys)]

    def _write_block(self, key: bytes, payload: Callable[[], np.ndarray], now: float) -> bool:
        check_key(key)
        if key in self._index:
            self._note_use(key, now)
            return True
        if now < self._paused_until:
            self.stats.writes_skipped += 1
            return False
        if not self._make_room(self.capacity_bytes - self._files.disk_bytes, now):
            return False
        try:
            with self._folder.subfolder(key, make=True) as fd:
                self._files.write_block(fd, key, self.view(payload()))
        except OSError as error:
            self._refused(key, error, now)
            return False
        self._index[key] = now
        self.stats.writes += 1
        self.stats.bytes_written += self.block_bytes
        return True

    def read_block(self, key: bytes, into: np.ndarray, now: float) -> bool:
        """Read a block and mark it as used. False: it is not there, and what ``into`` holds means nothing.

        into: uint8 [block_bytes], contiguous.
        """
        data = self.view(into, writable=True)
        if key not in self._index or not self._read_file(key, data, now):
            self.stats.misses += 1
            return False
        self._note_use(key, now)
        self.stats.hits += 1
        self.stats.bytes_read += self.block_bytes
        return True

    def find_blocks(self, keys: Sequence[bytes], now: float) -> int:
        """`longest`; here it costs nothing."""
        return self.longest(keys)

    def read_blocks(self, keys: Sequence[bytes], target: BlockTarget, now: float) -> int:
        """`read_block` for the blocks of one sequence, up to the first that is not there. Returns the number read."""
        count = 0
        for index, key in enumerate(keys):
            if not (target.wanted() and self.read_block(key, target.room(index), now)):
                break
            target.accept(index)
            count += 1
        self.touch_blocks(keys[:count], now)
        return count

    def touch_blocks(self, keys: Sequence[bytes], now: float) -> None:
        """Mark the blocks of one sequence as used, the last one first: a block is worth nothing without those before
        it, so room is made from the ends of sequences. Keys that are not there are passed over."""
        for key in reversed(keys):
            if key in self._index:
                self._note_use(key, now)

    def _note_use(self, key: bytes, now: float) -> None:
        self._index.move_to_end(key)
        if now - self._index[key] >= TOUCH_S:
            self._index[key] = now
            try:
                self._folder.touch_block(key)
            except OSError:  # the next read of the block reports why
                logger.debug("the use of a block of KV could not be noted on disk", exc_info=True)

    def _read_file(self, key: bytes, into: memoryview, now: float) -> bool:
        try:
            with self._folder.subfolder(key) as fd:
                self._files.read_block(fd, key, into)
        except DamagedBlock as damage:
            kind, keep = damage.kind, False
        except FileNotFoundError:
            kind, keep = "missing", False
        except NotADirectoryError:
            kind, keep = "not_a_file", False
        except OSError as error:
            kind, keep = "read", error.errno in _SHORTAGES
        else:
            return True
        if self._fails(kind, now):
            logger.warning(
                "cannot use a block of KV on disk; recomputing it: %s (%s, %d so far)",
                key.hex(), kind, self.stats.failures[kind],
            )  # fmt: skip
        if not keep:
            self._drop(key, now)
        return False

    # -- room ----------------------------------------------------------------------------------------------------------

    def _make_room(self, limit: int, now: float) -> bool:
        """Remove blocks, least recently used first, until they take at most ``limit`` bytes; False if that fails."""
        while self.used_bytes > limit and self._index:
            self._drop(next(iter(self._index)), now)
            self.stats.evictions += 1
        return self.used_bytes <= limit

    def _drop(self, key: bytes, now: float) -> None:
        """Forget a block and remove its file."""
        del self._index[key]
        self._remove_file(key, now)

    def _remove_file(self, key: bytes, now: float) -> None:
        """Remove a block's file. A file of ours that cannot be removed still counts as used space."""
        try:
            self._folder.remove_block(key)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            pass
        except OSError as error:
            self._lost_bytes += self._files.disk_bytes
            if self._fails("remove", now):
                logger.warning(
                    "cannot remove a block of KV from disk; its space is lost until the next start: %s: %s",
                    key.hex(), error.strerror,
                )  # fmt: skip

    def _refused(self, key: bytes, error: OSError, now: float) -> None:
        """The disk refused a write. It would most likely refuse the next ones too, so writing pauses for a while."""
        kind = "no_space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "write"
        pause = 0.0 if error.errno in _ONE_PATH else PAUSE_S
        self._paused_until = now + pause
        if self._fails(kind, now):
            logger.warning(
                "cannot write a block of KV to disk; pausing writes for %d s: %s: %s (%s, %d so far)",
                pause, key.hex(), error.strerror, kind, self.stats.failures[kind],
            )  # fmt: skip

    def _fails(self, kind: str, now: float) -> bool:
        """Count a failure. Returns True if it should be logged: not if one of its kind was logged lately."""
        self.stats.failures[kind] += 1
        return self._warnings.due(kind, now)
