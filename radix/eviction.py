"""The order in which leaves are evicted: least recently used first.

A heap of (last_access, serial, node) with lazily corrected entries. Each node has at most one entry, pushed when it
becomes an unlocked leaf. A later access or lock does not touch the heap: an entry that turns out to be out of date when
it reaches the top is put back with the right time, or dropped if its node is locked or no leaf any more. So an access
is free, and evicting k of n leaves costs O(k log n).

An access marks only the last node of its path. A removed leaf hands its time to its parent, so a node's time is right
at the moment it becomes a leaf, which is the only time it matters.
"""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush, heapreplace

from .node import TreeNode


class EvictionOrder:
    """Owns the heap. Every unlocked leaf has an entry whose time is not later than its last_access."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, TreeNode]] = []

    def add(self, leaf: TreeNode) -> None:
        """Call when a node becomes an unlocked leaf."""
        if not leaf.in_order:
            leaf.in_order = True
            heappush(self._heap, (leaf.last_access, leaf.serial, leaf))

    def pop(self) -> TreeNode | None:
        """The least recently used unlocked leaf, without its entry; None if there is none."""
        heap = self._heap
        while heap:
            time, _, node = heap[0]
            if node.lock_ref or node.children or node.parent is None:
                heappop(heap)
                node.in_order = False
            elif node.last_access != time:
                heapreplace(heap, (node.last_access, node.serial, node))
            else:
                heappop(heap)
                node.in_order = False
                return node
        return None

    def clear(self) -> None:
        self._heap.clear()

    def entries(self) -> Iterator[tuple[int, TreeNode]]:
        """(time, node) of every entry in no particular order, for invariants."""
        return ((time, node) for time, _, node in self._heap)
