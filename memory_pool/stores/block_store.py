"""The protocol of stores of blocks below the host tier: a disk, a server in the network.

Blocks are addressed by key (block_keys.py) and all have one size. A failure of a store is a miss, or a block that is
not stored: the store counts it, logs it at intervals, and raises nothing. So KV is computed again, and no request
fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

WARN_S = 60.0
"""Least seconds between two log lines about the same kind of failure."""


@dataclass(slots=True, frozen=True)
class StoreSize:
    """The fill level of a store. Bytes are those that blocks take there, headers and rounding included; evicted_blocks
    counts blocks removed to make room since the store was opened."""

    used_blocks: int
    total_blocks: int
    used_bytes: int
    total_bytes: int
    evicted_blocks: int


class BlockTarget(Protocol):
    """The destination of the blocks of one `read_blocks`."""

    def wanted(self) -> bool:
        """Cancellation check, polled before each block and during slow I/O: False to stop."""
        ...

    def room(self, index: int) -> np.ndarray:
        """uint8 [block_bytes], the buffer for block ``index``. It is not read before `accept`."""
        ...

    def accept(self, index: int) -> None:
        """Block ``index`` is in its room, and is what its key says."""
        ...


class BlockSource(Protocol):
    """The blocks of one `write_blocks`."""

    def block(self, index: int) -> np.ndarray:
        """uint8 [block_bytes], unchanged until the next call. Not free: ask only for what will be written."""
        ...


class BlockStore(Protocol):
    """One model's blocks. The methods that take ``now``, in seconds on a clock that does not go back, are for one
    thread and may wait for I/O. `contains` and `size` never wait, and any thread may call them."""

    @property
    def block_bytes(self) -> int: ...

    @property
    def store_batch(self) -> int:
        """The number of blocks that `write_blocks` should get per call, if there are that many."""
        ...

    def contains(self, key: bytes) -> bool:
        """True if the block is known to be stored. May be out of date."""
        ...

    def size(self) -> StoreSize | None:
        """None where the store does not know its size. May be out of date."""
        ...

    def find_blocks(self, keys: Sequence[bytes], now: float) -> int:
        """The number of leading blocks that are there."""
        ...

    def read_blocks(self, keys: Sequence[bytes], target: BlockTarget, now: float) -> int:
        """Read consecutive blocks of one sequence and mark them as used. Returns the number of leading blocks that were
        accepted."""
        ...

    def write_blocks(self, keys: Sequence[bytes], source: BlockSource, now: float) -> list[bool]:
        """Store blocks. Returns for each whether it is there afterwards."""
        ...

    def touch_blocks(self, keys: Sequence[bytes], now: float) -> None:
        """Mark the blocks of a sequence as used, from its first block on; keys that are not there are passed over."""
        ...

    def close(self) -> None:
        """Release files and connections. Called by the owner, when no other call is running."""
        ...


class RareWarnings:
    """Limits the log to one failure of each kind per WARN_S."""

    def __init__(self) -> None:
        self._logged_at: dict[str, float] = {}

    def due(self, kind: str, now: float) -> bool:
        last = self._logged_at.get(kind)
        if last is not None and not now - last >= WARN_S:  # at start both may be -inf, and this is NaN
            return False
        self._logged_at[kind] = now
        return True
