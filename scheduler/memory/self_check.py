"""Checks, once a second in a running server, that every page of the pool has one owner and every state its holders.

The sums are compared first, which costs microseconds. Only if they disagree are the owners of every page looked up and
the state dumped to the log. Pages without an owner go back to the free list. A page with two owners means that
the KV of some request is wrong, and through the tree that may be any request: then every request that holds KV fails
and the pool starts afresh; requests that still wait are not touched. Where the host's pool does not add up, its copies
are given up, and no request fails. Recurrent states, which may have several holders, are counted: what is held more
rarely than was counted is freed, and a state that might be given away while it is held is as bad as a page with two
owners. The slots of sliding windows are counted like states. The server keeps running in all these cases.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...radix.cache import RadixCache
from ...radix.invariants import (
    InvariantError,
    check_host,
    check_leases,
    check_states,
    check_tree,
    check_windows,
    conservation,
    dump,
)
from ...radix.kv_sequence import KVSequence
from ...radix.tiers.host_tier import HostTier
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
    check_windows(cache, sequences, beam_pages, nodes)
    searches = [request for request in live if request.beam_kv is not None]
    trunks = {id(search.kv) for search in searches}
    others = named_states([search.held_kv for search in searches], searches)
    check_states(cache, [seq for seq in sequences if id(seq) not in trunks], others, nodes)
    if lost := unaccounted_tokens(cache, sequences, beam_pages):
        raise InvariantError(f"{lost} tokens of the pool are not accounted for")
    for request in live:
        known = len(request.token_ids) + request.num_output_placeholders
        if not request.committed_len <= request.scheduled_len <= known:
            raise InvariantError(f"{request} has {request.scheduled_len} tokens of KV, but {known} tokens")


@dataclass(slots=True, frozen=True)
class Found:
    """The result of a check. leaked_tokens, leaked_states, leaked_window_tokens: in pages without an owner, states
    without a holder, and slots of the window pool beside no page: they are free again. was_reset: pages or states had
    two owners, or a sequence lacked a part of its window, so the pools have been reset and no request holds KV any
    more."""

    leaked_tokens: int = 0
    leaked_states: int = 0
    leaked_window_tokens: int = 0
    was_reset: bool = False


def check_and_contain(memory: KVMemory, beams: BeamMemory, holders: Sequence[Request]) -> Found:
    """Compare the owners' sums with the pool, and contain what is wrong. holders: all live requests that hold KV."""
    cache, leases = memory.cache, memory.leases
    if memory.tier is not None:
        _contain_host(memory.tier)
    sequences = [request.held_kv for request in holders]
    sequences += [lease.kv for lease in leases.live() if lease.kv is not None]
    beam_pages = [beams.pages(request) for request in holders if request.beam_kv is not None]
    leaked_states, states_are_sound = free_lost_states(cache, named_states(sequences, holders))
    if unaccounted_tokens(cache, sequences, beam_pages) == 0:
        leaked, pages_are_sound = 0, True
    else:
        audit = audit_pages(cache, sequences, beam_pages)
        leaked, pages_are_sound = len(audit.missing) * cache.page_size, len(audit.doubled) == 0
        if pages_are_sound:
            cache.allocator.free(audit.missing * cache.page_size)
    leaked_windows, windows_are_sound = (
        free_lost_windows(cache, sequences, beam_pages) if pages_are_sound else (0, True)
    )
    if pages_are_sound and states_are_sound and windows_are_sound:
        return Found(leaked, leaked_states, leaked_windows)
    for request in holders:
        request.kv = request.beam_kv = None
    memory.discard_all_kv()
    return Found(leaked, leaked_states, leaked_windows, was_reset=True)


def _contain_host(tier: HostTier) -> None:
    """Compare the host's sums, and give its copies up if they are wrong."""
    unaccounted, states_add_up = tier.unaccounted_tokens, tier.states_add_up
    if unaccounted:
        logger.error("the host's KV pool does not add up by %d tokens: its copies are given up", unaccounted)
    if not states_add_up:
        logger.error("the host's recurrent states do not add up: its copies are given up")
    if unaccounted or not states_add_up:
        tier.discard_copies()


def free_lost_windows(
    cache: RadixCache, sequences: Sequence[KVSequence], beam_pages: Sequence[np.ndarray]
) -> tuple[int, bool]:
    """Compare the slots of the window pool with its sum, and the counted holders of each page with the holders. Frees
    the slots that are nowhere. Returns how many tokens these were, and False if a slot has two owners, or a sequence
    lacks one."""
    if cache.windows is None:
        return 0, True
    pages, held = cache.windows.pages, held_windows(cache, sequences, beam_pages)
    leaving = cache.allocator.quarantined_pages()
    wrong = np.flatnonzero(pages.count_holders(held, leaving) != pages.holders)
    if pages.adds_up and not len(wrong):
        return 0, True
    lost = pages.lost_tokens
    logger.error(
        "the window pool does not add up: %d tokens are nowhere; pages with another number of holders than was "
        "counted: %s",
        lost,
        wrong[:16].tolist(),
    )
    if pages.has_doubled or not all(pages.has(each).all() for each in held):
        return 0, False
    pages.recount(cache.allocator.free_pages(), held, leaving)
    cache.windows.restore(cache.tree.nodes())
    return lost, True


def held_windows(
    cache: RadixCache, sequences: Sequence[KVSequence], beam_pages: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """int32 [n] for each holder: the pages of which it holds the slots in the window pool."""
    rows, page = cache.req_to_token.rows, cache.page_size
    return [rows[seq.row, seq.window_start : seq.length : page] // page for seq in sequences] + list(beam_pages)


def named_states(sequences: Sequence[KVSequence], holders: Sequence[Request]) -> list[int]:
    """Slots of recurrent states, as often as sequences and beams name each."""
    names = [slot for sequence in sequences for slot in sequence.states.names()]
    return names + [slot for request in holders if request.beam_kv for slot in request.beam_kv.state_names()]


def free_lost_states(cache: RadixCache, names: Sequence[int]) -> tuple[int, bool]:
    """Compare the counted holders of each state with the holders, and free those that none holds. names: as
    `named_states`. Returns how many these were, and False if a state that is held may be given away."""
    if cache.states is None:
        return 0, True
    slots = cache.states.slots
    held = [*names, *(node.state for node in cache.states.nodes()), *cache.residency.named_states()]
    named = np.array(held, dtype=np.int64)
    counts = np.bincount(named, minlength=slots.total + 1)
    unaccounted = slots.total - slots.free - slots.quarantined - slots.held
    if not unaccounted and np.array_equal(counts, slots.refs):
        return 0, True
    gone = np.concatenate([slots.free_slots(), slots.quarantined_slots()])
    logger.error(
        "the recurrent states do not add up: %d are nowhere; slots with another number of holders than was counted: %s",
        unaccounted,
        np.flatnonzero(counts != slots.refs)[:16].tolist(),
    )
    if counts[gone].any() or (counts > slots.refs).any() or unaccounted < 0:
        return 0, False
    names_of = {slot: int(counts[slot]) for slot in np.flatnonzero(counts).tolist()}
    return slots.rebuild(names_of, cache.allocator.fences.open_fences()), True
