"""The scheduler's hands on KV memory: open, extend and close what a request holds.

The only place where the row pool, the allocator and the tree are used together, so that the order "evict, then
allocate, then write the row" is written once. Owns nothing.
"""

from __future__ import annotations

import numpy as np

from ..memory_pool.allocator import Allocator
from ..memory_pool.req_to_token import ReqToTokenPool, RowUpdates
from ..radix.cache import RadixCache
from .request import Request


class KVMemory:
    """Opens, extends and closes the KV of requests."""

    def __init__(self, req_to_token: ReqToTokenPool, allocator: Allocator, cache: RadixCache) -> None:
        self.req_to_token = req_to_token
        self.allocator = allocator
        self.cache = cache

    @property
    def page_size(self) -> int:
        return self.allocator.page_size

    @property
    def total_tokens(self) -> int:
        return self.allocator.total_tokens

    @property
    def available_tokens(self) -> int:
        """Tokens that an allocation could get: free ones and those that eviction would free."""
        return self.allocator.free_tokens + self.cache.evictable_tokens

    def round_up(self, num_tokens: int) -> int:
        """``num_tokens`` in whole pages."""
        page = self.page_size
        return -(-num_tokens // page) * page

    def open(self, request: Request, reserve: int) -> bool:
        """Give a waiting request a row and a lock on its longest cached prefix.

        Succeeds only if the rest of its known tokens plus ``reserve`` tokens could be allocated; else changes nothing.
        """
        match = self.cache.match_prefix(request.namespace, request.token_ids.view(0, request.prefix_limit))
        self.cache.lock(match.handle)  # what is locked no longer counts as evictable
        needed = self.round_up(len(request.token_ids)) - match.device_len + reserve
        row = self.req_to_token.alloc() if needed <= self.available_tokens else None
        if row is not None:
            request.kv = self.cache.open_sequence(request.namespace, match, row)
            request.committed_len = request.scheduled_len = match.device_len
        self.cache.unlock(match.handle)
        return row is not None

    def extend(self, requests: list[Request], new_lens: np.ndarray) -> np.ndarray | None:
        """Slots for the tokens up to ``new_lens`` (int32 [bs]) of each request, evicting if need be.

        Returns int32 [sum of new tokens] and has written the rows, or None and has changed nothing but the cache.
        """
        bs = len(requests)
        rows = np.fromiter((r.held_kv.row for r in requests), dtype=np.int32, count=bs)
        old_lens = np.fromiter((r.scheduled_len for r in requests), dtype=np.int32, count=bs)
        last_slots = self.req_to_token.rows[rows, np.maximum(old_lens - 1, 0)]
        short = self.allocator.tokens_needed(old_lens, new_lens) - self.allocator.free_tokens
        if short > 0:
            self.cache.evict(short)
        slots = self.allocator.alloc_extend(old_lens, new_lens, last_slots)
        if slots is None:
            return None
        if len(slots) == bs:
            self.req_to_token.write_many(rows, old_lens, slots)
        else:
            start = 0
            for row, old, new in zip(rows.tolist(), old_lens.tolist(), new_lens.tolist()):
                self.req_to_token.write(row, old, slots[start : start + new - old])
                start += new - old
        for request, new in zip(requests, new_lens.tolist()):
            request.held_kv.length = new
        return slots

    def publish(self, request: Request) -> None:
        """Let others share what a request has computed so far; it goes on."""
        self.cache.cache_unfinished_req(request.held_kv, request.token_ids.view(0, request.committed_len))

    def close(self, request: Request, quarantine_step: int | None) -> None:
        """Hand the committed tokens to the tree and free the rest, with the row.

        quarantine_step: a step in flight still writes the slots beyond the committed ones; they return after it.
        """
        in_flight = quarantine_step if request.scheduled_len > request.committed_len else None
        committed = request.token_ids.view(0, request.committed_len)
        self.cache.cache_finished_req(request.held_kv, committed, quarantine_step=in_flight)
        request.kv = None
        request.committed_len = request.scheduled_len = 0

    def take_row_updates(self) -> RowUpdates:
        return self.req_to_token.take_updates()
