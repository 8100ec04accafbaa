"""Reads the contents of the tree while it changes: a walk in slices, for pages and logs.

    slice ── the tree changes ── slice ── the tree changes ── slice ──▶ one row for each node that was visited

Each row is true of the moment at which its node was visited; no row names a live node. A node is visited once at most,
parents before children, and what is below a node comes right after it (preorder). Between two slices nodes may be
evicted (those are passed over, with what is left of them if only their end had to go), split (the new upper part is
visited on the way to the lower one) or added (seen if their parent has not been visited yet). Where the whole tree is
replaced, the walk is over.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag
from itertools import islice
from struct import Struct

import numpy as np

from .cache import RadixCache
from .node import ID_BYTES, TreeNode

MAX_NODES = 250_000
"""A walk visits no more: a tree that grows faster than it is walked must not keep it going for ever."""

MAX_NAMES = 10_000
"""Namespaces that one walk tells apart; nodes of further ones get `MANY`."""

HEAD_TOKENS = 16
"""Ids per node that a walk with heads reports."""

NO_ROW, MANY, HIDDEN = -1, -2, -3
"""Parent of a node right below the root. Namespaces: of more than `MAX_NAMES`; of such a node that no match finds."""


class Has(IntFlag):
    """Bits of a row's ``has``."""

    DEVICE = 1
    """Its KV is on the device."""
    HOST = 2
    """It has a copy on the host."""
    LOCK = 4
    LEASE = 8
    LOADING = 16
    STORING = 32
    RETIRED = 64
    """It is to be evicted before all else."""
    STATE = 128
    """It carries a recurrent state, so that a model with such layers can continue there."""


ROW = np.dtype(
    [
        ("serial", "<i8"),
        ("used", "<i8"),  # tick of the last access that ended here
        ("uses", "<i8"),  # sequences that began with it, or with children that have gone
        ("parent", "<i4"),  # row of its parent in the same walk; NO_ROW
        ("start", "<i4"),  # position of its first token
        ("tokens", "<i4"),
        ("locks", "<i4"),  # direct locks + locked children
        ("leases", "<i4"),  # leases that end here + leased children
        ("namespace", "<i4"),  # number of its name; MANY, HIDDEN
        ("has", "<i4"),
    ]
)
"""One visited node, packed."""

_pack = Struct("<qqqiiiiiii").pack


@dataclass(slots=True)
class Rows:
    """The nodes visited since the last call of `TreeWalk.take_rows`."""

    rows: bytes
    """Packed `ROW` records."""
    heads: bytes
    """int32: the first ids of each row, HEAD_TOKENS or all that it has; empty for a walk without heads."""
    names: list[str]
    """New namespaces, in the order of their numbers."""


class TreeWalk:
    """One walk over the tree of a cache. It holds nodes that it has yet to visit, of which some may have left."""

    def __init__(self, cache: RadixCache, *, with_heads: bool = False, max_nodes: int = MAX_NODES) -> None:
        """with_heads: report the first ids of each node."""
        self._cache = cache
        self._tree = cache.tree
        self._with_heads = with_heads
        self._most = max_nodes
        self._steps_left = 4 * max_nodes  # nodes that have gone count too: the end is certain
        self._rows, self._heads = bytearray(), bytearray()
        self._numbers: dict[str, int] = {}
        self._names: list[str] = []
        self.nodes = 0
        """Nodes visited."""
        self.complete = True
        """False once something was left out: the limit was reached, or the tree was replaced."""
        self._open: list[tuple[TreeNode, int, int, list[TreeNode]]] = []
        """From the root down to where the walk is: a visited node, its row and namespace, and what was below it then
        and is to be visited, the last first; never empty."""
        self._has_begun = False

    def _open_below(self, node: TreeNode, row: int, namespace: int) -> None:
        if node.children:
            # A copy, as the dict may change: about 10 ns a child, in one go.
            below = list(islice(node.children.values(), self._most - self.nodes + 1))
            self._open.append((node, row, namespace, below))

    def visit_nodes(self, steps: int) -> bool:
        """Visit, or pass over, at most so many nodes; True when the walk is over."""
        open_ = self._open
        if not self._has_begun:
            self._has_begun = True
            self._open_below(self._tree.root, NO_ROW, NO_ROW)
        self._steps_left -= steps
        if open_ and (self._cache.tree is not self._tree or self._steps_left <= 0):
            self._cut()
        for _ in range(steps):
            if not open_:
                return True
            above, row, namespace, below = open_[-1]
            node: TreeNode | None = below.pop()
            if not below:
                open_.pop()
            while node is not None and node.parent is not above:
                node = node.parent  # it was split: the upper part comes first; or it has left the tree
            if node is None:
                continue
            if self.nodes == self._most:
                self._cut()
                return True
            self._visit(node, above, row, namespace)
        return not open_

    def _cut(self) -> None:
        self.complete = False
        self._open.clear()

    def _visit(self, node: TreeNode, above: TreeNode, parent_row: int, namespace: int) -> None:
        """above: its parent."""
        # Most of what this takes is memory that is not in the processor's cache: look at nothing twice, or in vain.
        start, accessed, used = above.prefix_len, node.last_access, node.used
        locks, leases = node.lock_ref, node.lease_ref
        if parent_row == NO_ROW:
            namespace = self._namespace(node)
        self._rows += _pack(
            node.serial,
            accessed if accessed > used else used,  # the former is 0 for what is retired
            node.uses,
            parent_row,
            start,
            node.prefix_len - start,
            locks,
            leases,
            namespace,
            node.on_device
            | (node.host is not None) << 1
            | (locks > 0) << 2
            | (leases > 0) << 3
            | (node.loading > 0) << 4
            | (node.storing > 0) << 5
            | (accessed == 0) << 6
            | (node.state > 0) << 7,
        )
        if self._with_heads:
            self._heads += node.key[: HEAD_TOKENS * ID_BYTES]
        self.nodes += 1
        self._open_below(node, self.nodes - 1, namespace)

    def _namespace(self, node: TreeNode) -> int:
        if self._tree.is_hidden(node):
            return HIDDEN
        assert isinstance(node.child_key, tuple)
        name = node.child_key[0]
        number = self._numbers.get(name)
        if number is None:
            if len(self._numbers) == MAX_NAMES:
                return MANY
            number = self._numbers[name] = len(self._numbers)
            self._names.append(name)
        return number

    def take_rows(self) -> Rows:
        """The rows since the last call."""
        taken = Rows(bytes(self._rows), bytes(self._heads), self._names)
        self._rows, self._heads, self._names = bytearray(), bytearray(), []
        return taken
