from __future__ import annotations

import numpy as np
import pytest

from baton.radix.eviction import ghosts as module
from baton.radix.eviction.ghosts import Ghosts
from baton.radix.eviction.habit import HEAD_TOKENS
from baton.radix.node import TreeNode
from baton.radix.tree import RadixTree


def hang(tree: RadixTree, parent: TreeNode, ids: np.ndarray) -> TreeNode:
    node = tree.add_leaf(parent, "", ids.astype(np.int32).tobytes(), ids.astype(np.int32), 1)
    tree.remove_leaves([node])
    node.parent = parent  # as while it is being removed
    return node


def test_a_node_is_known_again_by_what_it_follows_and_its_first_tokens() -> None:
    tree, ghosts = RadixTree(1), Ghosts(1_000)
    ids = np.arange(40)
    ghosts.add_ghost(hang(tree, tree.root, ids), 5)
    assert ghosts.take_ghost(hang(tree, tree.root, ids + 1)) is None
    longer = hang(tree, tree.root, np.append(ids[:HEAD_TOKENS], 99))
    found = ghosts.take_ghost(longer)
    assert found is not None and (found.number, found.used, found.tokens) == (5, 1, 40)
    assert ghosts.take_ghost(longer) is None and (len(ghosts), ghosts.tokens) == (0, 0)
    other = tree.add_leaf(tree.root, "", ids[20:].astype(np.int32).tobytes(), ids[20:].astype(np.int32), 1)
    ghosts.add_ghost(hang(tree, other, ids), 5)
    assert ghosts.take_ghost(hang(tree, tree.root, ids)) is None


def test_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, ghosts = RadixTree(1), Ghosts(100)
    for number in range(8):
        ghosts.add_ghost(hang(tree, tree.root, np.arange(25) + 100 * number), number)
    assert [ghost.number for ghost in ghosts.forget_oldest()] == [0, 1, 2, 3] and ghosts.tokens == 100
    ghosts.add_ghost(hang(tree, tree.root, np.arange(25) + 500), 9)  # in place of 5
    assert len(ghosts) == 4 and ghosts.tokens == 100 and not list(ghosts.forget_oldest())
    monkeypatch.setattr(module, "MOST_GHOSTS", 2)
    assert [ghost.number for ghost in ghosts.forget_oldest()] == [4, 6] and ghosts.tokens == 50
    ghosts.clear()
    assert (len(ghosts), ghosts.tokens) == (0, 0)
