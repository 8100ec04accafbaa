"""A radix cache with pools, driven as a scheduler would, over a fake KV memory that remembers what was computed where.

Each slot remembers (namespace, ids up to its token). So a wrong slot, an early free or a bad split shows as soon as a
row names a slot that holds something else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from baton.memory_pool.allocator import Allocator
from baton.memory_pool.req_to_token import ReqToTokenPool
from baton.radix.cache import RadixCache
from baton.radix.eviction.registry import ORDERS
from baton.radix.invariants import Account, check_tree, conservation
from baton.radix.kv_sequence import KVSequence


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@dataclass(eq=False)
class Running:
    """A sequence that is being computed. ``committed`` ids have KV; slots may reach beyond them."""

    kv: KVSequence
    ids: np.ndarray
    committed: int


class CacheRig:
    """``start``, ``compute``, ``publish`` and ``finish`` are the life of a sequence."""

    def __init__(
        self,
        num_tokens: int = 1024,
        page_size: int = 1,
        rows: int = 8,
        context: int = 512,
        disabled: bool = False,
        eviction: str = "lru",
    ) -> None:
        self.pool = ReqToTokenPool(rows, context)
        self.allocator = Allocator(num_tokens, page_size, check=True)
        self.cache = RadixCache(
            self.pool, self.allocator, page_size=page_size, disabled=disabled, lanes=ORDERS[eviction](num_tokens)
        )
        self.kv: list[object] = [None] * (num_tokens + page_size)
        self.running: list[Running] = []

    def start(self, ids: np.ndarray, namespace: str = "", priority: int = 0) -> Running:
        """Open a sequence on what is cached of ``ids``, all but the last one."""
        match = self.cache.match_prefix(namespace, ids[:-1])
        row = self.pool.alloc()
        assert row is not None
        kv = self.cache.open_sequence(namespace, match, row, priority)
        running = Running(kv, ids, match.device_len)
        self.running.append(running)
        return running

    def extend(self, running: Running, length: int) -> bool:
        """Slots up to ``length``, evicting if need be; False if there is no room."""
        kv = running.kv
        old, new = int32(kv.length), int32(length)
        short = self.allocator.tokens_needed(old, new) - self.allocator.free_tokens
        if short > 0:
            self.cache.evict(short)
        last = self.pool.rows[[kv.row], [max(0, kv.length - 1)]]
        slots = self.allocator.alloc_extend(old, new, last)
        if slots is None:
            return False
        self.pool.write(kv.row, kv.length, slots)
        kv.length = length
        return True

    def compute(self, running: Running, length: int | None = None) -> bool:
        """Compute and commit the tokens up to ``length`` (default: all known ones)."""
        length = len(running.ids) if length is None else length
        if length > running.kv.length and not self.extend(running, length):
            return False
        row = self.pool.rows[running.kv.row]
        for position in range(running.committed, length):
            self.kv[row[position]] = self._content(running, position)
        running.committed = length
        return True

    def publish(self, running: Running) -> None:
        self.cache.cache_unfinished_req(running.kv, running.ids[: running.committed])

    def finish(self, running: Running, fence: int | None = None) -> None:
        self.running.remove(running)
        self.cache.cache_finished_req(running.kv, running.ids[: running.committed], fence=fence)

    def release(self, running: Running, fence: int | None = None) -> None:
        self.running.remove(running)
        self.cache.release(running.kv, fence=fence)

    def insert(self, ids: np.ndarray, namespace: str = "", priority: int = 0) -> None:
        """A whole life: afterwards the whole pages of ``ids`` are cached."""
        running = self.start(ids, namespace, priority)
        assert self.compute(running)
        self.finish(running)

    def close(self, fence: int) -> int:
        """An operation ends; returns the tokens that only waited for it."""
        self.allocator.fences.close_fence(fence)
        return self.allocator.release_quarantine()

    def verify(self) -> Account:
        """All invariants, and that every row names slots with the right contents."""
        sequences = [running.kv for running in self.running]
        check_tree(self.cache, sequences)
        account = conservation(self.cache, self.allocator, sequences)
        account.check()
        assert self.pool.num_free == self.pool.num_rows - len(sequences)
        for running in self.running:
            row = self.pool.rows[running.kv.row]
            for position in range(running.committed):
                assert self.kv[row[position]] == self._content(running, position), (running, position)
        return account

    @staticmethod
    def _content(running: Running, position: int) -> tuple[str, bytes]:
        return running.kv.namespace, running.ids[: position + 1].tobytes()
