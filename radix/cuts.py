"""Sequences that become shorter, that begin with a part of another, and that move on along the tree."""

from __future__ import annotations

import numpy as np

from .cache import RadixCache
from .kv_sequence import KVSequence


def truncate(cache: RadixCache, seq: KVSequence, length: int, *, fence: int | None = None) -> None:
    """Keep only the first ``length`` tokens of a sequence, so that other tokens can follow them.

    A page of the tree cannot be kept in part: a cut inside one goes back to its start, and ``seq.length`` says where
    that is. Where there are recurrent states, it goes back to the last one before; where there are windows, to the
    end of the last whole one. ``fence`` as for `RadixCache.cache_finished_req`.
    """
    node, page = seq.open_node(), cache.page_size
    old_tree_len, old_length = seq.tree_len, seq.length
    length = cache.usable_length(seq, length)
    if length < seq.tree_len:
        length -= length % page
        cache.drop_window(seq, length)
        shorter = cache.tree.cut_path(node, length)
        cache.lock(shorter)
        cache.unlock(node)
        cache.mark_useless(node)
        seq.node, seq.tree_len = shorter, length
    seq.length = length
    first = max(old_tree_len, -(-length // page) * page)
    gone = cache.req_to_token.rows[seq.row, first:old_length]
    if fence is None:
        cache.allocator.free(gone)
    else:
        cache.allocator.quarantine(gone, [fence])
    cache.extend_window(seq)
    if cache.states is not None:
        seq.states.cut(cache.states.slots, length, fence)
        if seq.states.of(length) is None:
            cache.begin_states(seq, fence)


def fork_sequence(
    cache: RadixCache, seq: KVSequence, length: int, row: int
) -> tuple[KVSequence, np.ndarray, np.ndarray] | None:
    """Open a second sequence in ``row`` on the first ``length`` tokens of ``seq``, at least those in the tree.

    It shares the locked path and names the recurrent state, and gets its own slots for the private tokens.

    Returns (sequence, source slots, target slots), both int32 [n]: K and V of the private tokens must be copied from
    source to target before a later step writes to either. None, and nothing changed, if too few are free, or if the
    sequence has no state of exactly ``length`` tokens, or less than the window before them.
    """
    node, rows = seq.open_node(), cache.req_to_token.rows
    if cache.states is not None and length and seq.states.of(length) is None:
        return None
    if cache.windows is not None and cache.windows.pages.first_needed(length) < seq.window_start:
        return None
    source = rows[seq.row, seq.tree_len : length].copy()
    old, new = np.array([seq.tree_len], dtype=np.int32), np.array([length], dtype=np.int32)
    target = cache.allocator.alloc_extend(old, new, old)  # tree_len is whole pages, so no last slot is needed
    if target is None:
        return None
    cache.lock(node)
    cache.req_to_token.write(row, 0, rows[seq.row, : seq.tree_len])
    cache.req_to_token.write(row, seq.tree_len, target)
    fork = KVSequence(seq.namespace, row, node, seq.tree_len, length, seq.turn, seq.priority, seq.client)
    cache.share_window(seq, fork)
    if cache.states is not None and (states := seq.states.fork(cache.states.slots, length)) is not None:
        fork.states = states
    return fork, source, target


def take_over(cache: RadixCache, seq: KVSequence, priority: int, client: str = "") -> None:
    """Continue a sequence that another request left, for a request of this priority and client."""
    node = seq.open_node()
    seq.turn, seq.priority, seq.client = seq.turn + 1, priority, client
    cache.touch(node)
    cache.note_use(node, priority)


def advance(cache: RadixCache, seq: KVSequence, token_ids: np.ndarray, *, fence: int | None = None) -> None:
    """Extend a sequence by what the tree has on the device of ``token_ids`` (int32 [n], from position 0) beyond it.

    The row switches to the tree's slots from ``tree_len`` on, and the private ones are given back. fence: of a step in
    flight that may still write to those. Changes nothing where the tree does not reach beyond ``length``.
    """
    node = seq.open_node()
    if not node.device_children or cache.find_prefix(seq.namespace, token_ids, node)[1] <= seq.length:
        return
    match = cache.match_prefix(seq.namespace, token_ids, after=node)
    if match.device_len <= seq.length:
        return
    cache.lock(match.handle)
    cache.unlock(node)
    cache.drop_window(seq)
    rows = cache.req_to_token.rows
    private = rows[seq.row, seq.tree_len : seq.length].copy()
    cache.req_to_token.write(seq.row, seq.tree_len, np.concatenate(cache.tree.path_values(match.handle, node)))
    cache.allocator.quarantine(private, [] if fence is None else [fence])
    seq.node, seq.tree_len, seq.length = match.handle, match.device_len, match.device_len
    cache.begin_states(seq, fence)
    cache.begin_window(seq)
