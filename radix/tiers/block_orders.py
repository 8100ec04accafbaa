"""Orders of a tier behind the host to its store: plain data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(slots=True, frozen=True)
class BlockWrite:
    """A block to be written. Plain data."""

    store: str
    fence: int
    key: bytes
    host_slots: np.ndarray
    """int32 [block_tokens]"""


@dataclass(slots=True, frozen=True)
class BlockRead:
    """Consecutive blocks of a sequence to be read, up to the first that is not there. Plain data."""

    store: str
    fence: int
    keys: tuple[bytes, ...]
    host_slots: np.ndarray
    """int32 [len(keys) * block_tokens]"""
    timeout: float
    """Seconds from the order on, after which no request waits for it any more."""


@dataclass(slots=True, frozen=True)
class BlockFind:
    """How many leading blocks are there? Plain data."""

    store: str
    fence: int
    keys: tuple[bytes, ...]
    timeout: float
    """As in `BlockRead`."""


@dataclass(slots=True, frozen=True)
class BlockTouch:
    """Consecutive blocks of a sequence to be marked as used, after the writes ordered before. No completion is
    reported. Plain data."""

    store: str
    keys: tuple[bytes, ...]


BlockOrder = BlockRead | BlockWrite | BlockFind | BlockTouch
