"""The order in which copies leave the host, least recently used first.

As in eviction/order.py an entry that turns out to be out of date when it comes first is put back with the right time,
or dropped; so accesses cost nothing.
"""

from __future__ import annotations

from heapq import heappop, heappush

from ..node import TreeNode


class HostOrder:
    """Owns the entries. Every node that may be evicted from the host has one, with a time not later than its access."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, TreeNode]] = []
        self._listed: set[int] = set()
        """Serials of nodes that have an entry."""

    def __len__(self) -> int:
        return len(self._heap)

    @staticmethod
    def is_leaf(node: TreeNode) -> bool:
        """True if its copy may be evicted: no node below it has a copy, and none is being made of it or from it."""
        return node.host is not None and not (node.host_children or node.storing or node.loading)

    def has(self, node: TreeNode) -> bool:
        return node.serial in self._listed

    def push_leaf(self, node: TreeNode) -> None:
        if node.serial not in self._listed:
            self._listed.add(node.serial)
            heappush(self._heap, (node.last_access, node.serial, node))

    def pop(self) -> TreeNode | None:
        """The least recently used leaf, without its entry; None if there is none."""
        while self._heap:
            time, serial, node = heappop(self._heap)
            if not self.is_leaf(node):
                self._listed.discard(serial)
            elif node.last_access > time:
                heappush(self._heap, (node.last_access, serial, node))
            else:
                self._listed.discard(serial)
                return node
        return None

    def clear(self) -> None:
        self._heap.clear()
        self._listed.clear()
