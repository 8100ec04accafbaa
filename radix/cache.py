"""The radix cache: which prefixes have their KV in the pool, and which sequences hold them.

Requests reach the tree only through `KVSequence` and `MatchResult`; the nodes in them are opaque. A slot has exactly
one owner at any time: the allocator (free or quarantined), the tree, or one sequence. This file is where slots change
hands between tree and sequence:

    row      |------ in the tree, locked ------|---- private: whole pages ----|-- partial page --|
             0                              tree_len                                          length
                    cache_unfinished_req  ──────▶ moves tree_len to the right, in whole pages
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..memory_pool.allocator import Allocator
from ..memory_pool.req_to_token import ReqToTokenPool
from .eviction.order import EvictionOrder, Lanes, OneLane
from .eviction.ranks import lru
from .kv_sequence import NUM_ENDS, KVSequence, SequenceEnd
from .node import ID_BYTES, NO_SLOTS, StateKind, TreeNode
from .node_states import TURNS_KEPT, NodeStates
from .node_windows import NodeWindows
from .residency import DeviceOnly, Residency
from .tree import RadixTree
from .watchers import Watchers

LEAST_REST = 512
"""Tokens, or 1/256 of the pool if that is less: a shorter rest of an evicted leaf is not worth a node of its own."""


LONG_PROMPT, FIRST_LOOK = 4096, 256
"""Tokens: before more than so many are copied to be looked up, the first are looked up alone."""


class StaleHandleError(RuntimeError):
    """The node of a handle is gone (evicted between match and lock), or a lock was given back twice."""


class MatchResult(NamedTuple):
    """A cached prefix. Valid until the next evict unless locked."""

    device_len: int
    """Tokens with KV in the device pool; whole pages. Where the model has recurrent states, one lies behind them."""
    host_len: int
    """Further tokens that have a copy on the host, or whose recurrent state has; `HostTier.load_match` brings them
    back."""
    handle: TreeNode
    """Opaque: for `lock`, `unlock` and `open_sequence`. Where the tokens on the device end."""
    host_handle: TreeNode | None = None
    """Opaque: where the tokens on the host end."""
    unused: int = 0
    """Further tokens with KV that is of no use: no recurrent state lies behind them, or their window is not whole."""


class RadixCache:
    """Owns the tree and its locks. ``disabled``: nothing is matched or inserted, all else is the same. lanes: the order
    in which leaves are evicted; lru if None. states: the recurrent states in the tree; None for models without.
    windows: of layers with a pool of their own; None for models without."""

    def __init__(
        self,
        req_to_token: ReqToTokenPool,
        allocator: Allocator,
        *,
        page_size: int,
        disabled: bool = False,
        lanes: Lanes | None = None,
        states: NodeStates | None = None,
        windows: NodeWindows | None = None,
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
        self.req_to_token = req_to_token
        self.allocator = allocator
        self.states = states
        self.windows = windows
        self.tree = RadixTree(page_size)
        lanes = lanes or OneLane(lru)
        self.order = EvictionOrder(lanes, max(page_size, min(LEAST_REST, allocator.total_tokens // 256)))
        self.residency: Residency = DeviceOnly()
        """The tiers beside the device."""
        self.watchers = Watchers()
        if lanes.watcher is not None:
            self.watchers.add_watcher(lanes.watcher)
        self.tick = 0
        """Counts accesses; the clock of the eviction orders."""
        self._ends = 0
        """Counts ends of sequences, and of their KV's reuse."""

    @property
    def total_nodes(self) -> int:
        return self.tree.total_nodes

    # -- match and lock ----------------------------------------------------------------------------------------------

    def match_prefix(self, namespace: str, token_ids: np.ndarray, after: TreeNode | None = None) -> MatchResult:
        """Longest cached prefix of ``token_ids`` (int32 [n]) in whole pages; counts as an access.

        The caller leaves off the tokens it must compute: at least the last one, and all for which it needs logprobs.
        after: a node that the ids match whole, from `find_prefix`; the look-up starts there if the node is still valid.

        Where the model has recurrent states, the prefix ends at the last node with one; no node is split. Where it has
        windows, it ends at the last place before which the window is whole.
        """
        if self.disabled:
            return MatchResult(0, 0, self.tree.root)
        unused = 0
        if self.states is not None:
            whole, cached, _ = self.find_prefix(namespace, token_ids, after)
            node = self.states.deepest(whole)
            unused = cached - node.prefix_len
        elif self.windows is not None:
            _, cached, last = self.find_prefix(namespace, token_ids, after)
            node = self.tree.cut_path(last, self.windows.usable(last, cached))
            unused = cached - node.prefix_len
        else:
            top = self.tree.root if after is None else self.tree.reachable(after)
            node = self.tree.match(top, namespace, _needed_bytes(self.tree, top, namespace, token_ids))
        self.touch(node)
        self.residency.node_accessed(node)
        lowest = self.tree.last_on_device(node) if self.states is None else self.states.deepest_on_device(node)
        if lowest is node:
            return MatchResult(node.prefix_len, 0, node, unused=unused)
        lowest.last_access = self.tick
        return MatchResult(lowest.prefix_len, node.prefix_len - lowest.prefix_len, lowest, node, unused)

    def touch(self, node: TreeNode) -> None:
        """Count an access to a node."""
        self.tick += 1
        node.last_access = self.tick

    def find_prefix(
        self, namespace: str, token_ids: np.ndarray, after: TreeNode | None = None
    ) -> tuple[TreeNode, int, TreeNode]:
        """As `match_prefix`, but splits nothing and is no access: (last node matched whole, tokens, where they end)."""
        top = self.tree.root if after is None else self.tree.reachable(after)
        data = _needed_bytes(self.tree, top, namespace, token_ids)
        node, whole, partial, part = self.tree.find_match(top, namespace, data)
        return node, top.prefix_len + (whole + part) // ID_BYTES, node if partial is None else partial

    def match_len(self, namespace: str, token_ids: np.ndarray) -> int:
        """The tokens that `match_prefix` would find, on any tier; this splits no node and is no access."""
        whole, cached, last = self.find_prefix(namespace, token_ids)
        if self.windows is not None:
            return self.windows.usable(last, cached)
        return cached if self.states is None else self.states.deepest(whole).prefix_len

    def lock(self, handle: TreeNode) -> None:
        """Protect a node and its ancestors from eviction. Walks up only while lock counts go from 0 to 1."""
        if handle.parent is None and handle is not self.tree.root:
            raise StaleHandleError(f"{handle} has been evicted; lock a match before anything else is allocated")
        node = handle
        while node.lock_ref == 0:  # ends at the root at the latest, which is always locked
            node.lock_ref = 1
            parent = node.parent
            assert parent is not None
            node = parent
        node.lock_ref += 1  # a direct lock, or one more locked child
        count = handle.prefix_len - node.prefix_len
        self.protected_tokens += count
        self.evictable_tokens -= count

    def unlock(self, handle: TreeNode) -> None:
        """Give one lock back."""
        if handle.lock_ref < (2 if handle is self.tree.root else 1):
            raise StaleHandleError(f"{handle} is not locked; a lock was given back twice")
        node = handle
        node.lock_ref -= 1
        while node.lock_ref == 0:
            parent = node.parent
            assert parent is not None
            node = parent
            node.lock_ref -= 1
        if node is handle:
            return
        count = handle.prefix_len - node.prefix_len
        self.protected_tokens -= count
        self.evictable_tokens += count
        if not handle.device_children:  # the nodes above it still have the child we came from
            self.order.push_leaf(handle)

    def note_use(self, node: TreeNode, priority: int) -> None:
        """A request begins with the path down to a node that was just accessed."""
        self.watchers.path_used(node, self.tick)
        node.used = self.tick
        node.uses += 1
        node.priority = max(node.priority, priority)

    # -- the life of a sequence --------------------------------------------------------------------------------------

    def open_sequence(
        self, namespace: str, match: MatchResult, row: int, priority: int = 0, client: str = ""
    ) -> KVSequence:
        """Start a sequence on a match: lock it and write its slots into ``row``, which the sequence now owns.
        priority: of its request, for an order of eviction that goes by it. client: of its request."""
        node = match.handle
        self.lock(node)
        self.note_use(node, priority)
        if match.device_len:
            slots = np.concatenate(self.tree.path_values(node, self.tree.root))
            self.req_to_token.write(row, 0, slots)
        seq = KVSequence(namespace, row, node, match.device_len, match.device_len, node.turn + 1, priority, client)
        self.begin_states(seq)
        self.begin_window(seq)
        return seq

    def cache_unfinished_req(self, seq: KVSequence, token_ids: np.ndarray) -> None:
        """Put a running sequence's committed tokens into the tree, for others to share; the sequence stays open.

        token_ids: int32 [committed], the committed ids from position 0; only their whole pages enter. Where the tree
        already has a page, the row switches to the tree's slots and its own are freed.
        """
        node = seq.open_node(len(token_ids))
        end = self._whole_pages(len(token_ids))
        self.leave_window(seq, len(token_ids))
        if self.disabled:
            return
        if end <= seq.tree_len:
            self._report_tail(seq, node, token_ids, seq.tree_len)
            return
        last, existing = self._insert(seq, node, token_ids, end)
        start = seq.tree_len
        if existing > start:
            ours = self.req_to_token.rows[seq.row, start:existing].copy()
            theirs = np.concatenate(self.tree.path_values(last, node))[: existing - start]
            self.req_to_token.write(seq.row, start, theirs)  # before the free: no row may name a freed slot
            self._exchange_windows(seq, start, ours, theirs)
            self.allocator.free_run(ours)
        self.lock(last)
        self.unlock(node)
        seq.node = last
        seq.tree_len = end
        self._cover_windows(seq, last, start)
        self._report_tail(seq, last, token_ids, end)

    def cache_finished_req(
        self,
        seq: KVSequence,
        token_ids: np.ndarray,
        *,
        fence: int | None = None,
        kind: StateKind = StateKind.PASSING,
        turns_kept: int = TURNS_KEPT,
    ) -> None:
        """End a sequence: its committed whole pages go to the tree, all else is freed, the row too.

        token_ids: int32 [committed], the committed ids from position 0.
        fence: that of a step in flight which still writes slots beyond the committed ones; the pages of those come back
        when it is closed, see `Allocator.quarantine`.
        kind: of the recurrent state that it leaves in the tree. turns_kept: see `NodeStates.put`.
        """
        node = seq.open_node(len(token_ids))
        self.leave_window(seq, len(token_ids))
        row = self.req_to_token.rows[seq.row]
        tree_end = existing = seq.tree_len
        whole = self._whole_pages(len(token_ids))
        last = node
        if whole > tree_end and not self.disabled:
            last, existing = self._insert(seq, node, token_ids, whole)
            tree_end = whole
        if not self.disabled:
            self._report_tail(seq, last, token_ids, tree_end)
            self.leave_state(seq, last, kind, turns_kept=turns_kept)
        self.mark_end(last, SequenceEnd.FINISHED)
        in_flight = fence is not None and seq.length > len(token_ids)
        split = max(whole, tree_end) if in_flight else seq.length
        freed = (row[seq.tree_len : existing], row[tree_end:split])
        self._end_window(seq, last, existing, tree_end)
        self._close(seq, node, freed, row[split : seq.length], fence, len(token_ids))
        self.mark_useless(last)

    def release(self, seq: KVSequence, *, fence: int | None = None, how: SequenceEnd = SequenceEnd.FINISHED) -> None:
        """End a sequence and keep none of its KV. With a ``fence`` all its private pages are quarantined."""
        node = seq.open_node()
        self.mark_end(node, how)
        private = self.req_to_token.rows[seq.row, seq.tree_len : seq.length]
        split = len(private) if fence is None else 0
        self._end_window(seq, node, seq.tree_len, seq.tree_len)
        self._close(seq, node, (private[:split],), private[split:], fence)
        self.mark_useless(node)

    def _close(
        self,
        seq: KVSequence,
        node: TreeNode,
        freed: tuple[np.ndarray, ...],
        in_flight: np.ndarray,
        fence: int | None,
        committed: int = 0,
    ) -> None:
        """Give back the row, then the slots (a row must not name a freed slot), then the lock. committed: tokens that
        no step in flight writes."""
        self.req_to_token.free(seq.row)
        for slots in freed:
            if len(slots):
                self.allocator.free_run(slots)
        if len(in_flight):
            assert fence is not None
            self.allocator.quarantine(in_flight, [fence])
        if self.states is not None:
            seq.states.release(self.states.slots, committed, fence)
        self.unlock(node)
        seq.node, seq.row, seq.tree_len, seq.length = None, -1, 0, 0

    def mark_end(self, node: TreeNode, how: SequenceEnd) -> None:
        """Note on a node that a sequence which held the path down to it has ended."""
        self._ends += 1
        node.last_end = self._ends * NUM_ENDS + how

    def mark_retired(self, node: TreeNode, how: SequenceEnd) -> None:
        """Note on a node that its reuse has been given up, which says nothing of the nodes above it."""
        self._ends += 1
        node.retired_end = self._ends * NUM_ENDS + how
        if self.states is not None:
            self.states.retire(node)

    def _report_tail(self, seq: KVSequence, node: TreeNode, token_ids: np.ndarray, end: int) -> None:
        """Report the computed tokens from position ``end`` on, where ``node`` ends; there are fewer than a page."""
        if end < len(token_ids):
            self.watchers.tail_computed(node, seq.namespace, _id_bytes(token_ids, end), seq.client)

    def _whole_pages(self, length: int) -> int:
        return length - length % self.page_size

    def put_on_device(self, node: TreeNode, slots: np.ndarray) -> None:
        """A node that had left the device is there again, in these slots; its parent is there."""
        assert node.parent is not None and not node.on_device and len(slots) == len(node)
        node.value, node.on_device = slots, True
        node.parent.device_children += 1
        self.evictable_tokens += len(slots)
        self.watchers.node_stored(node)

    def _insert(self, seq: KVSequence, node: TreeNode, token_ids: np.ndarray, end: int) -> tuple[TreeNode, int]:
        """Insert positions tree_len … end below ``node``, the sequence's own; the walk never starts at the root.

        Returns (node that ends at ``end``, position up to which the device had them already).
        """
        data = _id_bytes(token_ids[seq.tree_len : end])
        last = self.tree.match(node, seq.namespace, data)
        row = self.req_to_token.rows[seq.row]
        existing = self.tree.last_on_device(last).prefix_len
        for known in self.tree.path(last, existing):  # it was computed again
            self.put_on_device(known, row[known.prefix_len - len(known) : known.prefix_len].copy())
        self.touch(last)
        if (start := last.prefix_len) < end:
            new_ids = data[(start - seq.tree_len) * ID_BYTES :]
            last = self.tree.add_leaf(last, seq.namespace, new_ids, row[start:end].copy(), self.tick)
            last.turn, last.priority, last.client = seq.turn, seq.priority, seq.client
            self.evictable_tokens += end - start
            self.residency.node_inserted(last)
            self.watchers.node_stored(last)
        if existing < end:
            self.order.push_leaf(last)
        return last, existing

    # -- recurrent states --------------------------------------------------------------------------------------------

    def begin_states(self, seq: KVSequence, fence: int | None = None) -> None:
        """Have a sequence start from the state of its node, in place of those that it names. fence: of a step that may
        still write those."""
        if self.states is None:
            return
        node = seq.open_node()
        if node.state:
            seq.states.begin(self.states.slots, node.state, node.prefix_len, fence)
            self.states.note_use(node)
        else:
            seq.states.release(self.states.slots, fence=fence)

    def leave_state(
        self,
        seq: KVSequence,
        last: TreeNode,
        kind: StateKind,
        length: int | None = None,
        turns_kept: int = TURNS_KEPT,
    ) -> None:
        """Have the tree carry a state that a sequence names: that of ``length`` tokens, or of the most that fit. last:
        the last node of what the sequence has in the tree. Does nothing if there is no such state, or if no match would
        find it."""
        if self.states is None:
            return
        within = last.prefix_len if length is None else min(length, last.prefix_len)
        state = seq.states.longest_within(within, self.page_size)
        if state is None or not state.length or (length is not None and state.length != length):
            return
        node = self.tree.cut_path(last, state.length)
        if self.tree.reachable(node) is node and node.on_device:
            self.states.put(node, state.slot, kind, turns_kept)
            self.residency.state_put(node)
            self.touch(node)  # its KV is of use again

    def usable_length(self, seq: KVSequence, length: int) -> int:
        """How many of the first ``length`` tokens a sequence can be cut to: all, or where the last state is, or up to
        where the window is whole."""
        if self.windows is not None:
            return self._usable_window(seq, length, self.windows)
        if self.states is None:
            return length
        page, own = self.page_size, 0
        for state in seq.states.held:
            if state.length <= length and (state.length >= seq.tree_len or not state.length % page):
                own = state.length
        node = self.tree.node_at(seq.open_node(), length)
        if node.prefix_len > length and node.parent is not None:
            node = node.parent
        return max(own, self.states.deepest_on_device(node).prefix_len)

    def evict_states(self, count: int, *, kept_too: bool) -> int:
        """Take up to ``count`` states from nodes, see `NodeStates.evict`. Returns how many slots are free for it."""
        if self.states is None:
            return 0
        victims = self.states.evict(count, kept_too=kept_too)
        for node in victims:
            self.mark_useless(node)
        return len(victims)

    def remove_state(self, node: TreeNode) -> None:
        """A node carries no state on the device any more."""
        if self.states is not None and node.state:
            self.states.remove(node)
            self.mark_useless(node)

    def mark_useless(self, node: TreeNode) -> None:
        """Have KV that no state lies behind evicted before all else: that of a node and those above it, up to one that
        has a state, or below which there is one. A later access to it counts again."""
        if self.states is None:
            return
        while node.parent is not None and not (node.has_states or node.lock_ref):
            node.last_access = 0
            if node.on_device and (not node.device_children or node.entry is not None):
                self.order.push_leaf(node)
            node = node.parent

    # -- sliding windows -----------------------------------------------------------------------------------------------

    def begin_window(self, seq: KVSequence) -> None:
        """Have a sequence that is all in the tree hold the tokens that its next one sees; they are whole there."""
        if self.windows is not None:
            seq.window_start = self.windows.pages.first_needed(seq.tree_len)
            self.windows.pages.hold(self._row_pages(seq, seq.window_start, seq.tree_len))

    def leave_window(self, seq: KVSequence, committed: int) -> None:
        """Have a sequence hold no more of its ``committed`` tokens than the next ones see, and some to spare."""
        if self.windows is None:
            return
        pages, start = self.windows.pages, self.windows.pages.first_kept(committed)
        if start < seq.window_start + pages.slack:
            return
        shared = min(max(seq.tree_len, seq.window_start), start)
        pages.drop(self._row_pages(seq, seq.window_start, shared))
        pages.take_back(self._row_pages(seq, shared, start))
        seq.window_start = start

    def drop_window(self, seq: KVSequence, start: int = 0) -> None:
        """Have a sequence hold none of its tokens in the tree from position ``start`` on, which are about to leave its
        row."""
        if self.windows is not None:
            self.windows.pages.drop(self._row_pages(seq, max(start, seq.window_start), seq.tree_len))

    def extend_window(self, seq: KVSequence) -> None:
        """Have a sequence that was cut back to a usable length hold what its next token sees."""
        if self.windows is None:
            return
        start = self.windows.pages.first_needed(seq.length)
        if start < seq.window_start:
            self.windows.pages.hold(self._row_pages(seq, start, min(seq.window_start, seq.tree_len)))
            seq.window_start = start

    def share_window(self, seq: KVSequence, fork: KVSequence) -> None:
        """Have a fork hold what the sequence holds. Its private tokens have slots of their own already."""
        if self.windows is None:
            return
        fork.window_start = seq.window_start
        self.windows.pages.hold(self._row_pages(fork, fork.window_start, fork.tree_len))
        self.windows.pages.take_back(self._row_pages(fork, fork.tree_len, fork.window_start))

    def evict_windows(self, num_tokens: int, latest: int | None = None) -> int:
        """Free so many slots of the window pool, if the tree has them, see `NodeWindows.evict`. Returns how many."""
        return self.windows.evict(num_tokens, latest) if self.windows is not None else 0

    def _usable_window(self, seq: KVSequence, length: int, windows: NodeWindows) -> int:
        """See `usable_length`. A length within the tree is one of whole pages."""
        if length >= seq.tree_len and windows.pages.first_needed(length) >= seq.window_start:
            return length
        length = self._whole_pages(min(length, seq.tree_len))
        return windows.usable(self.tree.node_at(seq.open_node(), length), length)

    def _exchange_windows(self, seq: KVSequence, start: int, ours: np.ndarray, theirs: np.ndarray) -> None:
        """Have a sequence hold the tree's slots in place of its own from position ``start`` on, int32 [n] both, which
        are about to be freed."""
        if self.windows is not None:
            skipped, page = max(0, seq.window_start - start), self.page_size
            self.windows.pages.move(ours[skipped::page] // page, theirs[skipped::page] // page)

    def _cover_windows(self, seq: KVSequence, last: TreeNode, start: int) -> None:
        """The tree has got what a sequence holds from position ``start`` on, where a node begins, to the end of
        ``last``."""
        if self.windows is not None:
            for node in self.tree.path(last, start):
                self.windows.cover(node, max(seq.window_start, start))

    def _end_window(self, seq: KVSequence, last: TreeNode, existing: int, end: int) -> None:
        """Have the tree keep what a sequence that ends holds of its first ``end`` tokens, whole pages; they end at
        ``last``. Up to position ``existing`` the tree had them before."""
        if self.windows is None:
            return
        start, page = seq.tree_len, self.page_size
        kept = self._row_pages(seq, max(seq.window_start, existing), end)
        if existing > start:
            slots = np.concatenate(self.tree.path_values(last, seq.open_node()))[: existing - start]
            self._exchange_windows(seq, start, self.req_to_token.rows[seq.row, start:existing], slots)
            kept = np.concatenate([slots[max(0, seq.window_start - start) :: page] // page, kept])
        self.drop_window(seq)
        self._cover_windows(seq, last, start)
        self.windows.pages.drop(kept)

    def _row_pages(self, seq: KVSequence, start: int, stop: int) -> np.ndarray:
        """int32 [n]: the pages of positions ``start`` to ``stop`` of a row; none if that is before ``start``."""
        return self.req_to_token.rows[seq.row, start : max(start, stop) : self.page_size] // self.page_size

    # -- eviction ----------------------------------------------------------------------------------------------------

    def evict(self, num_tokens: int, latest: int | None = None) -> int:
        """Free at least ``num_tokens`` tokens, in the order of eviction; not many more, see `EvictionOrder`. latest:
        only KV that was not accessed after this tick.

        Returns the tokens freed: less than asked if the rest is locked, or must be copied first. Evicting 0 is always
        safe.
        """
        residency, freed = self.residency, 0
        while (short := num_tokens - freed - residency.leaving_tokens) > 0:
            victims, kept = self.order.choose_victims(self.tree, short, residency.keeps, latest)
            freed += self._evicted(victims)
            homeless = residency.copy_leaving(kept) if kept else ()
            for node in homeless:
                self.order.take_off(node)
            freed += self._evicted(homeless)
            if not homeless:
                break
        self.evicted_total += freed
        return freed

    def _evicted(self, victims: Sequence[TreeNode]) -> int:
        """Free the slots of nodes that have left the device, and remove those that are on no other tier. Returns the
        tokens freed."""
        if not victims:
            return 0
        for node in victims:
            self.remove_state(node)
        dropped = self.residency.select_dropped(victims)
        freed = self.free_nodes(victims)
        self.tree.remove_leaves(dropped)
        return freed

    def free_nodes(self, nodes: Sequence[TreeNode]) -> int:
        """Free the slots of unlocked nodes. Returns the tokens freed."""
        if not nodes:
            return 0
        self.watchers.nodes_removed(nodes)
        slots = nodes[0].value if len(nodes) == 1 else np.concatenate([node.value for node in nodes])
        self.allocator.free_run(slots)
        self.evictable_tokens -= len(slots)
        for node in nodes:
            node.value = NO_SLOTS
            if self.windows is not None:
                self.windows.remove(node)
        return len(slots)

    def reset(self, fence: int = 0) -> bool:
        """Forget everything. Refuses, and returns False, while a sequence is open or a node is locked. Copies between
        tiers do not prevent it: their slots wait in quarantine. fence: that of a step in flight that may still read the
        slots; 0 for none."""
        holders = self.residency.holders()
        for node in holders:
            self.unlock(node)
        if self.tree.root.lock_ref > 1:
            for node in holders:
                self.lock(node)
            return False
        for node in list(self.tree.nodes()):
            if self.windows is not None:
                self.windows.pages.take_back(node.value[:: self.page_size] // self.page_size)
            self.allocator.quarantine(node.value, [node.storing, node.loading, fence])
            node.parent = None  # old handles must fail, not lock a node that is not there
        copies = self.residency.detach_copies()
        if self.states is not None:
            self.states.slots.reset([fence, *(copying for copying, _ in copies)])
        self._start_afresh()
        return True

    def discard_all(self) -> None:
        """Forget everything, locked or not, and start afresh with a free pool. Open sequences become void. Used only
        when a page turns out to have two owners."""
        copies = self.residency.detach_copies()
        self.allocator.reset(copies)
        if self.states is not None:
            self.states.slots.reset([copying for copying, _ in copies])
        self._start_afresh()
        self.req_to_token.reset()

    def _start_afresh(self) -> None:
        """Put a new tree in the old one's place, so that handles to the old root are dead too."""
        self.tree = RadixTree(self.page_size)
        self.order.clear()
        if self.states is not None:
            self.states.forget_nodes()
        if self.windows is not None:
            self.windows.clear()
        self.watchers.cache_cleared()
        self.evictable_tokens = self.protected_tokens = 0


def _id_bytes(token_ids: np.ndarray, start: int = 0) -> bytes:
    if start:
        token_ids = token_ids[start:]
    if token_ids.dtype != np.int32:
        raise TypeError(f"token ids must be int32, not {token_ids.dtype}")
    return token_ids.tobytes()


def _needed_bytes(tree: RadixTree, top: TreeNode, namespace: str, token_ids: np.ndarray) -> bytes:
    """The ids after ``top``, as far as the look-up needs them: a long prompt that is not cached is not copied."""
    start = top.prefix_len
    if len(token_ids) - start > LONG_PROMPT:
        first = _id_bytes(token_ids[start : start + FIRST_LOOK])
        _, whole, _, part = tree.find_match(top, namespace, first)
        if whole + part + tree.page_bytes <= len(first):  # the next page is there, and is another
            return first
    return _id_bytes(token_ids, start)
