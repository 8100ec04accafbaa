"""Item tries: which token sequences are items. For generative recommenders, whose every output must name one.

A trie is two flat arrays in breadth-first order (compressed sparse rows): a million items are no Python objects.

    items (1,4) (1,5) (2,4)         root 0 ─1─▶ 1 ─4─▶ 3        node           0  1  2  3  4  5
                                           │     └─5─▶ 4        tokens         -  1  2  4  5  4    on the way to it
                                           └─2─▶ 2 ─4─▶ 5       first_child    1  3  5  6  6  6  6

The children of node i are the nodes first_child[i] to first_child[i + 1], their tokens ascending. No item begins
another: a node without children, a leaf, is a whole item.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np


class ItemTrieError(ValueError):
    """The items make no trie; the text says which and why."""


@dataclass(frozen=True, eq=False)
class ItemTrie:
    """A set of items. ``tokens``: int32 [nodes]; ``first_child``: int32 [nodes + 1]; node 0 is the root."""

    tokens: np.ndarray
    first_child: np.ndarray
    num_items: int
    min_depth: int
    """Tokens of the shortest item."""
    max_depth: int

    @property
    def is_uniform(self) -> bool:
        """All items are of one length."""
        return self.min_depth == self.max_depth

    @cached_property
    def max_token(self) -> int:
        return int(self.tokens.max())

    @property
    def num_bytes(self) -> int:
        return self.tokens.nbytes + self.first_child.nbytes

    @classmethod
    def build(cls, items: np.ndarray) -> ItemTrie:
        """From token sequences, int [items, longest], the shorter ones padded with -1 at the end. Doubles count once.

        Raises ItemTrieError for anything that is no such table, and for an item that begins another.
        """
        raise NotImplementedError

    def num_children(self, nodes: np.ndarray) -> np.ndarray:
        """int32 [n] of nodes -> int32 [n]"""
        return self.first_child[nodes + 1] - self.first_child[nodes]

    def is_leaf(self, nodes: np.ndarray) -> np.ndarray:
        """bool [n]: the node is a whole item."""
        return self.num_children(nodes) == 0

    def children(self, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(index into ``nodes``, token), int32 [m] each: every way to go on from every node."""
        counts = self.num_children(nodes)
        index = np.repeat(np.arange(len(nodes), dtype=np.int32), counts)
        starts = np.repeat(self.first_child[nodes] - (np.cumsum(counts) - counts), counts)
        return index, self.tokens[starts + np.arange(len(index))]

    def advance(self, nodes: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """int32 [n]: from each node along one token, which must be one of its children's."""
        raise NotImplementedError
