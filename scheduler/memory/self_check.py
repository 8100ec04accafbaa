"""Checks, once a second in a running server, that every page of the pool has exactly one owner.

The sums are compared first, which costs microseconds. Only if they disagree are the owners of every page looked up and
the state dumped to the log. Pages without an owner go back to the free list. A page with two owners means that
the KV of some request is wrong, and through the tree that may be any request: then every request that holds KV fails
and the pool starts afresh; requests that still wait are not touched. Where the host's pool does not add up, its copies
are given up, and no request fails. The server keeps running in all these cases.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...radix.cache import RadixCache
from ...radix.invariants import InvariantError, check_host, check_leases, check_tree, conservation, dump
from ...radix.kv_sequence import KVSequence
from ..request import Request
from .beam_memory import BeamMemory
from .kv_memory import KVMemory

logger = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class PageAudit:
    """int32 arrays of page numbers: pages without an owner, and pages with more than one."""

    missing: np.ndarray
    doubled: np.ndarray


def unaccounted_tokens(cache: RadixCache, sequences: Sequence[KVSequence], beam_pages: Sequence[np.ndarray]) -> int:
    """Tokens that the sums of all owners fall short of the pool; negative if they exceed it; 0 when all is well.

    beam_pages: int32 [n] for each beam search, the pages that its beams hold.
    """
    allocator, page = cache.allocator, cache.page_size
    private = sum(-(-seq.length // page) * page - seq.tree_len for seq in sequences)
    private += sum(map(len, beam_pages)) * page
    held = allocator.free_tokens + allocator.quarantined_tokens + cache.evictable_tokens + cache.protected_tokens
    return allocator.total_tokens - held - private


def audit_pages(cache: RadixCache, sequences: Sequence[KVSequence], beam_pages: Sequence[np.ndarray] = ()) -> PageAudit:
    """Look up the owners of every page: free list, quarantine, tree, sequences, beams. Logs it all, with a dump."""
    allocator, page, rows = cache.allocator, cache.page_size, cache.req_to_token.rows
    owners = [allocator.free_pages(), allocator.quarantined_pages()]
    owners += [node.value[::page] // page for node in cache.tree.nodes()]
    owners += [rows[seq.row, seq.tree_len : seq.length : page] // page for seq in sequences]
    owners += beam_pages
    counts = np.bincount(np.concatenate(owners), minlength=allocator.total_tokens // page + 1)[1:]
    pages = np.arange(1, len(counts) + 1, dtype=np.int32)
    audit = PageAudit(missing=pages[counts == 0], doubled=pages[counts > 1])
    logger.error(
        "the KV pool does not add up: %d pages without an owner %s, %d with more than one %s\n%s\n%s",
        len(audit.missing),
        audit.missing[:16].tolist(),
        len(audit.doubled),
        audit.doubled[:16].tolist(),
        "\n".join(map(str, sequences)),
        dump(cache),
    )
    return audit


def check_invariants(memory: KVMemory, beams: BeamMemory, live: Sequence[Request]) -> None:
    """Check tree, leases, host tier, the owners of all tokens and the lengths of the live requests. Raises
    InvariantError."""
    cache, leases = memory.cache, memory.leases
    nodes = check_tree(cache)
    check_leases(leases, cache, nodes)
    if memory.tier is not None:
        check_host(memory.tier, nodes)
    sequences = [request.kv for request in live if request.kv is not None]
    sequences += [lease.kv for lease in leases.live() if lease.kv is not None]
    beam_pages = [beams.pages(request) for request in live if request.beam_kv is not None]
    conservation(cache, cache.allocator, sequences, beam_pages, nodes).check()
    if lost := unaccounted_tokens(cache, sequences, beam_pages):
        raise InvariantError(f"{lost} tokens of the pool are not accounted for")
    for request in live:
        known = len(request.token_ids) + request.num_output_placeholders
        if not request.committed_len <= request.scheduled_len <= known:
            raise InvariantError(f"{request} has {request.scheduled_len} tokens of KV, but {known} tokens")


@dataclass(slots=True, frozen=True)
class Found:
    """The result of a check. leaked_tokens: in pages without an owner, which are free again. was_reset: pages had two
    owners, so the pool has been reset and no request holds KV any more."""

    leaked_tokens: int = 0
    was_reset: bool = False


def check_and_contain(memory: KVMemory, beams: BeamMemory, holders: Sequence[Request]) -> Found:
    """Compare the owners' sums with the pool, and contain what is wrong. holders: all live requests that hold KV."""
    cache, leases = memory.cache, memory.leases
    if memory.tier is not None and (unaccounted := memory.tier.unaccounted_tokens):
        logger.error("the host's KV pool does not add up by %d tokens: its copies are given up", unaccounted)
        memory.tier.discard_copies()
    sequences = [request.held_kv for request in holders]
    sequences += [lease.kv for lease in leases.live() if lease.kv is not None]
    beam_pages = [beams.pages(request) for request in holders if request.beam_kv is not None]
    if unaccounted_tokens(cache, sequences, beam_pages) == 0:
        return Found()
    audit = audit_pages(cache, sequences, beam_pages)
    leaked = len(audit.missing) * cache.page_size
    if len(audit.doubled) == 0:
        cache.allocator.free(audit.missing * cache.page_size)
        return Found(leaked)
    for request in holders:
        request.kv = request.beam_kv = None
    memory.discard_all_kv()
    return Found(leaked, was_reset=True)
