"""What every store of blocks below the host tier can do: a disk, a server in the network.

Blocks go by key (block_keys.py) and all have one size. Whatever goes wrong in a store is a miss, or a block that is not
stored: it counts it, logs it now and then, and raises nothing. So KV is computed again, and no request fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

WARN_S = 60.0
"""How often, at most, each kind of failure is logged."""


@dataclass(slots=True, frozen=True)
class StoreSize:
    """How full a store is. Bytes are what blocks take there, headers and rounding included; evicted_blocks counts those
    removed to make room, since the store was opened."""

    used_blocks: int
    total_blocks: int
    used_bytes: int
    total_bytes: int
    evicted_blocks: int


class BlockTarget(Protocol):
    """Where the blocks of one `get_many` go."""

    def wanted(self) -> bool:
        """Whether to go on. Asked before each block, and meanwhile where that takes long."""
        ...

    def room(self, index: int) -> np.ndarray:
        """uint8 [block_bytes], where block ``index`` can be read to. Nobody looks there before `accept`."""
        ...

    def accept(self, index: int) -> None:
        """Block ``index`` is in its room, and is what its key says."""
        ...


class BlockSource(Protocol):
    """The blocks of one `put_many`."""

    def block(self, index: int) -> np.ndarray:
        """uint8 [block_bytes], unchanged until the next call. Not free: ask only for what will be written."""
        ...


class BlockStore(Protocol):
    """One model's blocks. One thread calls what takes ``now``, in seconds on a clock that does not go back; all of that
    may wait for I/O. `contains` and `size` never do, and any thread may call them."""

    @property
    def block_bytes(self) -> int: ...

    @property
    def store_batch(self) -> int:
        """How many blocks `put_many` should be given at once, where there are so many."""
        ...

    def contains(self, key: bytes) -> bool:
        """Whether the block need not be stored, as far as is known here. May be out of date."""
        ...

    def size(self) -> StoreSize | None:
        """None where only somebody else knows it. May be out of date."""
        ...

    def find(self, keys: Sequence[bytes], now: float) -> int:
        """How many leading blocks are there."""
        ...

    def get_many(self, keys: Sequence[bytes], target: BlockTarget, now: float) -> int:
        """Read consecutive blocks of one sequence and mark them as used. How many leading ones were accepted."""
        ...

    def put_many(self, keys: Sequence[bytes], source: BlockSource, now: float) -> list[bool]:
        """Store blocks. Whether each is there afterwards."""
        ...

    def touch(self, keys: Sequence[bytes], now: float) -> None:
        """Mark the blocks of a sequence as used, from its first block on; keys that are not there are passed over."""
        ...

    def close(self) -> None:
        """Give up what it holds open. For whoever opened it, when no other call is running."""
        ...


class RareWarnings:
    """Says which failures to log: one of each kind in WARN_S."""

    def __init__(self) -> None:
        self._logged_at: dict[str, float] = {}

    def due(self, kind: str, now: float) -> bool:
        last = self._logged_at.get(kind)
        if last is not None and not now - last >= WARN_S:  # at start both may be -inf, and this is NaN
            return False
        self._logged_at[kind] = now
        return True
