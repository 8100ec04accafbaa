"""KV given up before its turn: what is retired is evicted first, what is dropped is found by no match."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.radix.cuts import truncate
from baton.radix.discarding import drop_path, retire
from baton.radix.node import TreeNode
from tests.doubles.cache_rig import CacheRig, int32


def end_of(rig: CacheRig, ids: np.ndarray) -> TreeNode:
    return rig.cache.find_prefix("", ids)[0]


def cached_tokens(rig: CacheRig, ids: np.ndarray) -> int:
    return rig.cache.match_len("", ids)


class TestRetire:
    def test_retired_node_is_evicted_before_older_ones(self) -> None:
        rig = CacheRig()
        old, new = int32(1, 2, 3, 4), int32(5, 6, 7, 8)
        rig.insert(old)
        rig.insert(new)
        assert retire(rig.cache, end_of(rig, new)) == 4
        rig.verify()
        rig.cache.evict(4)
        assert (cached_tokens(rig, old), cached_tokens(rig, new)) == (4, 0)
        rig.verify()

    def test_retire_covers_whole_chain_beyond_kept_prefix(self) -> None:
        rig = CacheRig()
        turn = np.arange(1, 41, dtype=np.int32)
        rig.insert(turn[:10])  # somebody else's: the job found it
        rig.insert(turn[:20])
        rig.insert(turn)
        other = int32(90, 91, 92)
        rig.insert(other)
        assert retire(rig.cache, end_of(rig, turn), kept=10) == 30
        rig.cache.evict(30)
        assert (cached_tokens(rig, turn), cached_tokens(rig, other)) == (10, 3)
        rig.verify()

    def test_retire_stops_at_branching_nodes(self) -> None:
        rig = CacheRig()
        rig.insert(int32(1, 2, 3, 4, 5))
        rig.insert(int32(1, 2, 3, 8, 9))
        assert retire(rig.cache, end_of(rig, int32(1, 2, 3, 4, 5))) == 2
        assert retire(rig.cache, end_of(rig, int32(1, 2, 3))) == 0
        rig.verify()

    def test_retire_stops_at_formerly_branching_nodes(self) -> None:
        """They have left, and such may come again."""
        rig = CacheRig()
        rig.insert(int32(1, 2, 3, 8, 9))
        rig.insert(int32(1, 2, 3, 4, 5))
        rig.cache.evict(2)
        assert cached_tokens(rig, int32(1, 2, 3, 8, 9)) == 3
        rig.insert(int32(50, 51))
        assert retire(rig.cache, end_of(rig, int32(1, 2, 3, 4, 5))) == 2
        rig.cache.match_prefix("", int32(1, 2, 3))
        rig.cache.evict(4)
        assert (cached_tokens(rig, int32(1, 2, 3)), cached_tokens(rig, int32(50, 51))) == (3, 0)
        rig.verify()

    @pytest.mark.parametrize(
        ("page", "kept", "left"), [(1, 5, 5), (1, 0, 0), (1, 12, 12), (4, 5, 8), (4, 8, 8), (4, 11, 12)]
    )
    def test_retire_within_node_starts_at_next_whole_page(self, page: int, kept: int, left: int) -> None:
        """At the next whole page."""
        rig = CacheRig(page_size=page, num_tokens=64)
        ids, other = np.arange(1, 13, dtype=np.int32), np.arange(40, 52, dtype=np.int32)
        rig.insert(ids)
        rig.insert(other)
        assert retire(rig.cache, end_of(rig, ids), kept) == 12 - left
        rig.insert(np.arange(70, 82, dtype=np.int32))
        rig.cache.evict(12 - left)
        assert (cached_tokens(rig, ids), cached_tokens(rig, other)) == (left, 12)
        rig.verify()

    def test_retire_stops_at_locked_nodes(self) -> None:
        rig = CacheRig()
        rig.insert(int32(1, 2, 3, 4))
        running = rig.start(int32(1, 2, 3, 4, 5, 6))
        assert retire(rig.cache, end_of(rig, int32(1, 2, 3, 4))) == 0
        assert rig.compute(running)
        rig.finish(running)
        rig.insert(int32(50, 51))
        rig.cache.evict(2)
        assert cached_tokens(rig, int32(1, 2, 3, 4, 5, 6)) == 4, "it goes as the least recently used, from its end"
        rig.verify()

    def test_match_revives_retired_node(self) -> None:
        rig = CacheRig()
        mine, other = int32(1, 2, 3), int32(5, 6, 7)
        rig.insert(mine)
        rig.insert(other)
        retire(rig.cache, end_of(rig, mine))
        rig.cache.match_prefix("", mine)
        rig.cache.evict(3)
        assert (cached_tokens(rig, mine), cached_tokens(rig, other)) == (3, 0)
        rig.verify()
        assert rig.cache.evict(100) == 3

    def test_retiring_root_or_removed_node_does_nothing(self) -> None:
        rig = CacheRig()
        rig.insert(int32(1, 2, 3))
        gone = end_of(rig, int32(1, 2, 3))
        rig.cache.evict(3)
        assert retire(rig.cache, gone) == retire(rig.cache, rig.cache.tree.root) == 0
        rig.verify()

    @pytest.mark.parametrize("page", [1, 4, 16])
    @pytest.mark.parametrize("seed", range(6))
    def test_random_retires_lose_no_eviction_entry(self, seed: int, page: int) -> None:
        """Retired nodes are used, locked, split and evicted like any others."""
        print(f"seed {seed}")
        rng = random.Random(seed)
        rig = CacheRig(num_tokens=64 * page, page_size=page, rows=6, context=512)
        stems = [np.array([rng.randrange(3) for _ in range(12 * page)], dtype=np.int32) for _ in range(3)]
        for _ in range(300):
            ids = np.append(rng.choice(stems)[: rng.randrange(12 * page)], int32(*(rng.randrange(4) for _ in range(4))))
            action = rng.random()
            if action < 0.5 and len(rig.running) < 5:
                running = rig.start(ids)
                if not rig.compute(running):
                    rig.release(running)
            elif rig.running and action < 0.75:
                rig.finish(rig.running[rng.randrange(len(rig.running))])
            elif action < 0.95:
                retire(rig.cache, end_of(rig, ids), kept=rng.choice([0, 3]))
            else:
                rig.cache.evict(rng.randrange(page * 6))
            rig.verify()
        for running in list(rig.running):
            rig.finish(running)
        rig.cache.evict(10**6)
        assert rig.cache.evictable_tokens == 0 and rig.allocator.free_tokens == 64 * page
        assert not list(rig.cache.order.entries())


def tokens(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


class TestDropPath:
    def test_drop_path_removes_path_and_its_subtrees(self) -> None:
        rig = CacheRig()
        rig.insert(tokens(1, 2, 3, 4))
        rig.insert(tokens(1, 2, 9, 9, 9))
        rig.insert(tokens(5, 6))
        rig.insert(tokens(1, 2, 3, 4), "other")
        match = rig.cache.match_prefix("", tokens(1, 2, 3))
        entries = len(list(rig.cache.order.entries()))
        assert drop_path(rig.cache, match.handle) == 7
        assert rig.cache.match_len("", tokens(1, 2, 3, 4)) == 0
        assert rig.cache.match_len("", tokens(5, 6)) == 2 and rig.cache.match_len("other", tokens(1, 2, 3, 4)) == 4
        assert len(list(rig.cache.order.entries())) < entries, "the removed nodes are not kept alive"
        assert rig.cache.evicted_total == 0, "it is no eviction"
        rig.verify()
        assert drop_path(rig.cache, match.handle) == 0 and drop_path(rig.cache, rig.cache.tree.root) == 0
        assert rig.cache.evict(100) == 6
        rig.verify()

    def test_dropped_locked_nodes_stay_for_their_holders_only(self) -> None:
        rig = CacheRig(page_size=4)
        stem = np.arange(12, dtype=np.int32)
        rig.insert(np.append(stem, tokens(50, 50, 50, 50)))
        running = rig.start(np.concatenate([stem, tokens(60, 61, 62, 63, 64, 65)]))
        assert running.kv.tree_len == 12 and running.kv.node is not None
        assert drop_path(rig.cache, running.kv.node) == 4
        rig.verify()
        assert rig.cache.match_len("", stem) == 0
        rig.insert(np.append(stem, tokens(70, 70, 70, 70)))  # the same path again, beside the hidden one
        assert rig.compute(running)
        rig.publish(running)
        rig.verify()
        assert running.kv.tree_len == 16 and rig.cache.match_len("", running.ids) == 12
        truncate(rig.cache, running.kv, 5)  # a cut inside the hidden path
        running.committed = running.kv.length
        assert running.kv.length == 4
        rig.verify()
        rig.finish(running)
        rig.verify()
        assert rig.cache.evict(1000) == 2 * 16
        assert rig.verify().free == rig.allocator.total_tokens

    def test_hidden_branch_can_be_dropped_again(self) -> None:
        rig = CacheRig()
        running = rig.start(tokens(1, 2, 3, 4))
        assert rig.compute(running)
        rig.publish(running)
        node = running.kv.node
        assert node is not None and drop_path(rig.cache, node) == 0
        rig.cache.match_prefix("", tokens(1, 2))
        rig.release(running)
        rig.verify()
        assert drop_path(rig.cache, node) == 4
        assert rig.verify().free == rig.allocator.total_tokens

    @pytest.mark.parametrize("page", [1, 4])
    def test_drop_path_keeps_the_requested_prefix(self, page: int) -> None:
        rig = CacheRig(page_size=page)
        stem = np.arange(12, dtype=np.int32)
        rig.insert(np.append(stem, np.full(8, 50, dtype=np.int32)))
        rig.insert(np.append(stem, np.full(8, 60, dtype=np.int32)))
        rig.insert(np.append(stem[:4], np.full(8, 70, dtype=np.int32)))
        node = rig.cache.match_prefix("", np.append(stem, np.full(8, 50, dtype=np.int32))).handle
        assert drop_path(rig.cache, node, kept=20) == 0 and rig.cache.match_len("", stem) == 12
        assert drop_path(rig.cache, node, kept=8) == 4 + 8 + 8, "with its other branch"
        assert rig.cache.match_len("", stem) == 8
        assert rig.cache.match_len("", np.append(stem[:4], np.full(8, 70, dtype=np.int32))) == 12
        rig.verify()
        assert rig.cache.evict(1000) == 8 + 8, "what has lost its children can be evicted"
        rig.verify()

    def test_locked_nodes_below_kept_prefix_are_hidden(self) -> None:
        rig = CacheRig()
        running = rig.start(tokens(1, 2, 3, 4, 5))
        assert rig.compute(running)
        rig.publish(running)
        node = running.kv.node
        assert node is not None and drop_path(rig.cache, node, kept=2) == 0
        assert rig.cache.match_len("", tokens(1, 2, 3, 4, 5)) == 2
        rig.insert(tokens(1, 2, 3, 9))  # beside the hidden one
        assert rig.cache.match_len("", tokens(1, 2, 3, 9)) == 4
        rig.verify()
        root = rig.cache.tree.root
        assert rig.cache.find_prefix("", tokens(1, 2, 3, 4, 5, 6), after=node)[1] == 3
        assert rig.cache.tree.reachable(node) is root
        rig.finish(running)
        rig.verify()
        rig.cache.evict(1000)
        assert rig.verify().free == rig.allocator.total_tokens

    @pytest.mark.parametrize("namespace", ["", "salt"])
    def test_lookup_does_not_resume_in_hidden_branch(self, namespace: str) -> None:
        rig = CacheRig()
        running = rig.start(tokens(1, 2, 3, 4), namespace)
        assert rig.compute(running)
        rig.publish(running)
        node = running.kv.node
        assert node is not None
        ids = tokens(1, 2, 3, 4, 5)
        assert rig.cache.find_prefix(namespace, ids, after=node)[1] == 4
        drop_path(rig.cache, node)
        root = rig.cache.tree.root
        assert rig.cache.find_prefix(namespace, ids, after=node) == (root, 0, root)
        assert rig.cache.match_prefix(namespace, ids, after=node).handle is root

    @pytest.mark.parametrize("page", [1, 4, 16])
    @pytest.mark.parametrize("seed", range(4))
    def test_random_drops_leak_no_slots(self, seed: int, page: int) -> None:
        rng = random.Random(seed)
        rig = CacheRig(num_tokens=40 * page, page_size=page, rows=6)
        for _ in range(150):
            choice = rng.random()
            if choice < 0.4 and rig.pool.num_free:
                running = rig.start(np.repeat(tokens(*(rng.randrange(2) for _ in range(6))), page))
                if not rig.compute(running, min(len(running.ids), running.kv.length + 2 * page)):
                    rig.release(running)
            elif choice < 0.9 and rig.running:
                running = rng.choice(rig.running)
                rng.choice([rig.publish, rig.finish, rig.release])(running)
            elif rig.running:
                node = rng.choice(rig.running).kv.node
                assert node is not None
                drop_path(rig.cache, node, kept=rng.choice([0, 0, page, 2 * page]))
            else:
                rig.cache.evict(rng.randrange(1, 3 * page))
            rig.verify()
        for running in list(rig.running):
            rig.finish(running)
        rig.cache.evict(10**9)
        assert rig.verify().free == rig.allocator.total_tokens
