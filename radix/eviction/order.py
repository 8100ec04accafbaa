"""The order in which leaves are evicted, and the choice of victims.

It consists of entries (rank, serial, node), which wait in a `Lane`, the lowest rank first. Each node has at
most one entry that counts, made when it becomes an unlocked leaf. A later access or lock does not touch the order, so
it is free: an entry that turns out to be out of date when its turn comes is put back where it belongs, or dropped if
its node is locked or no leaf any more. By default there is one lane, and the rank is the time of the last access.

A node that is to go early (discarding.py) gets a second entry; its first one is dead then, and passed over.

An access marks only the last node of its path. A victim passes on to its parent what happened to it, so that is right
for a node at the moment it becomes a leaf, which is the only time it matters.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import chain
from typing import Protocol

from ..node import TreeNode
from ..tree import RadixTree
from ..watchers import CacheWatcher
from .ranks import Rank

Entry = tuple[int, int, TreeNode]
"""(rank, serial, node)"""


class EvictionOrder:
    """Owns the entries. Every unlocked leaf has one, with a rank not above its own."""

    def __init__(self, lanes: Lanes, least_rest: int = 1) -> None:
        """lanes: a new one. least_rest: if fewer tokens than these would be left of a leaf, all of it goes; at least a
        page."""
        self._lanes = lanes
        self._least_rest = least_rest
        self.rank = lanes.rank
        """The key by which the leaves of a lane are compared."""

    def push_leaf(self, leaf: TreeNode) -> None:
        """Call when a node becomes an unlocked leaf, or is one that is to go earlier."""
        rank = self.rank(leaf)
        if leaf.entry is None or rank < leaf.entry[0]:
            leaf.entry = (rank, leaf.serial, leaf)
            self._lanes.lane_of(leaf).push_entry(leaf.entry)

    def pop(self) -> TreeNode | None:
        """Remove the entry of the next unlocked leaf and return the leaf; None if there is none."""
        lanes = self._lanes
        while (lane := lanes.next()) is not None:
            entry = lane.pop_entry()
            node = entry[2]
            if node.entry is not entry:
                continue
            node.entry = None
            if node.lock_ref or node.device_children or node.parent is None:
                continue
            if self.rank(node) == entry[0] and lanes.lane_of(node) is lane:
                return node
            self.push_leaf(node)
        return None

    def clear(self) -> None:
        for lane in self._lanes.all:
            lane.clear()

    def forget_removed(self) -> None:
        """Drop the entries of nodes that have left the tree other than by eviction, which would keep them alive."""
        for lane in self._lanes.all:
            lane.forget_removed()

    def choose_victims(
        self, tree: RadixTree, num_tokens: int, keeps: Callable[[TreeNode], bool], latest: int | None = None
    ) -> tuple[list[TreeNode], list[TreeNode]]:
        """Take leaves off the device until they hold ``num_tokens`` tokens, or until all that remain are locked; the
        lowest rank first. Once its last child is chosen, a parent is a leaf too. Only as many pages of the last leaf
        are taken as are needed, from its end: the rest of it is the next victim.

        Returns (victims, kept): ``kept`` are leaves that were next but must stay for now, because keeps(node) is true.
        They count as taken, and have no entry any more. latest: end at the first leaf that was accessed after this
        tick.
        """
        victims: list[TreeNode] = []
        kept: list[TreeNode] = []
        while num_tokens > 0:
            victim = self.pop()
            if victim is None:
                break
            if latest is not None and victim.last_access > latest:
                self.push_leaf(victim)
                break
            rest = len(victim.value) - num_tokens
            is_resumed = victim.state or victim.window_len  # at its end, and without its last token nowhere
            if rest >= self._least_rest and not is_resumed:
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
        if victim.last_end > parent.last_end:
            parent.last_end = victim.last_end
        if victim.priority > parent.priority:
            parent.priority = victim.priority
        if 0 < parent.turn < victim.turn and not parent.branched:
            parent.turn = victim.turn  # what is left of a session has come as far as the session has
        self.lost_child(parent)

    def lost_child(self, parent: TreeNode) -> None:
        """Call when a child has left the device: the parent may be an unlocked leaf now."""
        if not (parent.device_children or parent.lock_ref):
            self.push_leaf(parent)

    def entries(self) -> Iterator[tuple[int, TreeNode]]:
        """(rank, node) of every entry that counts, in no particular order, for invariants."""
        return ((entry[0], entry[2]) for lane in self._lanes.all for entry in lane if entry[2].entry is entry)


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
    order, write a small class and add a line to registry.py."""

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
