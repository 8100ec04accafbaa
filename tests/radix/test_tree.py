"""Structure only: match, split, add, remove."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.radix.node import TreeNode
from baton.radix.tree import RadixTree, common_prefix


def ids(*values: int) -> bytes:
    return np.array(values, dtype=np.int32).tobytes()


def add(tree: RadixTree, parent: TreeNode, key: bytes, namespace: str = "") -> TreeNode:
    """A leaf whose slots are its token ids + 1000, so that they are easy to follow."""
    return tree.add_leaf(parent, namespace, key, np.frombuffer(key, dtype=np.int32) + 1000, 0)


def path(tree: RadixTree, node: TreeNode) -> list[int]:
    return [int(x) for value in tree.path_values(node, tree.root) for x in value]


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200, 5000])
def test_common_prefix_finds_first_difference_at_any_position(length: int) -> None:
    data = np.arange(length + 10, dtype=np.int32)
    for at in {0, 1, 62, 63, 64, 65, 191, 192, length // 2, length - 1}:
        if at >= length:
            continue
        key = data[:length].copy()
        key[at] += 1 << 24  # differs in its last byte only
        assert common_prefix(data.tobytes(), 0, key.tobytes()) == 4 * at
        assert common_prefix(ids(7, 7) + data.tobytes(), 8, key.tobytes()) == 4 * at


def test_common_prefix_stops_at_the_shorter_side() -> None:
    assert common_prefix(ids(1, 2, 3), 0, ids(1, 2)) == 8
    assert common_prefix(ids(1, 2), 0, ids(1, 2, 3)) == 8
    assert common_prefix(ids(1, 2), 8, ids(1)) == 0
    assert common_prefix(b"", 0, b"") == 0


def test_match_follows_whole_nodes_until_no_child_matches() -> None:
    tree = RadixTree(1)
    a = add(tree, tree.root, ids(1, 2))
    b = add(tree, a, ids(3, 4, 5))
    assert tree.match(tree.root, "", ids(1, 2, 3, 4, 5, 6)) is b
    assert tree.match(tree.root, "", ids(1, 2, 9)) is a
    assert tree.match(tree.root, "", ids(9)) is tree.root
    assert tree.match(tree.root, "", b"") is tree.root
    assert tree.match(a, "", ids(3, 4, 5)) is b  # from a node on
    assert tree.total_nodes == 2
    assert b.prefix_len == 5


def test_handles_stay_valid_when_match_splits() -> None:
    tree = RadixTree(1)
    leaf = add(tree, tree.root, ids(1, 2, 3, 4))
    below = add(tree, leaf, ids(5))
    upper = tree.match(tree.root, "", ids(1, 2, 3, 9))
    assert path(tree, upper) == [1001, 1002, 1003]
    assert path(tree, leaf) == [1001, 1002, 1003, 1004]
    assert path(tree, below) == [1001, 1002, 1003, 1004, 1005]
    assert leaf.parent is upper
    assert (upper.prefix_len, leaf.prefix_len, below.prefix_len) == (3, 4, 5)
    assert tree.total_nodes == 3


def test_find_match_splits_no_node() -> None:
    tree = RadixTree(2)
    leaf = add(tree, tree.root, ids(1, 2, 3, 4))
    node, whole, partial, common = tree.find_match(tree.root, "", ids(1, 2, 3, 9))
    assert (node, whole, partial, common) == (tree.root, 0, leaf, 8)
    assert tree.find_match(tree.root, "", ids(1, 2, 3, 4, 5, 6)) == (leaf, 16, None, 0)
    assert tree.total_nodes == 1


def test_cut_path_at_any_length() -> None:
    for length in range(8):
        tree = RadixTree(1)
        node = tree.root
        for first in (0, 2, 5):
            node = add(tree, node, ids(*range(first, {0: 2, 2: 5, 5: 7}[first])))
        found = tree.cut_path(node, length)
        assert path(tree, found) == list(range(1000, 1000 + length)) and found.prefix_len == length
        assert path(tree, node) == list(range(1000, 1007))
        assert tree.total_nodes == (3 if length in (0, 2, 5, 7) else 4)


@pytest.mark.parametrize("count", [1, 4, 5])
def test_node_repr_shows_first_four_tokens(count: int) -> None:
    node = add(RadixTree(1), RadixTree(1).root, ids(*range(count)))
    head = {1: "[0]", 4: "[0 1 2 3]", 5: "[0 1 2 3 …]"}[count]
    assert repr(node) == f"node #1 {head} tokens={count} lock_ref=0 children=0 last_access=0"


@pytest.mark.parametrize("page", [2, 4, 16])
def test_splits_fall_on_page_boundaries(page: int) -> None:
    tree = RadixTree(page)
    key = np.arange(4 * page, dtype=np.int32)
    add(tree, tree.root, key.tobytes())
    for differs_at in range(4 * page):
        query = key.copy()
        query[differs_at] = -1
        whole = differs_at - differs_at % page
        assert tree.match(tree.root, "", query.tobytes()).prefix_len == whole
    assert tree.total_nodes == 4
    assert {len(node) for node in tree.nodes()} == {page}


@pytest.mark.parametrize("page", [2, 16])
def test_less_than_a_page_matches_nothing(page: int) -> None:
    tree = RadixTree(page)
    key = np.arange(2 * page, dtype=np.int32)
    add(tree, tree.root, key.tobytes())
    assert tree.match(tree.root, "", key[: page - 1].tobytes()) is tree.root
    assert tree.match(tree.root, "", key[: 2 * page - 1].tobytes()).prefix_len == page


def test_namespaces_have_separate_paths() -> None:
    tree = RadixTree(1)
    a = add(tree, tree.root, ids(1, 2), "a")
    b = add(tree, tree.root, ids(1, 2), "b")
    assert tree.match(tree.root, "a", ids(1, 2)) is a
    assert tree.match(tree.root, "b", ids(1, 2)) is b
    assert tree.match(tree.root, "", ids(1, 2)) is tree.root
    upper = tree.match(tree.root, "a", ids(1, 7))
    assert tree.match(tree.root, "a", ids(1)) is upper
    assert tree.match(tree.root, "b", ids(1, 2)) is b  # the split next door changed nothing


@pytest.mark.parametrize("locks", [0, 1, 5])
def test_split_gives_upper_part_one_lock_if_lower_is_locked(locks: int) -> None:
    tree = RadixTree(1)
    leaf = add(tree, tree.root, ids(1, 2, 3))
    leaf.lock_ref = locks
    upper = tree.split(leaf, 1)
    assert leaf.lock_ref == locks
    assert upper.lock_ref == (1 if locks else 0)


def test_split_into_an_empty_part_is_refused() -> None:
    tree = RadixTree(1)
    leaf = add(tree, tree.root, ids(1, 2, 3))
    for node, count in ((leaf, 0), (leaf, 3), (tree.root, 0)):
        with pytest.raises(AssertionError):
            tree.split(node, count)
    assert tree.total_nodes == 1


def test_split_parts_own_their_memory() -> None:
    tree = RadixTree(1)
    leaf = add(tree, tree.root, ids(*range(1000)))
    upper = tree.split(leaf, 1)
    assert upper.value.base is None
    assert leaf.value.base is None


def test_removed_leaf_is_detached_and_off_device() -> None:
    tree = RadixTree(1)
    a = add(tree, tree.root, ids(1, 2))
    b = add(tree, a, ids(3))
    for node in (a, tree.root):
        with pytest.raises(AssertionError):
            tree.remove_leaves([node])
    tree.remove_leaves([b])
    assert b.parent is None and not b.on_device and a.device_children == 0
    assert tree.total_nodes == 1
    assert tree.match(tree.root, "", ids(1, 2, 3)) is a


def test_a_chain_of_100_000_nodes_needs_no_recursion() -> None:
    tree = RadixTree(1)
    node = tree.root
    for i in range(100_000):
        node = add(tree, node, ids(i))
    data = np.arange(100_000, dtype=np.int32).tobytes()
    assert tree.match(tree.root, "", data) is node
    assert sum(1 for _ in tree.nodes()) == 100_000
    assert len(path(tree, node)) == 100_000


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("seed", range(10))
def test_random_matches_equal_set_of_prefixes(seed: int, page: int) -> None:
    rng = random.Random(seed)
    tree = RadixTree(page)
    known: set[tuple[str, tuple[int, ...]]] = set()
    for _ in range(150):
        namespace = rng.choice(["", "x"])
        length = page * rng.randrange(6) + rng.randrange(page)
        tokens = tuple(rng.randrange(2) for _ in range(length))
        expected = max(n for n in range(0, length + 1, page) if n == 0 or (namespace, tokens[:n]) in known)
        node = tree.match(tree.root, namespace, ids(*tokens))
        assert node.prefix_len == expected, f"seed {seed}"
        assert path(tree, node) == [1000 + t for t in tokens[:expected]], f"seed {seed}"
        whole = length - length % page
        if whole > expected:
            add(tree, node, ids(*tokens[expected:whole]), namespace)
            known |= {(namespace, tokens[:n]) for n in range(page, whole + 1, page)}
