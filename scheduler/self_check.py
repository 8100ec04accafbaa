"""Does every page of the pool have exactly one owner? Asked once a second of a server that runs.

The sums are compared first, which costs microseconds. Only if they disagree are the owners of every page looked up, the
state dumped to the log, and the damage contained: pages nobody names go back to the free list; a page with two owners
means wrong KV for somebody, so admission stops, the requests that hold such pages fail, the rest runs to its
end, and the pool starts afresh. Neither ends the server.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ..radix.cache import KVSequence, RadixCache
from ..radix.invariants import dump

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class PageAudit:
    """int32 arrays of page numbers: owned by nobody, and owned more than once."""

    missing: np.ndarray
    doubled: np.ndarray


def unaccounted_tokens(cache: RadixCache, sequences: Iterable[KVSequence]) -> int:
    """Tokens that the sums of all owners fall short of the pool; negative if they exceed it; 0 when all is well."""
    allocator, page = cache.allocator, cache.page_size
    private = sum(-(-seq.length // page) * page - seq.tree_len for seq in sequences)
    held = allocator.free_tokens + allocator.quarantined_tokens + cache.evictable_tokens + cache.protected_tokens
    return allocator.total_tokens - held - private


def audit_pages(cache: RadixCache, sequences: Iterable[KVSequence]) -> PageAudit:
    """Look up the owners of every page: free list, quarantine, tree, sequences."""
    allocator, page = cache.allocator, cache.page_size
    owners = [allocator.free_pages(), allocator.quarantined_pages()]
    owners += [node.value[::page] // page for node in cache.tree.nodes()]
    owners += [private_pages(cache, seq) for seq in sequences]
    counts = np.bincount(np.concatenate(owners), minlength=allocator.total_tokens // page + 1)[1:]
    pages = np.arange(1, len(counts) + 1, dtype=np.int32)
    return PageAudit(missing=pages[counts == 0], doubled=pages[counts > 1])


def private_pages(cache: RadixCache, seq: KVSequence) -> np.ndarray:
    """int32 [n]: pages that only this sequence holds."""
    page = cache.page_size
    return cache.req_to_token.rows[seq.row, seq.tree_len : seq.length : page] // page


def all_pages(cache: RadixCache, seq: KVSequence) -> np.ndarray:
    """int32 [n]: every page that the sequence reads or writes."""
    return cache.req_to_token.rows[seq.row, : seq.length : cache.page_size] // cache.page_size


def reclaim(cache: RadixCache, missing: np.ndarray) -> None:
    """Give pages that nobody names back to the free list."""
    logger.error("reclaiming %d leaked pages: %s …\n%s", len(missing), missing[:16].tolist(), dump(cache))
    cache.allocator.free(missing * cache.page_size)
