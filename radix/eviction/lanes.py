"""Queues of leaves that wait to be evicted, and the seam between the orders of eviction."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Protocol

from ..node import TreeNode
from ..watching import CacheWatcher
from .ranks import Rank

Entry = tuple[int, int, TreeNode]
"""(rank, serial, node)"""


class Lane:
    """Entries, the lowest rank first. Those that come in order go into a queue, O(1); the few that come late (an old
    leaf was unlocked, a rank was corrected, a parent became a leaf) into a heap beside it, O(log n)."""

    __slots__ = ("_heap", "_queue")

    def __init__(self) -> None:
        self._queue: deque[Entry] = deque()
        self._heap: list[Entry] = []

    def __bool__(self) -> bool:
        return bool(self._queue or self._heap)

    def __iter__(self) -> Iterator[Entry]:
        return chain(self._queue, self._heap)

    def push_entry(self, entry: Entry) -> None:
        if not self._queue or entry > self._queue[-1]:
            self._queue.append(entry)
        else:
            heappush(self._heap, entry)

    def first(self) -> Entry:
        """The first entry; the lane must not be empty."""
        queue, heap = self._queue, self._heap
        return queue[0] if not heap or (queue and queue[0] < heap[0]) else heap[0]

    def pop_entry(self) -> Entry:
        """Remove the first entry of a lane that is not empty."""
        queue, heap = self._queue, self._heap
        return queue.popleft() if not heap or (queue and queue[0] < heap[0]) else heappop(heap)

    def clear(self) -> None:
        self._queue.clear()
        self._heap.clear()

    def forget_removed(self) -> None:
        """Drop the entries of nodes that have left the tree, which would keep them alive."""
        for _, _, node in self:
            if node.parent is None:
                node.entry = None
        self._queue = deque(entry for entry in self._queue if entry[2].parent is not None)
        self._heap = [entry for entry in self._heap if entry[2].parent is not None]
        heapify(self._heap)


class Lanes(Protocol):
    """An order of eviction: the key that compares leaves, the lane of each leaf, and the lane that is next. To add an
    order, write a small class and add a line to orders.py."""

    rank: Rank
    """The key by which the leaves of a lane are compared."""

    all: Sequence[Lane]

    watcher: CacheWatcher | None
    """Receives the events of the cache, for an order that learns from them; None otherwise."""

    def lane_of(self, node: TreeNode) -> Lane:
        """The lane in which the node belongs now, called before it is pushed. That may change while it waits: when its
        turn comes, it moves to the lane in which it belongs then."""
        ...

    def next(self) -> Lane | None:
        """The lane with the next leaf to evict, called before that leaf is popped; None if all lanes are empty."""
        ...


class OneLane:
    """All leaves are compared by one number."""

    def __init__(self, rank: Rank) -> None:
        self.rank = rank
        self.watcher: CacheWatcher | None = None
        self._lane = Lane()
        self.all: Sequence[Lane] = (self._lane,)

    def lane_of(self, node: TreeNode) -> Lane:
        return self._lane

    def next(self) -> Lane | None:
        return self._lane or None
