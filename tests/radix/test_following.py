"""What followed some tokens in the tree, compared with the sequences that were put there."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.radix.following import MAX_CHILDREN, find_next_tokens
from baton.radix.invariants import check_tree
from tests.doubles.cache_rig import CacheRig

PAGES = pytest.mark.parametrize("page_size", [1, 16, 64])


def numbers(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def followed(rig: CacheRig, ids: np.ndarray, most: int, namespace: str = "") -> list[int] | None:
    found = find_next_tokens(rig.cache.tree, rig.cache.tree.root, namespace, ids, most)
    return None if found is None else found.tolist()


@PAGES
def test_each_cached_prefix_is_followed_by_its_rest(page_size: int) -> None:
    """Only whole pages are cached, so a beginning shorter than a page finds nothing."""
    rig = CacheRig(page_size=page_size)
    ids = np.arange(10, 10 + 3 * page_size + 20, dtype=np.int32)
    rig.insert(ids)
    whole = ids[: len(ids) - len(ids) % page_size].tolist()
    before = rig.cache.tree.total_nodes
    for length in range(page_size, len(whole)):
        assert followed(rig, ids[:length], 7) == whole[length : length + 7]
    assert followed(rig, ids[: len(whole)], 7) == []
    assert rig.cache.tree.total_nodes == before, "a look splits no node"
    check_tree(rig.cache)


@PAGES
def test_guess_follows_most_recently_used_branch(page_size: int) -> None:
    rig = CacheRig(page_size=page_size, num_tokens=2048)
    trunk = np.arange(2 * page_size, dtype=np.int32)
    first, second = (np.concatenate([trunk, np.full(page_size, value, dtype=np.int32)]) for value in (500, 600))
    rig.insert(first)
    rig.insert(second)
    start = trunk[:page_size]
    assert followed(rig, start, 3 * page_size) == second[page_size:].tolist()
    rig.start(np.append(first, np.int32(1)))  # a match counts as a use
    assert followed(rig, start, 3 * page_size) == first[page_size:].tolist()


def test_uncached_prefixes_have_no_guess() -> None:
    rig = CacheRig()
    rig.insert(numbers(1, 2, 3, 4), "mine")
    assert followed(rig, numbers(1, 2), 9, "mine") == [3, 4]
    assert followed(rig, numbers(1, 2), 9) is None, "namespaces share nothing"
    assert followed(rig, numbers(1, 7), 9, "mine") is None
    assert followed(rig, numbers(1, 2, 3, 4, 5), 9, "mine") is None


def test_guess_examines_a_bounded_number_of_children() -> None:
    rig = CacheRig(page_size=2, num_tokens=2048)
    for value in range(MAX_CHILDREN + 5):
        rig.insert(numbers(1, 2, 3, 1000 + value))
    found = followed(rig, numbers(1, 2, 3), 1)
    assert found is not None and found[0] < 1000 + MAX_CHILDREN, "those behind are not looked at"


def test_guesses_in_random_trees_are_cached_continuations() -> None:
    """A guess is what follows in some cached sequence that begins so."""
    rng = random.Random(3)
    for page_size in (1, 2, 4):
        rig = CacheRig(page_size=page_size, num_tokens=4096)
        known = [[rng.randrange(3) for _ in range(rng.randrange(1, 60))] for _ in range(30)]
        for ids in known:
            rig.insert(np.array(ids, dtype=np.int32))
        hits = 0
        for _ in range(300):
            ids = rng.choice(known)
            start, most = ids[: rng.randrange(1, len(ids) + 1)], rng.randrange(1, 9)
            found = followed(rig, np.array(start, dtype=np.int32), most)
            whole = [each[: len(each) - len(each) % page_size] for each in known]
            rest = [each[len(start) :][:most] for each in whole if each[: len(start)] == start]
            assert found in rest if found else True
            hits += bool(found)
        assert hits > 50
