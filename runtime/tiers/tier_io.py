"""Has everything done that the scheduler's tiers order: copies between device and host, blocks to and from disk.

scheduler.tiers.take ─▶ order ─▶ Transfers (thread, streams) ─▶ poll ─▶ scheduler.tiers.copy_ended, blocks_ended
                            └──▶ BlockIO (thread) ────────────────┘
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ...radix.disk_tier import BlockRead, BlockWrite
from ...radix.host_tier import TierCopy
from .block_io import BlockIO, Stored
from .transfer import Ended, Transfers


class BlocksEnded(NamedTuple):
    """A read or write of blocks that is over: its slots on the host are neither read nor written any more."""

    fence: int
    blocks: int
    """Of a read: how many leading blocks are in their slots. Of a write: 1 if the block is there now, else 0."""
    seconds: float
    """How long it took itself, without its time in the queue."""


class TierIO:
    """Called from the scheduler's thread alone; nothing here waits, but `close`.

    disk: its thread; None without a disk tier. page_size: tokens of a page.
    """

    def __init__(
        self,
        transfers: Transfers,
        page_size: int,
        disk: BlockIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """clock: the disk's, in seconds."""
        self.transfers = transfers
        self._clock = clock
        self._page_size = page_size
        self._disk = disk
        self._on_disk = 0
        """Orders for the disk that have not been polled."""
        self._at_once: list[BlocksEnded] = []
        """Those that were over as soon as they were given."""

    def order(self, orders: Sequence[TierCopy | BlockRead | BlockWrite]) -> None:
        """Have these done. Steps that are launched from now on wait for the loads among them, layer by layer."""
        if not orders:
            return
        self.transfers.order([order for order in orders if isinstance(order, TierCopy)])
        for order in orders:
            if not isinstance(order, TierCopy):
                self._order_blocks(order)

    def _order_blocks(self, order: BlockRead | BlockWrite) -> None:
        assert self._disk is not None, "only a disk tier orders blocks"
        pages = order.host_slots[:: self._page_size] // self._page_size
        at_once = None
        if isinstance(order, BlockRead):
            deadline = self._clock() + order.timeout
            if not self._disk.load(order.keys, pages.reshape(len(order.keys), -1), order.fence, deadline):
                at_once = 0
        elif not (stored := self._disk.store(order.key, pages, order.fence)):
            at_once = int(stored is Stored.PRESENT)
        self._on_disk += 1
        if at_once is not None:
            self._at_once.append(BlocksEnded(order.fence, at_once, 0.0))

    @property
    def under_way(self) -> int:
        """Orders that have not been polled."""
        return self.transfers.under_way + self._on_disk

    def poll(self) -> list[Ended | BlocksEnded]:
        """What is over since the last call, each order once."""
        over: list[Ended | BlocksEnded] = list(self.transfers.poll())
        if self._on_disk:
            assert self._disk is not None
            blocks, self._at_once = self._at_once, []
            blocks += [BlocksEnded(done.tag, done.blocks, done.seconds) for done in self._disk.poll()]
            self._on_disk -= len(blocks)
            over += blocks
        return over

    def clear_disk(self) -> None:
        """Remove every block of this model from the disk, before anything that is ordered from now on."""
        if self._disk is not None:
            self._disk.clear()

    def close(self, timeout: float) -> None:
        """Give up what has not begun, and wait for what has, up to ``timeout`` seconds for each thread."""
        self.transfers.close(timeout)
        if self._disk is not None:
            self._disk.close(timeout)


def is_finite(block: np.ndarray, dtype: np.dtype | str) -> bool:
    """Does a block of KV, uint8 [n], hold numbers only? dtype: float32, float16 or bfloat16, as torch names them."""
    words, mask = (np.uint32, 0x7F800000) if str(dtype) == "float32" else (np.uint16, _HALF_MASKS[str(dtype)])
    return not ((block.view(words) & words(mask)) == mask).any()


_HALF_MASKS = {"float16": 0x7C00, "bfloat16": 0x7F80}
