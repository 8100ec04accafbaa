"""The radix cache: which prefixes have their KV in the pool, and who holds them.

Requests reach the tree only through `KVSequence` and `MatchResult`; the nodes in them are opaque. A slot has exactly
one owner at any time: the allocator (free or quarantined), the tree, or one sequence. This file is where slots change
hands between tree and sequence:

    row      |------ in the tree, locked ------|---- private: whole pages ----|-- partial page --|
             0                              tree_len                                          length
                    cache_unfinished_req  ──────▶ moves tree_len to the right, in whole pages
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..memory_pool.allocator import Allocator
from ..memory_pool.req_to_token import ReqToTokenPool
from .eviction import EvictionOrder
from .node import ID_BYTES, TreeNode
from .tree import RadixTree


class StaleHandleError(RuntimeError):
    """A handle was used whose node is gone (evicted between match and lock), or a lock was given back twice."""


@dataclass(slots=True)
class KVSequence:
    """What one sequence holds on the device. Whoever has this object has all of it: handing it on is O(1)."""

    namespace: str
    row: int
    """Row in req_to_token; -1 once closed."""
    node: TreeNode | None
    """The last tree node of the sequence; one direct lock on it is ours. None once closed."""
    tree_len: int
    """row[:tree_len] belongs to the tree and is protected by that lock; a multiple of page_size."""
    length: int
    """row[:length] have slots; the pages behind row[tree_len:length] are private to this sequence. Whoever allocates
    slots for the sequence keeps it up to date."""


@dataclass(slots=True, frozen=True)
class MatchResult:
    """A cached prefix. Valid until the next evict unless locked."""

    device_len: int
    """Tokens whose KV is in the device pool; whole pages."""
    host_len: int
    """Further tokens on the host tier; 0 as long as there is none."""
    handle: TreeNode
    """Opaque: for `lock`, `unlock` and `open_sequence`."""


class RadixCache:
    """Owns the tree and its locks. ``disabled``: nothing is matched or inserted, all else is the same."""

    def __init__(
        self, req_to_token: ReqToTokenPool, allocator: Allocator, *, page_size: int, disabled: bool = False
    ) -> None:
        if page_size != allocator.page_size:
            raise ValueError(f"page_size {page_size} differs from the allocator's {allocator.page_size}")
        self.page_size = page_size
        self.disabled = disabled
        self.evictable_tokens = 0
        """Tokens in the tree that no lock protects."""
        self.protected_tokens = 0
        """Tokens in the tree under a lock."""
        self.evicted_total = 0
        """Tokens evicted since start."""
        self._req_to_token = req_to_token
        self._allocator = allocator
        self._tree = RadixTree(page_size)
        self._order = EvictionOrder()
        self._tick = 0
        """Counts accesses: the time of the LRU order."""

    @property
    def total_nodes(self) -> int:
        return self._tree.total_nodes

    # -- match and lock ----------------------------------------------------------------------------------------------

    def match_prefix(self, namespace: str, token_ids: np.ndarray | bytes) -> MatchResult:
        """Longest cached prefix of ``token_ids`` (int32 [n], or their bytes) in whole pages; counts as an access.

        The caller leaves off what it wants to compute: at least the last token, and all whose logprobs it needs.
        """
        if self.disabled:
            return MatchResult(0, 0, self._tree.root)
        node, length = self._tree.match(self._tree.root, namespace, _id_bytes(token_ids))
        self._tick += 1
        node.last_access = self._tick
        return MatchResult(length, 0, node)

    def match_len(self, namespace: str, token_ids: np.ndarray | bytes) -> int:
        """What `match_prefix` would find, in tokens, without any trace: no split, no access."""
        if self.disabled:
            return 0
        _, whole, _, part = self._tree.find(self._tree.root, namespace, _id_bytes(token_ids))
        return (whole + part) // ID_BYTES

    def lock(self, handle: TreeNode) -> None:
        """Protect a node and its ancestors from eviction. Walks up only while a node goes from 0 to 1."""
        if handle.parent is None and handle is not self._tree.root:
            raise StaleHandleError(f"{handle} has been evicted; lock a match before anything else is allocated")
        node, count = handle, 0
        while node.lock_ref == 0:
            node.lock_ref = 1
            count += len(node.value)
            parent = node.parent
            assert parent is not None  # the root is always locked, so the walk ends there at the latest
            node = parent
        node.lock_ref += 1  # a direct lock, or one more locked child
        self.protected_tokens += count
        self.evictable_tokens -= count

    def unlock(self, handle: TreeNode) -> None:
        """Give one lock back."""
        if handle.lock_ref < (2 if handle is self._tree.root else 1):
            raise StaleHandleError(f"{handle} is not locked; a lock was given back twice")
        node, count = handle, 0
        while True:
            node.lock_ref -= 1
            if node.lock_ref:
                break
            count += len(node.value)
            if not node.children:
                self._order.add(node)
            parent = node.parent
            assert parent is not None
            node = parent
        self.protected_tokens -= count
        self.evictable_tokens += count

    # -- the life of a sequence --------------------------------------------------------------------------------------

    def open_sequence(self, namespace: str, match: MatchResult, row: int) -> KVSequence:
        """Start a sequence on a match: locks it and writes its slots into ``row``, which now is the sequence's."""
        self.lock(match.handle)
        if match.device_len:
            slots = np.concatenate(self._tree.path_values(match.handle, self._tree.root))
            self._req_to_token.write(row, 0, slots)
        return KVSequence(namespace, row, match.handle, match.device_len, match.device_len)

    def cache_unfinished_req(self, seq: KVSequence, token_ids: np.ndarray) -> None:
        """Put what a running sequence has computed into the tree, for others to share; the sequence goes on.

        token_ids: int32 [committed], the committed ids from position 0; only their whole pages enter. Where the tree
        has a page already, the row takes over the tree's slots and ours are freed.
        """
        node = self._own_node(seq, token_ids)
        end = self._whole_pages(len(token_ids))
        if self.disabled or end <= seq.tree_len:
            return
        last, existing = self._insert(seq, node, token_ids, end)
        if existing:
            start = seq.tree_len
            ours = self._req_to_token.rows[seq.row, start : start + existing].copy()
            theirs = np.concatenate(self._tree.path_values(last, node))[:existing]
            self._req_to_token.write(seq.row, start, theirs)  # before the free: no row may name a freed slot
            self._allocator.free(ours)
        self.lock(last)
        self.unlock(node)
        seq.node = last
        seq.tree_len = end

    def cache_finished_req(self, seq: KVSequence, token_ids: np.ndarray, *, quarantine_step: int | None = None) -> None:
        """End a sequence: its committed whole pages go to the tree, all else is freed, the row too.

        token_ids: int32 [committed], the committed ids from position 0.
        quarantine_step: a step in flight that still writes slots beyond the committed ones; the pages of those come
        back with ``Allocator.release_quarantine(quarantine_step)``.
        """
        node = self._own_node(seq, token_ids)
        row = self._req_to_token.rows[seq.row]
        tree_end, duplicates = seq.tree_len, 0
        whole = self._whole_pages(len(token_ids))
        if whole > tree_end and not self.disabled:
            _, duplicates = self._insert(seq, node, token_ids, whole)
            tree_end = whole
        in_flight = quarantine_step is not None and seq.length > len(token_ids)
        split = max(whole, tree_end) if in_flight else seq.length
        freed = (row[seq.tree_len : seq.tree_len + duplicates], row[tree_end:split])
        self._close(seq, node, freed, row[split : seq.length], quarantine_step)

    def release(self, seq: KVSequence, *, quarantine_step: int | None = None) -> None:
        """End a sequence whose KV must not be kept. With ``quarantine_step`` all its private pages are quarantined."""
        node = self._own_node(seq)
        private = self._req_to_token.rows[seq.row, seq.tree_len : seq.length]
        split = len(private) if quarantine_step is None else 0
        self._close(seq, node, (private[:split],), private[split:], quarantine_step)

    def _close(
        self,
        seq: KVSequence,
        node: TreeNode,
        freed: tuple[np.ndarray, ...],
        in_flight: np.ndarray,
        quarantine_step: int | None,
    ) -> None:
        """Give back the row, then the slots (a row must not name a freed slot), then the lock."""
        self._req_to_token.free(seq.row)
        for slots in freed:
            if len(slots):
                self._allocator.free(slots)
        if len(in_flight):
            assert quarantine_step is not None
            self._allocator.quarantine(in_flight, quarantine_step)
        self.unlock(node)
        seq.node, seq.row, seq.tree_len, seq.length = None, -1, 0, 0

    def _own_node(self, seq: KVSequence, token_ids: np.ndarray | None = None) -> TreeNode:
        """The sequence's node, after a look at whether the call makes sense."""
        if seq.node is None:
            raise ValueError("this sequence is closed; it was finished or released before")
        if token_ids is not None and not seq.tree_len <= len(token_ids) <= seq.length:
            raise ValueError(
                f"{len(token_ids)} committed tokens for a sequence with {seq.tree_len} tokens in the tree and slots "
                f"for {seq.length}; the number must lie between these two"
            )
        return seq.node

    def _whole_pages(self, length: int) -> int:
        return length - length % self.page_size

    def _insert(self, seq: KVSequence, node: TreeNode, token_ids: np.ndarray, end: int) -> tuple[TreeNode, int]:
        """Insert positions tree_len … end below ``node``, the sequence's own; the walk never starts at the root.

        Returns (node that ends at ``end``, how many of the positions the tree had already).
        """
        data = _id_bytes(token_ids[seq.tree_len : end])
        last, existing = self._tree.match(node, seq.namespace, data)
        first_new = seq.tree_len + existing
        self._tick += 1
        if first_new == end:
            last.last_access = self._tick
        else:
            slots = self._req_to_token.rows[seq.row, first_new:end].copy()
            last = self._tree.add_leaf(last, seq.namespace, data[existing * ID_BYTES :], slots, self._tick)
            self.evictable_tokens += len(slots)
            self._order.add(last)
        return last, existing

    # -- eviction ----------------------------------------------------------------------------------------------------

    def evict(self, num_tokens: int) -> int:
        """Free at least ``num_tokens`` tokens, least recently used leaves first, whole nodes at a time.

        Returns the tokens freed: less than asked if the rest is locked. Evicting 0 is always safe.
        """
        order, tree = self._order, self._tree
        freed, values = 0, []
        while freed < num_tokens:
            leaf = order.pop()
            if leaf is None:
                break
            values.append(leaf.value)
            freed += len(leaf.value)
            parent = tree.remove_leaf(leaf)
            if leaf.last_access > parent.last_access:
                parent.last_access = leaf.last_access
            if not parent.children and not parent.lock_ref:
                order.add(parent)
        if values:
            self._allocator.free(np.concatenate(values))
            self.evictable_tokens -= freed
            self.evicted_total += freed
        return freed

    def reset(self) -> bool:
        """Forget everything. Refuses, and returns False, while a sequence is open or a node is locked."""
        if self._tree.root.lock_ref > 1:
            return False
        nodes = list(self._tree.nodes())
        for node in nodes:
            self._allocator.free(node.value)
            node.parent = None  # old handles must fail, not lock a node that is not there
        self._tree = RadixTree(self.page_size)
        self._order = EvictionOrder()
        self.evictable_tokens = 0
        return True


def _id_bytes(token_ids: np.ndarray | bytes) -> bytes:
    if isinstance(token_ids, bytes):
        return token_ids
    if token_ids.dtype != np.int32:
        raise TypeError(f"token ids must be int32, not {token_ids.dtype}")
    return token_ids.tobytes()
