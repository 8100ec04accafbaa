"""Orders of a tier behind the host to its store: plain data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...memory_pool.stores.block_keys import SnapshotPlaces


@dataclass(slots=True, frozen=True)
class BlockWrite:
    """A block to be written, or a snapshot. Plain data."""

    store: str
    fence: int
    key: bytes
    host_slots: np.ndarray
    """int32 [block_tokens]; of a snapshot [n], the tokens behind the last whole block."""
    host_state: int = 0
    """Slot of a snapshot's recurrent state; 0 for a block."""


@dataclass(slots=True, frozen=True)
class BlockRead:
    """Consecutive blocks of a sequence to be read, up to the first that is not there. Plain data."""

    store: str
    fence: int
    keys: tuple[bytes, ...]
    host_slots: np.ndarray
    """int32 [len(keys) * block_tokens + n]: the blocks, and the n tokens of the snapshot."""
    timeout: float
    """Seconds from the order on, after which no request waits for it any more."""
    snapshot: bytes = b""
    """Key of a snapshot to be read behind the blocks, once all of them have come; empty for none."""
    host_state: int = 0
    """Slot for the snapshot's recurrent state."""


@dataclass(slots=True, frozen=True)
class BlockFind:
    """How many leading blocks are there, and which snapshots? The index of the store has the answer then. Plain
    data."""

    store: str
    fence: int
    keys: tuple[bytes, ...]
    timeout: float
    """As in `BlockRead`."""
    first: int = 0
    """The number of the first of these blocks in its sequence."""
    places: SnapshotPlaces | None = None
    """Where snapshots may be; None for models without recurrent states."""


@dataclass(slots=True, frozen=True)
class BlockTouch:
    """Consecutive blocks of a sequence to be marked as used, after the writes ordered before. No completion is
    reported. Plain data."""

    store: str
    keys: tuple[bytes, ...]
    snapshots: tuple[bytes, ...] = ()
    """Keys of snapshots to be marked likewise."""


BlockOrder = BlockRead | BlockWrite | BlockFind | BlockTouch
