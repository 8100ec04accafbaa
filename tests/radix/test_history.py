"""The history of a cache: its structure against the tree, its bound, and its look-ups."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest

from baton.radix.discarding import drop_path, retire
from baton.radix.history import NODE_TOKENS, CacheHistory
from baton.radix.kv_sequence import SequenceEnd
from baton.radix.node import ID_BYTES, TreeNode
from baton.radix.past_node import Departure, PastNode, Pressure
from tests.doubles.cache_rig import CacheRig, int32
from tests.doubles.scheduler_harness import PAGES

SEED = int(os.environ.get("BATON_SIM_SEED", "20"))


def nodes_of(history: CacheHistory) -> list[PastNode]:
    """Parents before their children; without the roots."""
    found = [child for root in history._roots.values() for child in root.children.values()]
    for node in found:
        found.extend(node.children.values())
    return found


def check_history(history: CacheHistory) -> None:
    cache, nodes = history._cache, nodes_of(history)
    live: dict[PastNode, int] = {}
    """Tokens of it that nodes of the tree hold; one that several hold counts for each."""
    for node in cache.tree.nodes():
        if cache.tree.reachable(node) is not node:
            assert node.past is None
            continue
        for past in path_of(node):
            start = max(past.start, node.prefix_len - len(node))
            live[past] = live.get(past, 0) + min(past.end, node.prefix_len) - start
    departed = 0
    for node in nodes:
        parent = node.parent
        assert parent is not None and parent.children[node.key[:ID_BYTES]] is node
        assert len(node.key) == (node.end - node.start) * ID_BYTES > 0 and node.start == parent.end
        assert node.live * (node.end - node.start) == live.pop(node, 0)
        assert bool(node.live) == (node.departure is None) == (node not in history._departed)
        assert not node.live or parent.live or parent.parent is None
        if not node.live:
            departed += node.end - node.start + NODE_TOKENS
    assert not live
    assert history._departed.keys() <= set(nodes)
    assert history.departed_tokens == departed <= history.max_tokens
    assert all(root.children for root in history._roots.values())


def path_of(node: TreeNode) -> list[PastNode]:
    """The nodes of the history that hold the tokens of a node of the tree."""
    past, found = node.past, []
    assert past is not None
    while past.start >= node.prefix_len:
        assert past.parent is not None
        past = past.parent
    while True:
        found.append(past)
        if past.start <= node.prefix_len - len(node):
            return found
        assert past.parent is not None
        past = past.parent


@PAGES
@pytest.mark.parametrize("offset", range(6))
def test_history_matches_the_tree(page_size: int, offset: int) -> None:
    seed = SEED + offset
    print(f"BATON_SIM_SEED={seed}")
    rng = random.Random(seed)
    rig = CacheRig(num_tokens=512, page_size=page_size)
    history = CacheHistory(rig.cache, rng.choice([600, 4000]))
    stems = [[rng.randrange(50) for _ in range(150)] for _ in range(3)]
    for turn in range(250):
        history.now = float(turn)
        prompt = rng.choice(stems)[: rng.randrange(1, 150)] + [rng.randrange(9) for _ in range(rng.randrange(1, 60))]
        running = rig.start(np.array(prompt, dtype=np.int32), rng.choice(["", "salt"]))
        middle = rng.randrange(running.committed, len(prompt)) if len(prompt) > running.committed else running.committed
        if rig.compute(running, max(middle, running.committed)) and rng.random() < 0.5:
            rig.publish(running)
        if rig.compute(running) and rng.random() < 0.9:
            rig.finish(running)
        else:
            rig.release(running)
        nodes = list(rig.cache.tree.nodes())
        if nodes and rng.random() < 0.1:
            retire(rig.cache, rng.choice(nodes))
        if nodes and rng.random() < 0.05:
            node = rng.choice(nodes)
            drop_path(rig.cache, node, rng.randrange(node.prefix_len) // page_size * page_size)
        if rng.random() < 0.02:
            assert rig.cache.reset()
        check_history(history)
    rig.verify()


def test_history_forgets_the_oldest_first() -> None:
    rig = CacheRig(num_tokens=256)
    history = CacheHistory(rig.cache, 3 * (100 + NODE_TOKENS))
    prompts = [np.full(100, number, dtype=np.int32) for number in range(5)]
    for number, prompt in enumerate(prompts):
        history.now = float(number)
        rig.insert(prompt)
        rig.cache.evict(100)
    known = [history.trace_prompt(rig.cache.tree.root, "", prompt, 0) for prompt in prompts]
    assert known[:2] == [[], []]
    assert [[past.left_at for _, past in found] for found in known[2:]] == [[2.0], [3.0], [4.0]]


def test_departures_keep_their_time_and_cause() -> None:
    rig = CacheRig(num_tokens=256)
    history = CacheHistory(rig.cache, 4096)
    ids = np.arange(100, dtype=np.int32)
    rig.insert(ids)
    history.now = 7.0
    history.pressure = Pressure("alice", "large")
    rig.cache.evict(40)
    history.now = 9.0
    history.pressure = None
    rig.cache.evict(20)
    found = history.trace_prompt(rig.cache.tree.root, "", ids, 10)
    assert [(tokens, past.departure, past.left_at, past.pressure) for tokens, past in found] == [
        (30, None, 0.0, None),
        (20, Departure.EVICTED, 9.0, None),
        (40, Departure.EVICTED, 7.0, Pressure("alice", "large")),
    ]


def test_dropped_branch_passes_its_end_to_the_path_above() -> None:
    rig = CacheRig(num_tokens=512)
    history = CacheHistory(rig.cache, 4096)
    ids = np.arange(100, dtype=np.int32)
    rig.insert(ids[:60])
    longer = rig.start(ids)
    assert rig.compute(longer)
    rig.publish(longer)
    rig.running.remove(longer)
    node = longer.kv.open_node()
    rig.cache.release(longer.kv, how=SequenceEnd.RELEASED)
    drop_path(rig.cache, node, 60)
    rig.cache.evict(1000)
    found = history.trace_prompt(rig.cache.tree.root, "", ids, 0)
    assert [(tokens, past.departure) for tokens, past in found] == [(60, Departure.RELEASED), (40, Departure.CLEARED)]


def test_pieces_that_leave_together_become_one() -> None:
    rig = CacheRig(num_tokens=512)
    history = CacheHistory(rig.cache, 4096)
    ids = np.arange(90, dtype=np.int32)
    for length in (30, 60, 90):
        rig.insert(ids[:length])
        rig.cache.evict(1000)
        rig.insert(ids[:length])
    rig.insert(np.concatenate([ids[:45], int32(7)]))  # a branch that stays apart
    rig.cache.evict(1000)
    check_history(history)
    assert len(nodes_of(history)) <= 6
    rig.insert(ids)
    rig.cache.evict(1000)
    assert sum(tokens for tokens, _ in history.trace_prompt(rig.cache.tree.root, "", ids, 0)) == 90


def test_history_without_room_watches_nothing() -> None:
    rig = CacheRig()
    history = CacheHistory(rig.cache, 0)
    rig.insert(np.arange(50, dtype=np.int32))
    rig.cache.evict(100)
    assert not history._roots and history.trace_prompt(rig.cache.tree.root, "", int32(0, 1), 0) == []
