"""Executes the orders of the scheduler's tiers: copies between device and host, blocks to and from stores.

Scheduler.take_transfer_orders ─▶ submit_orders ─┬▶ Transfers (thread, streams) ─▶ poll ─▶ Scheduler.finish_copy
                                                 └▶ BlockIO (thread) ─────────────▶ poll ─▶ Scheduler.finish_block_order
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from ...memory_pool.stores.host_pool import HostPool
from ...memory_pool.stores.host_state_pool import HostStatePool
from ...radix.tiers.block_orders import BlockFind, BlockOrder, BlockRead, BlockTouch, BlockWrite
from ...radix.tiers.host_tier import TierCopy
from .block_io import BlockIO, Stored
from .stream_transfer import StreamTransfers
from .thread_transfer import ThreadTransfers
from .transfer import Ended, Transfers


class BlocksEnded(NamedTuple):
    """An order for a store that has ended: its slots on the host are neither read nor written any more."""

    fence: int
    blocks: int
    """Read: leading blocks now in their slots, a snapshot included. Find: leading blocks in the store. Write: 1 if the
    block is in the store now, else 0."""
    seconds: float
    """Duration without its time in the queue."""


class TierIO:
    """Called from the scheduler's thread only. Nothing but `close` waits.

    stores: the threads of the stores behind the host, by name. page_size: tokens of a page.
    """

    def __init__(
        self,
        transfers: Transfers,
        page_size: int,
        stores: Mapping[str, BlockIO] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """clock: the stores' clock, in seconds."""
        self.transfers = transfers
        self._clock = clock
        self._page_size = page_size
        self._stores = dict(stores or {})
        self._blocks_under_way = 0
        """Orders for stores that have not been polled."""
        self._at_once: list[BlocksEnded] = []
        """Orders that ended as soon as they were submitted."""

    def submit_orders(self, orders: Sequence[TierCopy | BlockOrder]) -> None:
        """Start these orders. Steps launched from now on wait for their loads, layer by layer."""
        if not orders:
            return
        self.transfers.order_copies([order for order in orders if isinstance(order, TierCopy)])
        for order in orders:
            if not isinstance(order, TierCopy):
                self._order_blocks(order)

    def _order_blocks(self, order: BlockOrder) -> None:
        store, blocks = self._stores[order.store], 0
        match order:
            case BlockTouch(keys=keys, snapshots=snapshots):
                store.touch_blocks(keys, snapshots)  # harmless if dropped: blocks in use are touched again
                return
            case BlockFind(keys=keys):
                until = self._clock() + order.timeout
                accepted = store.find_blocks(keys, order.fence, until, order.first, order.places)
            case BlockRead(keys=keys):
                pages, until = self._pages(order.host_slots), self._clock() + order.timeout
                accepted = store.load_blocks(keys, pages, order.fence, until, order.snapshot, order.host_state)
            case BlockWrite(key=key, host_state=0):
                stored = store.store_block(key, self._pages(order.host_slots), order.fence)
                accepted, blocks = bool(stored), int(stored is Stored.PRESENT)
            case BlockWrite(key=key):
                pages = self._pages(order.host_slots)
                stored = store.store_snapshot(key, order.host_state, pages, order.fence)
                accepted, blocks = bool(stored), int(stored is Stored.PRESENT)
        self._blocks_under_way += 1
        if not accepted:
            self._at_once.append(BlocksEnded(order.fence, blocks, 0.0))

    def _pages(self, slots: np.ndarray) -> np.ndarray:
        return slots[:: self._page_size] // self._page_size

    @property
    def under_way(self) -> int:
        """Orders that have not been polled."""
        return self.transfers.under_way + self._blocks_under_way

    def poll(self) -> list[Ended | BlocksEnded]:
        """Orders that ended since the last call, each once."""
        over: list[Ended | BlocksEnded] = list(self.transfers.poll())
        if self._blocks_under_way:
            blocks, self._at_once = self._at_once, []
            for store in self._stores.values():
                blocks += [BlocksEnded(done.tag, done.blocks, done.seconds) for done in store.poll()]
            self._blocks_under_way -= len(blocks)
            over += blocks
        return over

    def close(self, timeout: float) -> bool:
        """Cancel the loads that have not begun, finish the stores, and wait up to ``timeout`` seconds for each thread.
        False if one hangs: its pool and its store must stay open."""
        return all([self.transfers.close(timeout), *(store.close(timeout) for store in self._stores.values())])


def make_transfers(
    pool: HostPool, device: torch.device, wake: Callable[[], None], states: HostStatePool | None = None
) -> Transfers:
    """The copies for this device: a thread on a CPU, streams on a GPU. The caller closes them. states: the host's pool
    of recurrent states, if the model has some.

    wake: ends the event loop's sleep, see `ThreadTransfers`; streams do not call it.
    """
    if device.type != "cuda":
        return ThreadTransfers(pool, wake, states=states)
    layers_at_once = max(1, pool.num_layers) if pool.copied_by == "torch" else 1
    return StreamTransfers(pool, device, states=states, layers_at_once=layers_at_once)


def is_finite_snapshot(
    snapshot: np.ndarray,
    tensors: Sequence[tuple[slice, torch.dtype]],
    tail_dtype: str | None,
    scales: np.ndarray | None = None,
    page_nbytes: int = 0,
) -> bool:
    """Likewise for a snapshot. tensors: see `HostStatePool`. tail_dtype, scales, page_nbytes: of the KV behind the
    state; None if that is none."""
    dtypes = [(where, str(dtype).removeprefix("torch.")) for where, dtype in tensors if dtype.is_floating_point]
    if not all(is_finite(snapshot[where], dtype) for where, dtype in dtypes):
        return False
    tail = snapshot[tensors[-1][0].stop :]
    return tail_dtype is None or is_finite(tail, tail_dtype, scales, page_nbytes)


def is_finite(block: np.ndarray, dtype: np.dtype | str, scales: np.ndarray | None = None, page_nbytes: int = 0) -> bool:
    """True if a block of KV, uint8 [n], has only finite numbers. dtype: float32, float16 or bfloat16, as torch names
    them; for any other, the rows of a page of ``page_nbytes`` bytes have the scales at `HostPool.scales`, and these
    must be finite."""
    if scales is not None:
        pages = block.view(np.float32).reshape(-1, page_nbytes // 4)
        return bool(np.isfinite(pages[:, scales]).all())
    words, mask = (np.uint32, 0x7F800000) if str(dtype) == "float32" else (np.uint16, _HALF_MASKS[str(dtype)])
    return not ((block.view(words) & words(mask)) == mask).any()


_HALF_MASKS = {"float16": 0x7C00, "bfloat16": 0x7F80}
