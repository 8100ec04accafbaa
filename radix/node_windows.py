"""How much of each node is of use to layers with a sliding window, and the order in which that is given up.

Such layers have a pool of their own (`WindowPages`), smaller than the KV pool: of a node, only some last tokens have K
and V there. A prefix can be continued where the tokens that the next one sees have theirs, those of nodes further up
included; the K and V of other layers below that place are of no use.

    tokens      0 ───────────────────────────────── 900 ──────────── 1300            window: 400 tokens
    window_len                        |── 400 ─────|  |─── 300 ─────|
    usable      0                                900                 none: 900 … 1000 have gone

Slots that no sequence holds are evicted apart from other K and V. First go those that no end of a path needs; then
those of the ends that were used longest ago. Ends are leaves, where a conversation continues, and branches, where
several do.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ..memory_pool.window_pages import WindowPages
from .node import TreeNode

NO_END = -1
"""Rank of tokens that no end of a path needs."""


class NodeWindows:
    """Owns `TreeNode.window_len`. Each counted token has a slot beside its own, see `WindowPages`."""

    def __init__(self, pages: WindowPages) -> None:
        self.pages = pages
        self.evicted_total = 0
        """Slots evicted since start."""
        self.changed: set[TreeNode] | None = None
        """Collects nodes whose ``window_len`` has changed, for usable_ends.py; None if nothing takes them."""
        self._nodes: set[TreeNode] = set()
        """At least the lowest part of each node that was ever covered; a split adds upper parts."""

    def usable(self, node: TreeNode, end: int) -> int:
        """The longest prefix, of at most ``end`` tokens, that can be continued. node: where these tokens end, or in
        which."""
        while node.parent is not None:
            first = min(node.prefix_len - node.window_len, end)
            if first <= self.pages.first_needed(end):
                return end
            if node.window_len < len(node):  # no later end sees less
                end = node.parent.prefix_len
            node = node.parent
        return end

    def cover(self, node: TreeNode, start: int) -> None:
        """The tokens of a node from position ``start`` on have slots."""
        count = min(len(node), node.prefix_len - start)
        if count > node.window_len:
            node.window_len = count
            self._nodes.add(node)
            self._note_change(node)

    def remove(self, node: TreeNode) -> None:
        """The slots of a node are about to be freed."""
        node.window_len = 0
        self._nodes.discard(node)
        if node.parent is not None and node.parent.window_len:
            self._nodes.add(node.parent)  # it may be the upper part of a node that was split

    def evict(self, num_tokens: int, latest: int | None = None) -> int:
        """Free ``num_tokens`` slots that no sequence holds, or all there are. latest: only what no end needs that was
        used after this tick. Returns how many it has freed."""
        nodes = self.listed()
        needed = self._needed(nodes)
        left = num_tokens
        for node in nodes:
            if left > 0:
                left -= self._trim(node, needed[node][1] if node in needed else node.prefix_len)
        ranked = sorted((node for node in nodes if node in needed), key=lambda node: needed[node][0])
        for node in ranked:
            if left <= 0 or (latest is not None and needed[node][0] > latest):
                break
            left -= self._trim(node, node.prefix_len)
        self._nodes = {node for node in nodes if node.window_len}
        self.evicted_total += num_tokens - left
        return num_tokens - left

    def restore(self, nodes: Iterable[TreeNode]) -> None:
        """Derive everything from the mapping of pages, after an exception. nodes: all of the tree without the root."""
        self._nodes.clear()
        for node in nodes:
            there = self.pages.has(self._pages_of(node, len(node)))[::-1]
            count = len(there) if there.all() else int(there.argmin())
            node.window_len = count * self.pages.page_size
            if count:
                self._nodes.add(node)
            self._note_change(node)

    def clear(self) -> None:
        """The tree is dropped with all its nodes."""
        self._nodes.clear()

    def listed(self) -> list[TreeNode]:
        """All nodes with slots, the oldest first; parts that splits have made included."""
        found = set[TreeNode]()
        for node in self._nodes:
            above: TreeNode | None = node
            while above is not None and above.window_len and above not in found:
                found.add(above)
                above = above.parent
        return sorted(found, key=lambda node: node.serial)

    def _needed(self, nodes: Iterable[TreeNode]) -> dict[TreeNode, tuple[int, int]]:
        """Node -> (the last access to an end that needs it, the first position that one needs)."""
        needed: dict[TreeNode, tuple[int, int]] = {}
        for end in nodes:
            if len(end.children) == 1:
                continue
            first = self.pages.first_needed(end.prefix_len)
            node: TreeNode = end
            while node.prefix_len > first and node.window_len:
                rank, position = needed.get(node, (NO_END, node.prefix_len))
                needed[node] = max(rank, end.last_access), min(position, first)
                if node.window_len < len(node) or node.parent is None:
                    break
                node = node.parent
        return needed

    def _trim(self, node: TreeNode, stop: int) -> int:
        """Free the slots of a node's tokens before position ``stop``, up to the first that a sequence holds. Returns
        how many."""
        page = self.pages.page_size
        first = node.prefix_len - node.window_len
        count = (min(stop, node.prefix_len) - first) // page
        if count <= 0:
            return 0
        pages = self._pages_of(node, node.window_len)[:count]
        held = self.pages.holders[pages] > 0
        if held.any():
            pages = pages[: int(held.argmax())]
        node.window_len -= len(pages) * page
        self._note_change(node)
        return self.pages.take_back(pages)

    def _note_change(self, node: TreeNode) -> None:
        if self.changed is not None:
            self.changed.add(node)

    def _pages_of(self, node: TreeNode, count: int) -> np.ndarray:
        """int32 [n]: the numbers of the pages with a node's last ``count`` tokens."""
        page = self.pages.page_size
        return node.value[len(node.value) - count :: page] // page
