"""Item tries: sets of token sequences, the items. For generative recommenders: every output must name an item.

A trie is one sorted array: for each node, the edge (parent, token) that leads to it. Nodes are numbered breadth-first.

    items (1,4) (1,5) (2,4)         root 0 ─1─▶ 1 ─4─▶ 3        node      0     1      2      3      4      5
                                           │     └─5─▶ 4        edge      –   (0,1)  (0,2)  (1,4)  (1,5)  (2,4)
                                           └─2─▶ 2 ─4─▶ 5

So a binary search finds a child, and the children of a node are neighbours. A million items need no Python
objects. No item is the beginning of another, so the leaves (nodes without children) are the whole items.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..outcome import RequestRefused
from .constraint import ITEM, MAX_FORCED, AllowedTokens, walk_draft

MAX_ITEM_TOKENS = 16_384
"""Most tokens of an item. Each takes a pass over all items, so an array of one endless row would take minutes, and
gigabytes."""

_MAX_INT32 = 2**31 - 1

_ROOT_EDGE = -(2**63)
"""The root's entry: below all edges, and not a (parent, token)."""


class ItemTrieError(ValueError):
    """The items cannot form a trie; the message says which and why."""


@dataclass(frozen=True, eq=False)
class ItemTrie:
    """A set of items; never changes. Depths are in tokens.

    edges: int64 [nodes], ascending: parent << 32 | token. Node 0 is the root; no edge leads to it, and edges[0] is
    below all others.
    """

    edges: np.ndarray
    num_items: int
    min_depth: int
    """Tokens of the shortest item."""
    max_depth: int
    max_token: int

    @property
    def is_uniform(self) -> bool:
        """All items are of one length."""
        return self.min_depth == self.max_depth

    @property
    def num_nodes(self) -> int:
        return len(self.edges)

    @property
    def num_bytes(self) -> int:
        return self.edges.nbytes

    @classmethod
    def build(cls, items: np.ndarray) -> ItemTrie:
        """Build a trie of int [items, longest], shorter items padded with -1 at the end. Duplicates count once.

        Raises ItemTrieError for anything that is not such a table, and for an item that is the beginning of another.
        """
        columns = _checked_columns(items)
        order = np.lexsort(columns[::-1])
        columns = columns[:, order]
        # Sorted, the items below one node are neighbours, so a node of depth d + 1 begins at each row that differs from
        # the row before in one of its first d + 1 tokens. Nodes found in this order are in breadth-first order.
        is_new = np.zeros(len(order), dtype=bool)
        is_new[0] = True
        node = np.zeros(len(order), dtype=np.int64)  # the node that each row has reached
        edges = [np.array([_ROOT_EDGE])]
        num_nodes = 1
        for depth, column in enumerate(columns):
            _refuse_beginnings(depth, is_new, column, order)
            is_new[1:] |= column[1:] != column[:-1]
            begins_node = is_new & (column >= 0)
            edges.append(_edges(node[begins_node], column[begins_node]))
            node = num_nodes - 1 + np.cumsum(begins_node)
            num_nodes += len(edges[-1])
        lengths = (columns >= 0).sum(axis=0)
        return cls(
            edges=np.concatenate(edges),
            num_items=int(is_new.sum()),
            min_depth=int(lengths.min()),
            max_depth=int(lengths.max()),
            max_token=int(columns.max()),
        )

    def num_children(self, nodes: np.ndarray) -> np.ndarray:
        """int32 [n] of nodes -> int32 [n]"""
        first, end = self._child_ranges(nodes)
        return (end - first).astype(np.int32)

    def is_leaf(self, nodes: np.ndarray) -> np.ndarray:
        """bool [n]: the node is a whole item."""
        first = self.edges.searchsorted(_edges(nodes, 0))
        return self.edges.take(first, mode="clip") >> 32 != nodes

    def children(self, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(index into ``nodes``, token), int32 [m] each: every child of every node; tokens ascend in each."""
        first, end = self._child_ranges(nodes)
        index = np.repeat(np.arange(len(nodes), dtype=np.int32), end - first)
        # Slices, not one gather: they are copied at the speed of memory.
        slices = [self.edges[start:stop] for start, stop in zip(first.tolist(), end.tolist(), strict=True)]
        # The unsafe cast keeps the low half of each edge, the token.
        return index, np.concatenate([self.edges[:0], *slices], dtype=np.int32, casting="unsafe")

    def advance(self, nodes: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """int32 [n]: the child of each node for one token; there must be one."""
        wanted = _edges(nodes, tokens)
        child = self.edges.searchsorted(wanted)
        assert (self.edges.take(child, mode="clip") == wanted).all(), "no such child in the trie"
        return child.astype(np.int32)

    def _child_ranges(self, nodes: np.ndarray) -> np.ndarray:
        """int64 [2, n]: the first child of each node, and the end (exclusive): children have consecutive numbers."""
        parents = np.stack([nodes, nodes + 1])
        return np.searchsorted(self.edges, _edges(parents, 0))


def _edges(parents: np.ndarray, tokens: np.ndarray | int) -> np.ndarray:
    """int64: (parent, token) as one number; they sort by parent, then token."""
    return parents.astype(np.int64) << 32 | tokens


def _checked_columns(items: np.ndarray) -> np.ndarray:
    """The items transposed, int32 [longest, items], contiguous. Raises ItemTrieError."""
    if items.ndim != 2:
        raise ItemTrieError(f"item tries are made of a table [items, tokens], not of {items.ndim} dimensions")
    if items.dtype.kind not in "iu":
        raise ItemTrieError(f"item tries are made of integers, not of {items.dtype}; save the token ids as int32")
    if items.size == 0:
        raise ItemTrieError(f"there are no items: the shape is {items.shape}")
    if items.size > _MAX_INT32:
        raise ItemTrieError(f"{items.size} tokens are too many for one item trie; the most is {_MAX_INT32}")
    if (largest := int(items.max())) > _MAX_INT32:
        raise ItemTrieError(f"{largest} is no token id: it does not fit into 32 bits")
    if int(items.min()) < -1:
        row, position = np.argwhere(items < -1)[0]
        raise ItemTrieError(
            f"item {row} has the token {items[row, position]}; token ids are 0 or more, and -1 fills up short items"
        )
    in_use = np.flatnonzero((items >= 0).any(axis=0))
    longest = int(in_use[-1]) + 1 if in_use.size else 1
    if longest > MAX_ITEM_TOKENS:
        raise ItemTrieError(f"an item has {longest} tokens; items have at most {MAX_ITEM_TOKENS}")
    columns = np.ascontiguousarray(items[:, :longest].T, dtype=np.int32)
    is_padding = columns < 0
    if is_padding[0].any():
        row = int(is_padding[0].argmax())
        if (columns[:, row] >= 0).any():
            raise ItemTrieError(f"item {row} begins with -1; only its end may be filled up")
        raise ItemTrieError(f"item {row} has no tokens; leave it out")
    gaps = is_padding[:-1] & ~is_padding[1:]
    if gaps.any():
        row = int(gaps.any(axis=0).argmax())
        raise ItemTrieError(
            f"item {row} has -1 between its tokens: {columns[:, row].tolist()}; only its end may be filled up"
        )
    return columns


def _refuse_beginnings(depth: int, is_new: np.ndarray, column: np.ndarray, order: np.ndarray) -> None:
    """Raise ItemTrieError if an item ends at this depth and others continue it: it sorts right before those.

    is_new: bool [items], the row differs from the one before in its first ``depth`` tokens; column: the next tokens.
    """
    begins = (column[:-1] < 0) & (column[1:] >= 0) & ~is_new[1:]
    if begins.any():
        at = int(begins.argmax())
        short, long = int(order[at]), int(order[at + 1])
        raise ItemTrieError(
            f"item {short} ({depth} tokens) is the beginning of item {long}; leave one of them out, or end both with a "
            "token of their own"
        )


class ItemConstraint:
    """A `Constraint`; see there for the attributes."""

    matched = ITEM
    eos_ends = False
    must_complete = True
    is_ready = True

    def __init__(self, trie: ItemTrie, name: str) -> None:
        """name: the trie's name, as clients use it."""
        self.trie = trie
        self.name = f"the item trie {name!r}"
        self.output_name = f"item of {name!r}"
        self.is_uniform = trie.is_uniform
        self.min_tokens = trie.min_depth
        self.max_tokens: int | None = trie.max_depth

    def failure(self) -> None:
        return None

    def start(self) -> ItemStates:
        return ItemStates(self.trie, np.zeros(1, dtype=np.int32))


@dataclass(slots=True, frozen=True)
class ItemStates:
    """A `ConstraintState`: the node that each sequence is at."""

    trie: ItemTrie
    nodes: np.ndarray
    """int32 [n]"""

    def __len__(self) -> int:
        return len(self.nodes)

    def allowed(self) -> AllowedTokens:
        return AllowedTokens.pack(*self.trie.children(self.nodes))

    def num_allowed(self) -> np.ndarray:
        return self.trie.num_children(self.nodes)

    def select(self, sequences: np.ndarray) -> ItemStates:
        return ItemStates(self.trie, self.nodes[sequences])

    def advance(self, tokens: np.ndarray) -> ItemStates:
        return ItemStates(self.trie, self.trie.advance(self.nodes, tokens))

    def at_end(self) -> np.ndarray:
        return self.trie.is_leaf(self.nodes)

    def forced(self) -> np.ndarray:
        found, nodes = [], self.nodes
        while len(found) < MAX_FORCED and self.trie.num_children(nodes)[0] == 1:
            token = self.trie.children(nodes)[1]
            found.append(token)
            nodes = self.trie.advance(nodes, token)
        return np.concatenate(found) if found else np.empty(0, dtype=np.int32)

    def count_allowed(self, draft: np.ndarray) -> int:
        nodes = self.nodes
        for place, token in enumerate(draft.reshape(-1, 1)):
            if token not in self.trie.children(nodes)[1]:
                return place
            nodes = self.trie.advance(nodes, token)
        return len(draft)

    @classmethod
    def allowed_next(cls, states: Sequence[Any]) -> AllowedTokens:
        parts = []
        for trie in {id(state.trie): state.trie for state in states}.values():
            rows = np.flatnonzero([state.trie is trie for state in states]).astype(np.int32)
            every = ItemStates(trie, np.concatenate([states[row].nodes for row in rows.tolist()]))
            parts.append(every.allowed().renumber(lambda own, rows=rows: rows[own]))
        merged = AllowedTokens.merge(parts)
        assert merged is not None
        return merged

    @classmethod
    def allowed_along(cls, states: Sequence[Any], drafts: Sequence[np.ndarray]) -> list[AllowedTokens | RequestRefused]:
        return [walk_draft(state, draft) for state, draft in zip(states, drafts, strict=True)]
