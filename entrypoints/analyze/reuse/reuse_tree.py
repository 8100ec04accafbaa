"""The prefix tree of a log with the time of each part's last use, and from it reuse distances.

A cache that evicts the least recently used units first, and the deepest first among those of one access, holds the top
of one stack, whatever its size: a larger cache holds everything that a smaller one does (Mattson, Gecsei, Slutz and
Traiger, 1970). The position of a unit in the stack when it is requested again, its reuse distance, therefore tells
which caches have it: all of at least that many units. A prefix lies above its continuation, so each size holds whole
prefixes. One pass over the log gives the hits of every size.

A unit corresponds to a page of the server: a page of token ids, a block that the log has a hash of, or a few bytes of
text. A node of the tree is a run of units with the same last use. The tree's memory is bounded: it forgets the units
that were used longest ago, and distances up to the number of units left stay exact.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator

from .state_marks import forget_marks
from .tree_node import Node, StateMarks

NODE_BYTES = 480
"""Memory of a node besides its key, measured: the object, its parent's entry for it, its share of the queue."""

TIMES = 1 << 20
"""Accesses before times are numbered anew."""

_KEPT_SHARE = 0.98
"""Share of the memory that is used after forgetting: little is lost, but not every access has to forget."""


class Recency:
    """Units by the time of their last use: a Fenwick tree over times (Fenwick, 1994), which makes reuse distances cheap
    (Bennett and Kruskal, 1975). Times are integers from 0 to below ``capacity``. Both calls take O(log capacity)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = 1 << max(1, (capacity - 1).bit_length())
        self.total = 0
        """Units over all times."""
        self._sums = array("q", bytes(8 * (self.capacity + 1)))

    def add_units(self, time: int, units: int) -> None:
        """Add units with this time; a negative number removes them."""
        self.total += units
        sums, capacity, place = self._sums, self.capacity, time + 1
        while place <= capacity:
            sums[place] += units
            place += place & -place

    def units_after(self, time: int) -> int:
        """Units that were last used later than ``time``."""
        sums, place, found = self._sums, time + 1, 0
        while place:
            found += sums[place]
            place &= place - 1
        return self.total - found


class Mark:
    """A time of the tree, for `ReuseTree.used_since`."""

    __slots__ = ("time",)

    def __init__(self, time: int) -> None:
        self.time = time


class Access:
    """The part of a sequence that the tree knew. runs: (units above the run in the stack, units of the run) for each
    run of known units in order, so that a run's distances are the first number + 1, + 2, … last: the node at the end of
    the sequence, now in the tree. path: its known nodes, from the top."""

    __slots__ = ("known", "last", "path", "runs")

    def __init__(self, runs: list[tuple[int, int]], known: int, last: Node, path: list[Node]) -> None:
        self.runs = runs
        self.known = known
        """Units that the tree had."""
        self.last = last
        self.path = path


class ReuseTree:
    """Owns the nodes and their times. unit_bytes: bytes of key per unit. max_bytes: memory for all nodes; 0 for no
    limit."""

    def __init__(self, unit_bytes: int, max_bytes: int = 0, times: int = TIMES) -> None:
        self.unit_bytes = unit_bytes
        self.num_nodes = 0
        self.key_bytes = 0
        self.exact_units: int | None = None
        """Distances up to this many units are exact; None, while nothing was forgotten, for all."""
        self._max_bytes = max_bytes
        self._least_times = times
        self._recency = Recency(times)
        self._now = 0
        self._root = Node(None, None, b"", 0, -1, 0)
        self._oldest: deque[tuple[int, Node]] = deque()
        """(time, node at which that access ended), in order of time. An entry is stale once its node has another
        time."""
        self._marks: list[Mark] = []

    @property
    def live_units(self) -> int:
        """Units in the tree."""
        return self._recency.total

    @property
    def used_bytes(self) -> int:
        """Estimate of the memory used."""
        return self.key_bytes + self.num_nodes * NODE_BYTES

    # -- one access ------------------------------------------------------------------------------------------------

    def access(self, namespace: str, key: bytes, *, counts: bool = True) -> Access:
        """Use a sequence of whole units, at least one, and add its unknown rest to the tree. counts: increment the
        nodes' ``uses``; False for a further output of the same request."""
        if self._now == self._recency.capacity:
            self._number_times_anew()
        now, self._now = self._now, self._now + 1
        path, known_bytes = self._walk(namespace, key)
        runs = self._runs(path)
        for node in path:
            self._recency.add_units(node.last_use, -(len(node.key) // self.unit_bytes))
            node.last_use = now
            node.uses += counts
        last = path[-1] if path else self._root
        if known_bytes < len(key):
            last = self._add_leaf(last, namespace, key, known_bytes, now)
        self._recency.add_units(now, len(key) // self.unit_bytes)
        self._oldest.append((now, last))
        if len(self._oldest) > 2 * self.num_nodes + 1024:
            self._oldest = deque((time, node) for time, node in self._oldest if self._is_current(time, node))
        return Access(runs, known_bytes // self.unit_bytes, last, path)

    def _runs(self, path: list[Node]) -> list[tuple[int, int]]:
        runs, time, above = [], -1, 0
        for node in path:
            if node.last_use != time:
                time = node.last_use
                above = self._recency.units_after(time)
            units = len(node.key) // self.unit_bytes
            runs.append((above, units))
            above += units  # of one time, the upper ones lie above the lower ones
        return runs

    def _walk(self, namespace: str, key: bytes) -> tuple[list[Node], int]:
        """(the known nodes of the sequence, their length in bytes). A partly matching node is split."""
        width, offset, path = self.unit_bytes, 0, []
        children, first = self._root.children, (namespace, key[:width])
        while children is not None and (child := children.get(first)) is not None:
            if not key.startswith(child.key, offset):
                common = _common(key, offset, child.key)
                child = self._split(child, common - common % width)
                path.append(child)
                return path, offset + len(child.key)
            path.append(child)
            offset += len(child.key)
            children, first = child.children, key[offset : offset + width]
        return path, offset

    def cut_path(self, last: Node, units: int) -> Node:
        """The node that ends ``units`` units after the root, on the path through ``last``, which is at least as long. A
        longer one is split."""
        node = last
        while node.start >= units:
            assert node.parent is not None
            node = node.parent
        cut = (units - node.start) * self.unit_bytes
        return node if cut == len(node.key) else self._split(node, cut)

    def _split(self, node: Node, cut: int) -> Node:
        """Split a node after ``cut`` bytes; returns the new upper part."""
        parent = node.parent
        assert parent is not None and parent.children is not None and 0 < cut < len(node.key)
        upper = Node(parent, node.name, node.key[:cut], node.start, node.last_use, node.uses)
        parent.children[node.name] = upper
        node.parent, node.key = upper, node.key[cut:]
        node.name = node.key[: self.unit_bytes]
        node.start += cut // self.unit_bytes
        upper.children = {node.name: node}
        if node.states is not None:
            upper.states = StateMarks(below=node.states.any)
        self.num_nodes += 1
        return upper

    def _add_leaf(self, parent: Node, namespace: str, key: bytes, start: int, now: int) -> Node:
        first = key[start : start + self.unit_bytes]
        name = (namespace, first) if parent is self._root else first
        leaf = Node(parent, name, key[start:], start // self.unit_bytes, now, 1)
        if parent.children is None:
            parent.children = {}
        parent.children[name] = leaf
        self.num_nodes += 1
        self.key_bytes += len(leaf.key)
        return leaf

    # -- times -----------------------------------------------------------------------------------------------------

    def mark(self) -> Mark:
        """A mark of the current time, for `used_since`, valid until `forget_mark`."""
        mark = Mark(self._now)
        self._marks.append(mark)
        return mark

    def forget_mark(self, mark: Mark) -> None:
        self._marks.remove(mark)

    def used_since(self, mark: Mark) -> int:
        """Units that were used after the mark was made."""
        return self._recency.units_after(mark.time - 1)

    def _number_times_anew(self) -> None:
        """Renumber the times that nodes still have from 0; only their order matters."""
        times = sorted({node.last_use for node in self.nodes()})
        number = {time: place for place, time in enumerate(times)}
        recency = Recency(max(self._least_times, 2 * len(times)))
        for mark in self._marks:
            mark.time = bisect_left(times, mark.time)
        current = [(time, node) for time, node in self._oldest if self._is_current(time, node)]
        self._oldest = deque((number[time], node) for time, node in current)
        for node in self.nodes():
            node.last_use = number[node.last_use]
            recency.add_units(node.last_use, len(node.key) // self.unit_bytes)
        self._recency, self._now = recency, len(times)

    # -- forgetting -----------------------------------------------------------------------------------------

    def forget_oldest(self) -> Iterator[tuple[str, bytes, int]]:
        """Bring the tree back within its memory. Yields (namespace, whole key, first forgotten unit) of each path that
        is cut short."""
        if not self._max_bytes or self.used_bytes <= self._max_bytes:
            return
        while self.used_bytes > self._max_bytes * _KEPT_SHARE and self._oldest:
            time, node = self._oldest.popleft()
            if self._is_current(time, node) and node.children is None:
                namespace, key = _whole_path(node)
                yield namespace, key, self._remove(node)
        if self.exact_units is None or self.live_units < self.exact_units:
            self.exact_units = self.live_units

    def _is_current(self, time: int, node: Node) -> bool:
        return node.last_use == time and node.parent is not None

    def _remove(self, leaf: Node) -> int:
        """Remove a leaf and the nodes above it with the same time and no other child; returns the first unit
        removed."""
        time, node = leaf.last_use, leaf
        while True:
            parent = node.parent
            assert parent is not None and parent.children is not None
            self._recency.add_units(time, -(len(node.key) // self.unit_bytes))
            self.num_nodes -= 1
            self.key_bytes -= len(node.key)
            forget_marks(node)
            del parent.children[node.name]
            if not parent.children:
                parent.children = None
            node.parent, node.key = None, b""
            if parent is self._root or parent.children is not None or parent.last_use != time:
                return node.start
            node = parent

    def nodes(self) -> Iterator[Node]:
        """Every node but the root, parents first."""
        todo = list((self._root.children or {}).values())
        while todo:
            node = todo.pop()
            if node.children is not None:
                todo.extend(node.children.values())
            yield node


def _whole_path(node: Node) -> tuple[str, bytes]:
    """(namespace, key) of the path from the root through a node."""
    parts, name = [node.key], node.name
    while (above := node.parent) is not None and above.parent is not None:
        node = above
        parts.append(node.key)
        name = node.name
    return name[0], b"".join(reversed(parts))


def _common(data: bytes, offset: int, key: bytes) -> int:
    """Leading bytes that data[offset:] and key share; they differ somewhere, or data ends first."""
    low, high = 0, min(len(key), len(data) - offset)  # key[:low] is shared
    window = 64
    while low < high:
        end = min(low + window, high)
        if data.startswith(key[low:end], offset + low):
            low = end
            window *= 2
        elif end - low == 1:
            return low
        else:
            window = max(1, (end - low) // 2)
            high = end
    return low
