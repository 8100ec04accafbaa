"""Victims of the learned order once it has seen reuse, its records of nodes, and its ghosts."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.radix.discarding import retire
from baton.radix.eviction import learned
from baton.radix.eviction.learned import (
    GAPS,
    HEAD_TOKENS,
    TURNS,
    Ghosts,
    Habit,
    LearnedLanes,
    _class_of,
    got_child,
    habit_of,
    lost_child,
    used_again,
)
from baton.radix.eviction.order import Lanes
from baton.radix.node import TreeNode
from baton.radix.tree import RadixTree
from tests.doubles.cache_rig import CacheRig

FRESH = iter(range(10**6, 10**9, 1000))
"""First ids of runs that no other test uses."""


def fresh(count: int) -> np.ndarray:
    first = next(FRESH)
    return np.arange(first, first + count, dtype=np.int32)


def ask(rig: CacheRig, *parts: np.ndarray) -> int:
    """Run and cache a request with this prompt; return how many of its tokens were cached before."""
    running = rig.start(np.concatenate(parts))
    found = running.kv.tree_len
    assert rig.compute(running)
    rig.finish(running)
    return found


def lanes_of(rig: CacheRig) -> LearnedLanes:
    lanes: Lanes = rig.cache.order._lanes
    assert isinstance(lanes, LearnedLanes)
    return lanes


@pytest.mark.parametrize("page", [1, 16])
def test_untrained_learned_order_equals_lru(page: int) -> None:
    rigs = [CacheRig(num_tokens=512, page_size=page, eviction=name) for name in ("lru", "learned")]
    for token in (1, 2, 3, 1, 4):
        for rig in rigs:
            rig.insert(np.repeat(np.int32(token), 64))
    for _ in range(8):
        lru, learned = (
            [rig.cache.match_len("", np.repeat(np.int32(token), 64)) for token in (1, 2, 3, 4)] for rig in rigs
        )
        assert lru == learned
        assert [rig.cache.evict(32) for rig in rigs] == [32, 32]


@pytest.mark.parametrize(("name", "kept"), [("lru", False), ("learned", True)])
def test_burst_of_single_prompts_keeps_the_system_prompt(name: str, kept: bool) -> None:
    """It has no leaf below it when the burst comes, and is the longest idle. Only who knows that such prompts are never
    asked for again, and it always was, keeps it."""
    rig = CacheRig(num_tokens=1_000, eviction=name)
    system = fresh(200)
    for _ in range(40):
        ask(rig, system, fresh(30))
        ask(rig, fresh(100))
    for _ in range(20):
        ask(rig, fresh(150))
    assert (rig.cache.match_len("", system) == 200) is kept
    rig.verify()


def test_hinted_burst_evicts_only_itself_in_every_order() -> None:
    for name in ("lru", "lfu", "slru", "fifo", "learned"):
        rig = CacheRig(num_tokens=1_000, eviction=name)
        system = fresh(200)
        ask(rig, system)
        for _ in range(20):
            burst = fresh(150)
            ask(rig, burst)
            retire(rig.cache, rig.cache.match_prefix("", burst).handle)
        assert rig.cache.match_len("", system) == 200


def test_often_used_prefix_outlives_a_younger_one() -> None:
    """Documents below a system prompt: one is in every fourth request, the others come back after a hundred."""
    rig = CacheRig(num_tokens=1_200, eviction="learned")
    system, often, seldom = fresh(20), fresh(100), [fresh(100) for _ in range(25)]
    found = []
    for number in range(400):
        document = often if number % 4 == 0 else seldom[number % 25]
        found.append((document is often, ask(rig, system, document, fresh(10))))
    late = found[200:]
    assert all(hit >= 120 for is_often, hit in late if is_often)
    rig.verify()


def test_tails_are_classified_by_turn_and_shared_nodes_by_gap() -> None:
    rig = CacheRig(num_tokens=2_000, rows=8, context=1_000, eviction="learned")
    ids = fresh(20)
    for turn in range(1, 40):
        ask(rig, ids)
        node = rig.cache.match_prefix("", ids).handle
        assert node.turn == turn and not node.branched
        assert _class_of(node) == {1: 0, 2: 1, 3: 2, 4: 3, 5: 4, 7: 4, 8: 5, 15: 5, 16: 6, 31: 6, 32: 7}.get(
            turn, _class_of(node)
        )
        ids = np.append(ids, fresh(20))
    rig.cache.evict(20 * 20)
    assert rig.cache.match_prefix("", ids).handle.turn == 39, "what is left of a session is where it was"
    ask(rig, ids[:20], fresh(5))
    top = rig.cache.match_prefix("", ids[:20]).handle
    assert top.branched and top.turn == 1 and TURNS <= _class_of(top) < TURNS + GAPS


def test_return_after_eviction_counts_as_reuse() -> None:
    rig = CacheRig(num_tokens=400, eviction="learned")
    spells = lanes_of(rig)._reuse._of_class[0]
    prompt = fresh(50)
    ask(rig, prompt)
    rig.cache.evict(400)
    assert spells.total == 0, "its spell goes on"
    ask(rig, prompt)
    assert (sum(spells.reuses), spells.total) == (1, 1)
    for _ in range(40):
        ask(rig, fresh(50))
    assert (sum(spells.reuses), spells.total) == (1, 41 - 2 * 400 // 50 + 1), "who is forgotten never came back"
    rig.cache.reset()
    assert len(lanes_of(rig)._ghosts) == 0


def test_identical_caches_choose_the_same_victims() -> None:
    """Two caches that see the same evict the same."""
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    rng, rigs = random.Random(seed), [CacheRig(num_tokens=300, eviction="learned") for _ in range(2)]
    for _ in range(300):
        ids = np.array([rng.randrange(3) for _ in range(rng.randint(1, 60))], dtype=np.int32)
        over = rng.random() < 0.2
        for rig in rigs:
            rig.insert(ids)
            if over:
                retire(rig.cache, rig.cache.match_prefix("", ids).handle)
        held = [sorted((node.prefix_len, node.key) for node in rig.cache.tree.nodes()) for rig in rigs]
        assert held[0] == held[1]


def test_shared_prefix_keeps_its_class_when_its_branches_are_evicted() -> None:
    rig = CacheRig(num_tokens=1_000, eviction="learned")
    system, first = fresh(30), fresh(30)
    ask(rig, system, first)
    ask(rig, system, fresh(30))
    ask(rig, system, first, fresh(30))
    rig.cache.evict(90)
    top = rig.cache.match_prefix("", system).handle
    assert (top.prefix_len, top.turn, len(top.children)) == (30, 1, 0)


def test_record_of_a_document_survives_its_eviction() -> None:
    """Its gap, and that it is shared: also when it comes back as part of a longer node, and when that is split."""
    rig = CacheRig(num_tokens=1_000, eviction="learned")
    document = fresh(60)
    for _ in range(4):
        question = fresh(20)
        ask(rig, document, question)
        retire(rig.cache, rig.cache.match_prefix("", np.concatenate([document, question])).handle, 60)
        rig.cache.evict(20)
    known = habit_of(rig.cache.match_prefix("", document).handle)
    assert known.shared and known.gap is not None
    rig.cache.evict(1_000)
    assert rig.cache.total_nodes == 0
    ask(rig, document, fresh(20))
    again = rig.cache.match_prefix("", document).handle
    assert again.prefix_len == 60 and habit_of(again).shared and not again.branched


def test_reset_leaves_nothing_to_evict() -> None:
    rig = CacheRig(num_tokens=400, eviction="learned")
    session = fresh(50)
    for _ in range(3):  # several lanes have leaves
        ask(rig, fresh(50))
        ask(rig, session)
        session = np.append(session, fresh(20))
    rig.cache.evict(50)
    assert rig.cache.reset() and rig.cache.evict(50) == 0
    for _ in range(12):
        ask(rig, fresh(50))
    rig.verify()


def test_node_with_a_host_copy_is_no_ghost() -> None:
    """It is still in the tree, and so is what is known of it."""
    rig = CacheRig(num_tokens=400, eviction="learned")
    prompt = fresh(50)
    ask(rig, prompt)
    node = rig.cache.match_prefix("", prompt).handle
    node.host = np.arange(50, dtype=np.int32)
    lanes_of(rig).nodes_removed([node])
    assert len(lanes_of(rig)._ghosts) == 0
    node.host = None
    lanes_of(rig).nodes_removed([node])
    assert len(lanes_of(rig)._ghosts) == 1


# -- records of nodes -------------------------------------------------------------------------------------------------

SESSION = np.arange(40, dtype=np.int32)


def child_of(parent: TreeNode, ids: np.ndarray) -> TreeNode:
    return TreeNode(7, parent, None, ids.tobytes(), ids, 1)


@pytest.mark.parametrize(
    ("later", "shared"),
    [
        (SESSION, False),
        (SESSION[:5], False),
        (np.append(SESSION[: HEAD_TOKENS + 1], np.int32(99)), False),
        (np.append(SESSION[: HEAD_TOKENS - 1], np.int32(99)), True),
        (SESSION + 1, True),
    ],
)
@pytest.mark.parametrize("swapped", [False, True])
def test_different_continuation_marks_a_node_as_shared(later: np.ndarray, shared: bool, swapped: bool) -> None:
    first, second = (later, SESSION) if swapped else (SESSION, later)
    parent = RadixTree(1).root
    got_child(parent, child_of(parent, first))
    assert not habit_of(parent).shared, "the first one says nothing"
    lost_child(parent, child_of(parent, first))
    got_child(parent, child_of(parent, second))
    assert habit_of(parent).shared is shared
    lost_child(parent, child_of(parent, second))
    got_child(parent, child_of(parent, second))
    assert habit_of(parent).shared is shared, "once is enough"


def test_last_gap_has_half_weight() -> None:
    habit = used_again(Habit(), 4)
    assert habit.gap == 4.0
    habit = used_again(habit._replace(shared=True, child=b"abcd"), 16)
    assert habit == Habit(6.0, True, b"abcd")


# -- ghosts -----------------------------------------------------------------------------------------------------------


def hang(tree: RadixTree, parent: TreeNode, ids: np.ndarray) -> TreeNode:
    node = tree.add_leaf(parent, "", ids.astype(np.int32).tobytes(), ids.astype(np.int32), 1)
    tree.remove_leaves([node])
    node.parent = parent  # as during its removal
    return node


def test_ghost_is_found_by_parent_and_first_tokens() -> None:
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


def test_oldest_ghosts_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    tree, ghosts = RadixTree(1), Ghosts(100)
    for number in range(8):
        ghosts.add_ghost(hang(tree, tree.root, np.arange(25) + 100 * number), number)
    assert [ghost.number for ghost in ghosts.forget_oldest()] == [0, 1, 2, 3] and ghosts.tokens == 100
    ghosts.add_ghost(hang(tree, tree.root, np.arange(25) + 500), 9)  # in place of 5
    assert len(ghosts) == 4 and ghosts.tokens == 100 and not list(ghosts.forget_oldest())
    monkeypatch.setattr(learned, "MOST_GHOSTS", 2)
    assert [ghost.number for ghost in ghosts.forget_oldest()] == [4, 6] and ghosts.tokens == 50
    ghosts.clear()
    assert (len(ghosts), ghosts.tokens) == (0, 0)
