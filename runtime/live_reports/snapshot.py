"""Snapshots of the tree in the HTTP process: the rows of a walk, and derived columns, in arrays."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from secrets import token_hex

import numpy as np

from ...radix.snapshot import HEAD_TOKENS, HIDDEN, MANY, NO_ROW, ROW
from ...radix.tick_times import TickTimes
from ..messages import TreeRows, WalkEnd

HIDDEN_NAME, MANY_NAME = "(hidden)", "(others)"
"""Names in place of a namespace: for nodes that no match finds any more, and for namespaces that a walk did not tell
apart. No namespace has such a name, as they are digests."""


@dataclass(eq=False)
class Snapshot:
    """The nodes of one walk. Derived columns are computed at first use, some 10 ms for 100,000 nodes."""

    id: str
    rows: np.ndarray
    """`ROW` [nodes], in preorder: a node's descendants follow it."""
    heads: np.ndarray
    """int32: the first ids of each node; empty unless requested."""
    names: list[str]
    """Names of namespaces, by number."""
    end: WalkEnd

    @property
    def num_tokens(self) -> int:
        return int(self.rows["tokens"].sum())

    @cached_property
    def ends(self) -> np.ndarray:
        """int64 [nodes]: the row after the last one below each node."""
        parents, count = self.rows["parent"].astype(np.int64), len(self.rows)
        order = np.argsort(parents, kind="stable")
        next_sibling = np.full(count, -1, dtype=np.int64)
        together = parents[order[1:]] == parents[order[:-1]]
        next_sibling[order[:-1][together]] = order[1:][together]
        # A last child's subtree ends where its parent's does: follow parents, two, four, … at a time.
        to = np.where((next_sibling >= 0) | (parents < 0), np.arange(count), parents)
        while not np.array_equal(further := to[to], to):
            to = further
        following = next_sibling[to]
        return np.where(following >= 0, following, count)

    @cached_property
    def subtree_tokens(self) -> np.ndarray:
        """int64 [nodes]: tokens in each node and below."""
        return self._sums(self.rows["tokens"])

    @cached_property
    def uses(self) -> np.ndarray:
        """int64 [nodes]: sequences that began with each node; sequences of a child count for its parent too."""
        return self._sums(self.rows["uses"])

    def _sums(self, values: np.ndarray) -> np.ndarray:
        totals = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
        return totals[self.ends] - totals[:-1]

    @cached_property
    def idle(self) -> np.ndarray:
        """float64 [nodes]: seconds from the last access to each node, or to one below it, until the walk ended."""
        used, parents = self.rows["used"].copy(), self.rows["parent"].astype(np.int64)
        above, rows = parents, np.arange(len(used))
        while (below := np.flatnonzero(above >= 0)).size:  # the parent, its grandparent, four above, …
            np.maximum.at(used, above[below], used[rows[below]])
            further = np.full(len(above), NO_ROW, dtype=np.int64)
            further[below] = above[above[below]]
            above = further
        if not self.end.ticks:
            return np.zeros(len(used))
        times = TickTimes.unpacked(self.end.ticks, self.end.seconds)
        return np.maximum(0.0, self.end.ended_at - times.seconds_at(used))

    @cached_property
    def _head_ends(self) -> np.ndarray:
        return np.cumsum(np.minimum(self.rows["tokens"], HEAD_TOKENS), dtype=np.int64)

    def head(self, row: int) -> np.ndarray:
        """int32: the first token ids of a node; empty unless requested."""
        if not len(self.heads):
            return self.heads
        end = self._head_ends[row]
        return self.heads[end - min(HEAD_TOKENS, self.rows["tokens"][row]) : end]

    def namespace(self, number: int) -> str:
        """The name of a row's namespace."""
        if number == HIDDEN:
            return HIDDEN_NAME
        return MANY_NAME if number == MANY else self.names[number]


class SnapshotBuilder:
    """Assembles a snapshot from the messages of a walk."""

    def __init__(self) -> None:
        self._rows: list[bytes] = []
        self._heads: list[bytes] = []
        self._names: list[str] = []

    def add_rows(self, message: TreeRows) -> Snapshot | None:
        """Add the next rows; returns the snapshot with the last rows of a walk."""
        if message.is_first:
            self.__init__()
        self._rows.append(message.rows)
        self._heads.append(message.heads)
        self._names += message.names
        if message.end is None:
            return None
        rows = np.frombuffer(b"".join(self._rows), dtype=ROW)
        heads = np.frombuffer(b"".join(self._heads), dtype=np.int32)
        snapshot = Snapshot(token_hex(8), rows, heads, self._names, message.end)
        self.__init__()
        return snapshot
