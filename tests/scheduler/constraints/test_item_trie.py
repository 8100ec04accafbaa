"""Tries are what nested dicts would be, and every table that is none is named with its fix."""

from __future__ import annotations

import random
import re
from collections import deque
from typing import Literal

import numpy as np
import pytest

from baton.scheduler.constraints.constraint import AllowedTokens, join_allowed, walk_draft
from baton.scheduler.constraints.item_trie import MAX_ITEM_TOKENS, ItemStates, ItemTrie, ItemTrieError

Nested = dict[int, "Nested"]
"""A trie as nested dicts, the slow twin: token -> what may follow."""


def nested_of(items: list[list[int]]) -> Nested:
    root: Nested = {}
    for item in items:
        node = root
        for token in item:
            node = node.setdefault(token, {})
    return root


def table(items: list[list[int]], extra: int = 0) -> np.ndarray:
    """Padded with -1, and with ``extra`` columns that hold nothing."""
    rows = np.full((len(items), max(map(len, items)) + extra), -1)
    for row, item in zip(rows, items, strict=True):
        row[: len(item)] = item
    return rows


def nodes(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def same(got: np.ndarray, wanted: list[int]) -> bool:
    return got.dtype == np.int32 and got.tolist() == wanted


def without_beginnings(items: list[list[int]]) -> list[list[int]]:
    return [item for item in items if not any(item != other and other[: len(item)] == item for other in items)]


def random_items(rng: random.Random) -> list[list[int]]:
    """Few or many, of one length or several, over a small vocabulary: doubles and common beginnings abound."""
    shortest, longest = sorted(rng.choices(range(1, 6), k=2))
    vocabulary = rng.choice([1, 2, 3, 7, 30])
    lengths = [rng.randint(shortest, longest) for _ in range(rng.choice([1, 2, 5, 40, 200]))]
    return [rng.choices(range(vocabulary), k=length) for length in lengths]


SEEDS = range(100)


@pytest.mark.parametrize("seed", SEEDS)
def test_item_trie_equals_nested_dicts(seed: int) -> None:
    rng = random.Random(seed)
    items = without_beginnings(random_items(rng))
    trie = ItemTrie.build(table(items, extra=rng.randint(0, 2)))
    order: deque[tuple[int, Nested]] = deque([(0, nested_of(items))])
    number = 1
    while order:
        node, wanted = order.popleft()
        index, tokens = trie.children(nodes(node))
        assert same(tokens, sorted(wanted)) and same(index, [0] * len(wanted))
        assert same(trie.num_children(nodes(node)), [len(wanted)])
        assert trie.is_leaf(nodes(node)).tolist() == [not wanted]
        children = trie.advance(np.full(len(tokens), node, dtype=np.int32), tokens)
        assert same(children, list(range(number, number + len(wanted)))), "breadth first"
        number += len(wanted)
        order.extend((child, wanted[token]) for child, token in zip(children.tolist(), tokens.tolist(), strict=True))
    assert number == trie.num_nodes == len(trie.edges)
    assert trie.num_items == len({tuple(item) for item in items})
    assert (trie.min_depth, trie.max_depth) == (min(map(len, items)), max(map(len, items)))
    assert trie.is_uniform == (trie.min_depth == trie.max_depth)
    assert trie.max_token == max(max(item) for item in items)


@pytest.mark.parametrize("seed", SEEDS)
def test_item_that_is_prefix_of_another_is_refused(seed: int) -> None:
    items = random_items(random.Random(seed))
    if without_beginnings(items) == items:
        ItemTrie.build(table(items))
        return
    with pytest.raises(ItemTrieError, match="is the beginning of") as error:
        ItemTrie.build(table(items))
    short, long = map(int, re.findall(r"item (\d+)", str(error.value)))
    assert items[short] != items[long] and items[long][: len(items[short])] == items[short]


@pytest.mark.parametrize("seed", SEEDS)
def test_trie_queries_of_many_nodes_equal_single_queries(seed: int) -> None:
    """Like one after the other, for any nodes in any order, several times too."""
    rng = random.Random(seed)
    trie = ItemTrie.build(table(without_beginnings(random_items(rng))))
    asked = np.array(rng.choices(range(trie.num_nodes), k=rng.randint(0, 12)), dtype=np.int32)
    index, tokens = trie.children(asked)
    apart = [(i, token) for i, node in enumerate(asked) for token in trie.children(nodes(node))[1].tolist()]
    assert same(index, [i for i, _ in apart]) and same(tokens, [token for _, token in apart])
    reached = [int(trie.advance(nodes(asked[i]), nodes(token))[0]) for i, token in apart]
    assert same(trie.advance(asked[index], tokens), reached)
    assert (trie.edges[reached] & 0xFFFFFFFF).tolist() == tokens.tolist()


def test_advance_finds_any_of_many_children() -> None:
    """Also where a neighbour without children, or the end of the trie, comes next."""
    rng = np.random.default_rng(1)
    for count in (1, 2, 3, 127, 128, 129, 8192):
        tokens = np.sort(rng.choice(100_000, count, replace=False))
        trie = ItemTrie.build(np.concatenate([np.stack([np.full(count, head), tokens], axis=1) for head in (3, 7)]))
        for head in (1, 2):
            reached = trie.advance(np.full(count, head), tokens)
            assert reached.tolist() == list(range(3 + count * (head - 1), 3 + count * head)), "two nodes before them"
            assert (trie.edges[reached] & 0xFFFFFFFF == tokens).all()


@pytest.mark.parametrize(("node", "token"), [(0, 2), (0, 0), (0, -1), (0, 9), (1, 9), (1, -1), (2, 4)])
def test_advance_to_missing_child_is_an_assertion_error(node: int, token: int) -> None:
    trie = ItemTrie.build(np.array([[1, 4], [3, 5]]))  # nodes: 1 and 2, then the leaves
    with pytest.raises(AssertionError, match="no such child"):
        trie.advance(nodes(node), nodes(token))


def test_advance_from_leaf_is_an_assertion_error() -> None:
    trie = ItemTrie.build(np.array([[1], [2]]))
    with pytest.raises(AssertionError, match="no such child"):
        trie.advance(nodes(2), nodes(2))


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int64, np.uint64, ">i4"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_trie_accepts_any_integer_dtype_and_order(dtype: str, order: Literal["C", "F"]) -> None:
    wanted = ItemTrie.build(np.array([[1, 4], [1, 5], [2, 4]], dtype=np.int32))
    got = ItemTrie.build(np.array([[2, 4], [1, 5], [1, 4], [1, 5]], dtype=dtype, order=order))
    assert got.edges.dtype == np.int64 and got.edges.tolist() == wanted.edges.tolist()
    assert (got.num_items, got.max_token) == (3, 5)


@pytest.mark.parametrize(
    ("items", "message"),
    [
        (np.zeros(3, dtype=int), r"not of 1 dimensions"),
        (np.zeros((1, 1, 1), dtype=int), r"not of 3 dimensions"),
        (np.zeros((2, 2)), r"not of float64"),
        (np.zeros((2, 2), dtype=bool), r"not of bool"),
        (np.array([["a"]]), r"not of <U1"),
        (np.zeros((0, 3), dtype=int), r"no items: the shape is \(0, 3\)"),
        (np.zeros((3, 0), dtype=int), r"no items: the shape is \(3, 0\)"),
        (table([[1, 2], []]), r"item 1 has no tokens"),
        (np.array([[1, 2], [-1, 2]]), r"item 1 begins with -1"),
        (np.array([[1, 2, 3], [1, -1, 2]]), r"item 1 has -1 between its tokens: \[1, -1, 2\]"),
        (np.array([[1, 2], [3, -2]]), r"item 1 has the token -2"),
        (np.array([[1, -1], [3, -2]]), r"item 1 has the token -2"),
        (np.array([[2**31]]), r"2147483648 is no token id"),
        (np.array([[2**63]], dtype=np.uint64), r"9223372036854775808 is no token id"),
        (table([[3, 4, 9], [5], [3, 4]]), r"item 2 \(2 tokens\) is the beginning of item 0"),
        (np.zeros((1, MAX_ITEM_TOKENS + 1), dtype=int), r"an item has 16385 tokens; items have at most 16384"),
    ],
)
def test_invalid_item_tables_are_refused(items: np.ndarray, message: str) -> None:
    with pytest.raises(ItemTrieError, match=message):
        ItemTrie.build(items)


def test_empty_item_table_columns_cost_nothing() -> None:
    trie = ItemTrie.build(table([[1, 2], [3]], extra=1_000_000))
    assert (trie.num_items, trie.max_depth, trie.num_nodes) == (2, 2, 4)
    assert ItemTrie.build(table([[7] * MAX_ITEM_TOKENS], extra=1)).max_depth == MAX_ITEM_TOKENS


def test_trie_takes_eight_bytes_per_node() -> None:
    """Eight bytes per node: a million items of three levels are far below 100 MB."""
    items = np.random.default_rng(0).integers(0, 64, (20_000, 3))
    trie = ItemTrie.build(items)
    assert trie.num_items == len(np.unique(items, axis=0))
    nodes = 1 + sum(len(np.unique(items[:, :depth], axis=0)) for depth in (1, 2, 3))
    assert trie.num_bytes == 8 * nodes


@pytest.mark.parametrize("seed", range(5))
def test_states_together_allow_what_each_allows_alone(seed: int) -> None:
    """States of two tries, some with a draft, right or wrong."""
    rng = random.Random(seed)
    tries = [ItemTrie.build(table(without_beginnings(random_items(rng)))) for _ in range(2)]
    states, drafts = [], []
    for _ in range(12):
        trie = rng.choice(tries)
        states.append(ItemStates(trie, nodes(rng.randrange(trie.num_nodes))))
        drafts.append(nodes(*(rng.randrange(trie.max_token + 2) for _ in range(rng.choice([0, 0, 2])))))
    together, alone = ItemStates.allowed_next(states), join_allowed(states)
    assert [part.tolist() for part in together.unpack()] == [part.tolist() for part in alone.unpack()]
    found = ItemStates.allowed_along(states, drafts)
    for state, draft, allowed in zip(states, drafts, found, strict=True):
        assert isinstance(allowed, AllowedTokens)
        expected = walk_draft(state, draft)
        assert [part.tolist() for part in allowed.unpack()] == [part.tolist() for part in expected.unpack()]
