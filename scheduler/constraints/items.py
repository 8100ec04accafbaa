"""An item trie as a constraint: every output is one of its items."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .constraint import AllowedTokens
from .item_trie import ItemTrie

ITEM = "item"
"""`FinishReason.matched` of a sequence that ended because it is a whole item."""


class ItemConstraint:
    """A `Constraint`; see there for the attributes."""

    matched = ITEM
    eos_ends = False
    must_complete = True

    def __init__(self, trie: ItemTrie, name: str) -> None:
        """name: the trie's name, as clients use it."""
        self.trie = trie
        self.name = f"the item trie {name!r}"
        self.output_name = f"item of {name!r}"
        self.is_uniform = trie.is_uniform
        self.min_tokens = trie.min_depth
        self.max_tokens: int | None = trie.max_depth

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
