"""Slots for drafts: allocated only from free and evictable memory, given back where a guess was wrong."""

from __future__ import annotations

import numpy as np

from ...radix.cuts import truncate
from ..memory.kv_memory import KVMemory
from ..request import Request


def extend_with_drafts(
    memory: KVMemory, rows: np.ndarray, lengths: np.ndarray, draft_lens: np.ndarray
) -> np.ndarray | None:
    """Allocate one slot and those of a draft in each row (int32 [n], each once) after its first ``lengths``.

    lengths, draft_lens: int32 [n]. Returns int32 [sum(1 + draft_lens)] and has written the rows. None, and nothing
    allocated, unless free and evictable memory is enough. The caller updates the lengths of the sequences.
    """
    allocator, pool = memory.allocator, memory.req_to_token
    new_lens = lengths + np.int32(1) + draft_lens
    missing = allocator.tokens_needed(lengths, new_lens) - allocator.free_tokens
    if missing > memory.cache.evictable_tokens:
        return None
    if missing > 0:
        memory.cache.evict(missing)
    slots = allocator.alloc_extend(lengths, new_lens, pool.rows[rows, np.maximum(lengths - 1, 0)])
    if slots is not None:
        each = np.split(slots, np.cumsum(1 + draft_lens)[:-1])
        for row, length, own in zip(rows.tolist(), lengths.tolist(), each):
            pool.write(row, length, own)
    return slots


def keep_first(memory: KVMemory, request: Request, length: int) -> None:
    """Keep only the first ``length`` computed tokens of a request after a step, and free the slots of the others."""
    request.committed_len = request.scheduled_len = length
    truncate(memory.cache, request.held_kv, length)
