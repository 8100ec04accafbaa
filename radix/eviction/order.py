"""The order in which leaves are evicted, the lowest rank first (`ranks.py`), and the choice of victims.

It consists of entries (rank, serial, node). Each node has at most one entry, made when it becomes an unlocked leaf. A
later access or lock does not touch the order, so it is free: an entry that turns out to be out of date when it comes
first is put back with the right rank, or dropped if its node is locked or no leaf any more.

By default the rank is the time of the last access. Then most entries are made for new leaves, in order of time: they go
into a queue, O(1). The few that come late (an old leaf was unlocked, a rank was corrected, a parent became a leaf) go
into a heap beside it, O(log n).

A node that is to go early (retire.py) gets a second entry; its first one is dead then, and passed over.

An access marks only the last node of its path. A victim passes on to its parent what happened to it, so that is right
for a node at the moment it becomes a leaf, which is the only time it matters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from itertools import chain

from ..node import NO_ENTRY, TreeNode
from ..tree import RadixTree
from .ranks import Rank, lru


class EvictionOrder:
    """Owns the entries. Every unlocked leaf has one, with a rank not above its own."""

    def __init__(self, least_rest: int = 1, rank: Rank = lru) -> None:
        """least_rest: if fewer tokens than these would be left of a leaf, all of it goes; at least a page."""
        self._least_rest = least_rest
        self.rank = rank
        """What leaves are compared by."""
        self._queue: deque[tuple[int, int, TreeNode]] = deque()
        self._heap: list[tuple[int, int, TreeNode]] = []

    def add(self, leaf: TreeNode) -> None:
        """Call when a node becomes an unlocked leaf, or is one that is to go earlier."""
        rank = self.rank(leaf)
        if leaf.entry_rank == NO_ENTRY or rank < leaf.entry_rank:
            self._push(leaf, rank)

    def _push(self, leaf: TreeNode, rank: int) -> None:
        leaf.entry_rank = rank
        entry = (rank, leaf.serial, leaf)
        if not self._queue or entry > self._queue[-1]:
            self._queue.append(entry)
        else:
            heappush(self._heap, entry)

    def pop(self) -> TreeNode | None:
        """Remove the entry of the unlocked leaf with the lowest rank and return the leaf; None if there is none."""
        queue, heap = self._queue, self._heap
        while queue or heap:
            if not heap or (queue and queue[0] < heap[0]):
                rank, _, node = queue.popleft()
            else:
                rank, _, node = heappop(heap)
            if node.entry_rank != rank:
                continue
            node.entry_rank = NO_ENTRY
            if node.lock_ref or node.device_children or node.parent is None:
                continue
            now = self.rank(node)
            if now == rank:
                return node
            self._push(node, now)
        return None

    def clear(self) -> None:
        self._queue.clear()
        self._heap.clear()

    def forget_removed(self) -> None:
        """Drop the entries of nodes that have left the tree other than by eviction, which would keep them alive."""
        self._queue = deque(entry for entry in self._queue if entry[2].parent is not None)
        self._heap = [entry for entry in self._heap if entry[2].parent is not None]
        heapify(self._heap)

    def choose_victims(
        self, tree: RadixTree, num_tokens: int, keeps: Callable[[TreeNode], bool]
    ) -> tuple[list[TreeNode], list[TreeNode]]:
        """Take leaves off the device until they hold ``num_tokens`` tokens, or until all that remain are locked; the
        lowest rank first. Once its last child is chosen, a parent is a leaf too. Of the last one only as many
        pages go as are needed, from its end: what is left of it is the next victim.

        Returns (victims, those whose turn it is but which must stay for now, because keeps(node) is true). The latter
        count as taken, and have no entry any more.
        """
        victims: list[TreeNode] = []
        kept: list[TreeNode] = []
        while num_tokens > 0:
            victim = self.pop()
            if victim is None:
                break
            rest = len(victim.value) - num_tokens
            if rest >= self._least_rest:
                tree.split(victim, rest // tree.page_size * tree.page_size)  # the object stays the lower part
            num_tokens -= len(victim.value)
            if keeps(victim):
                kept.append(victim)
            else:
                victims.append(victim)
                self.take_off(victim)
        return victims, kept

    def take_off(self, victim: TreeNode) -> None:
        """Note that an unlocked leaf without an entry leaves the device."""
        victim.on_device = False
        parent = victim.parent
        assert parent is not None
        parent.device_children -= 1
        if victim.last_access > parent.last_access:
            parent.last_access = victim.last_access
        if victim.used > parent.used:
            parent.used = victim.used
        if victim.uses:
            parent.uses += victim.uses
            victim.uses = 0  # it may be back, from another tier
        if victim.priority > parent.priority:
            parent.priority = victim.priority
        self.lost_child(parent)

    def lost_child(self, parent: TreeNode) -> None:
        """Call when a child has left the device: the parent may be an unlocked leaf now."""
        if not (parent.device_children or parent.lock_ref):
            self.add(parent)

    def entries(self) -> Iterator[tuple[int, TreeNode]]:
        """(rank, node) of every entry that counts, in no particular order, for invariants."""
        return ((rank, node) for rank, _, node in chain(self._queue, self._heap) if node.entry_rank == rank)
