"""A walk over a tree: a whole traversal while nothing changes; while it does, true, once each, and ending."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.radix.cache import RadixCache
from baton.radix.discarding import retire
from baton.radix.node import TreeNode
from baton.radix.snapshot import HEAD_TOKENS, HIDDEN, MANY, NO_ROW, ROW, Has, TreeWalk
from tests.doubles.cache_rig import CacheRig, int32
from tests.doubles.kv_echo import prompt_of
from tests.doubles.scheduler_harness import PAGES, Harness


class Seen:
    """What a walk has told so far."""

    def __init__(self, cache: RadixCache, **options) -> None:
        self.cache = cache
        self.walk = TreeWalk(cache, **options)
        self.rows = np.empty(0, dtype=ROW)
        self.heads = b""
        self.names: list[str] = []

    def advance(self, steps: int) -> bool:
        """One slice; its rows must be what the tree holds now."""
        is_over, before = self.walk.visit_nodes(steps), len(self.rows)
        taken = self.walk.take_rows()
        self.rows = np.concatenate([self.rows, np.frombuffer(taken.rows, dtype=ROW)])
        self.heads += taken.heads
        self.names += taken.names
        assert len(self.rows) == self.walk.nodes and len(self.rows) - before <= steps
        nodes = {node.serial: node for node in self.cache.tree.nodes()}
        for row in self.rows[before:]:
            self._check(row, nodes[int(row["serial"])])
        return is_over

    def _check(self, row: np.void, node: TreeNode) -> None:
        assert node.parent is not None
        above = 0 if row["parent"] == NO_ROW else int(self.rows[row["parent"]]["serial"])
        assert above == node.parent.serial and self.cache.tree.root.serial == 0
        assert (row["start"], row["tokens"]) == (node.prefix_len - len(node), len(node))
        assert (row["locks"], row["leases"]) == (node.lock_ref, node.lease_ref)
        assert (row["used"], row["uses"]) == (max(node.used, node.last_access), node.uses)
        flags = {
            Has.DEVICE: node.on_device,
            Has.HOST: node.host is not None,
            Has.LOCK: node.lock_ref > 0,
            Has.LEASE: node.lease_ref > 0,
            Has.LOADING: node.loading > 0,
            Has.STORING: node.storing > 0,
            Has.RETIRED: node.last_access == 0,
        }
        assert Has(int(row["has"])) == sum(flag for flag, given in flags.items() if given)
        if row["namespace"] >= 0:
            assert self.names[row["namespace"]] == self.cache.tree.namespace_of(node)

    def finish(self, steps: int = 7) -> Seen:
        while not self.advance(steps):
            pass
        return self

    def check_shape(self) -> None:
        """Each node once, and what is below a node right after it."""
        serials = self.rows["serial"].tolist()
        assert len({*serials}) == len(serials)
        path: list[int] = [NO_ROW]
        for number, parent in enumerate(self.rows["parent"].tolist()):
            while path[-1] != parent:
                path.pop()  # fails where a parent is not on the way
            path.append(number)


def random_ids(rng: random.Random, page: int) -> np.ndarray:
    stem = [page * rng.randrange(3) + (place // page) for place in range(page * rng.randrange(5))]
    return np.array([*stem, *(rng.randrange(3) for _ in range(rng.randrange(1, 3 * page + 6)))], dtype=np.int32)


def grow(rng: random.Random, rig: CacheRig, page: int) -> None:
    """One random change of a tree."""
    match rng.randrange(6):
        case 0 | 1:
            running = (
                rig.start(random_ids(rng, page), rng.choice(["", "", "red", "blue"])) if rig.pool.num_free else None
            )
            if running is not None:
                if rig.compute(running) and rng.random() < 0.7:
                    rig.finish(running)
                elif running.committed == len(running.ids):
                    rig.publish(running)
                else:
                    rig.release(running)
        case 2 if rig.running:
            rig.finish(rng.choice(rig.running))
        case 3:
            rig.cache.evict(rng.randrange(1, 3 * page))
        case _ if rng.random() < 0.5:
            rig.cache.match_prefix(rng.choice(["", "red"]), random_ids(rng, page))


@PAGES
@pytest.mark.parametrize("seed", range(6))
def test_snapshot_of_unchanged_tree_is_complete(seed: int, page_size: int) -> None:
    print("seed", seed)
    rng = random.Random(seed)
    rig = CacheRig(num_tokens=120 * page_size, page_size=page_size, rows=6, context=20 * page_size + 20)
    for _ in range(rng.choice([0, 5, 120])):
        grow(rng, rig, page_size)
    steps = rng.choice([1, 2, 5, 1000])
    seen = Seen(rig.cache, with_heads=True).finish(steps)
    seen.check_shape()
    nodes = {node.serial: node for node in rig.cache.tree.nodes()}
    assert seen.rows["serial"].tolist() == sorted(nodes, key=seen.rows["serial"].tolist().index)
    assert seen.walk.complete and len(seen.rows) == len(nodes) == rig.cache.total_nodes
    heads = b"".join(nodes[serial].key[: 4 * HEAD_TOKENS] for serial in seen.rows["serial"].tolist())
    assert seen.heads == heads and {*seen.names} <= {"", "red", "blue"}
    assert seen.walk.visit_nodes(5) and seen.walk.take_rows().rows == b"", "it is over for good"


@PAGES
@pytest.mark.parametrize("seed", range(12))
def test_snapshot_visits_all_nodes_that_persist(seed: int, page_size: int) -> None:
    """All that was there at the beginning and has not left by the end has been visited."""
    print("seed", seed)
    rng = random.Random(seed)
    rig = CacheRig(num_tokens=100 * page_size, page_size=page_size, rows=6, context=20 * page_size + 20)
    for _ in range(100):
        grow(rng, rig, page_size)
    at_first = [*rig.cache.tree.nodes()]
    seen = Seen(rig.cache)
    for _ in range(10_000):
        if seen.advance(rng.choice([1, 1, 3])):
            break
        for _ in range(rng.randrange(4)):
            grow(rng, rig, page_size)
    else:
        pytest.fail("the walk does not end")
    seen.check_shape()
    assert seen.walk.complete
    survivors = {node.serial for node in at_first if node.parent is not None}
    assert survivors <= {*seen.rows["serial"].tolist()}


def test_snapshot_visits_both_parts_of_unvisited_split_node() -> None:
    rig = CacheRig(num_tokens=256)
    rig.insert(int32(1, 2, 3, 4, 5, 6))
    rig.insert(int32(9, 9))
    seen = Seen(rig.cache)
    assert not seen.advance(1)  # 9 9: the last comes first
    rig.insert(int32(1, 2, 3, 7, 7))
    rig.insert(int32(1, 2, 8))
    seen.finish(1).check_shape()
    assert len(seen.rows) == rig.cache.total_nodes == 6
    assert seen.rows["tokens"].sum() == sum(len(node) for node in rig.cache.tree.nodes())


def test_snapshot_does_not_revisit_split_node() -> None:
    rig = CacheRig(num_tokens=256)
    rig.insert(int32(1, 2, 3, 4, 5, 6))
    rig.insert(int32(1, 2, 3, 4, 5, 6, 7))
    seen = Seen(rig.cache)
    assert not seen.advance(1)
    rig.insert(int32(1, 2, 8))
    seen.finish(1)
    assert seen.rows["tokens"].tolist() == [6, 1] and seen.rows["parent"].tolist() == [NO_ROW, 0]


def test_snapshot_skips_nodes_evicted_before_their_visit() -> None:
    rig = CacheRig(num_tokens=64)
    for first in range(5):
        rig.insert(int32(first, 1, 2))
    seen = Seen(rig.cache)
    assert not seen.advance(2)
    rig.cache.evict(6)  # the two oldest, whose turn would come last
    assert seen.finish(2).walk.complete
    assert len(seen.rows) == 3 and rig.cache.total_nodes == 3


@pytest.mark.parametrize("how", ["reset", "discard_all"])
def test_reset_or_discard_ends_snapshot_walk(how: str) -> None:
    rig = CacheRig(num_tokens=64)
    for first in range(5):
        rig.insert(int32(first, 1, 2))
    seen = Seen(rig.cache)
    assert not seen.advance(2)
    getattr(rig.cache, how)()
    rig.insert(int32(7, 7))
    assert seen.walk.visit_nodes(2) and not seen.walk.complete and seen.walk.nodes == 2
    fresh = Seen(rig.cache).finish()
    assert len(fresh.rows) == 1 and fresh.walk.complete


def test_walk_finished_before_reset_stays_complete() -> None:
    rig = CacheRig(num_tokens=64)
    rig.insert(int32(1, 2))
    seen = Seen(rig.cache).finish()
    rig.cache.reset()
    assert seen.walk.visit_nodes(1) and seen.walk.complete


@pytest.mark.parametrize(("most", "complete"), [(4, False), (5, True), (6, True)])
def test_snapshot_respects_node_limit(most: int, complete: bool) -> None:
    rig = CacheRig(num_tokens=64)
    for first in range(5):
        rig.insert(int32(first, 1))
    seen = Seen(rig.cache, max_nodes=most).finish()
    assert seen.walk.complete is complete and len(seen.rows) == min(5, most)


def test_snapshot_of_fast_growing_tree_ends_at_limit() -> None:
    rig = CacheRig(num_tokens=20_000, rows=2, context=4000)
    seen = Seen(rig.cache, max_nodes=50)
    ids = [1]
    for number in range(1000):
        for _ in range(3):
            ids = [*ids, number % 7, 5]
            rig.insert(np.array(ids, dtype=np.int32))
        if seen.advance(1):
            break
    assert len(seen.rows) == 50 and not seen.walk.complete


def test_removed_nodes_count_as_snapshot_steps() -> None:
    """So that a walk ends whose every node goes before its turn."""
    rig = CacheRig(num_tokens=4096)
    for first in range(1000):
        rig.insert(int32(first, 1))
    seen = Seen(rig.cache, max_nodes=100)
    seen.advance(1)
    rig.cache.evict(4096)
    slices = 0
    while not seen.advance(1):
        slices += 1
    assert slices <= 101 and len(seen.rows) == 1


def test_snapshot_walk_has_a_step_limit() -> None:
    rig = CacheRig(num_tokens=64)
    for first in range(5):
        rig.insert(int32(first, 1))
    seen = Seen(rig.cache, max_nodes=50)
    seen.walk._steps_left = 3
    assert [seen.advance(1) for _ in range(3)] == [False, False, True]
    assert not seen.walk.complete and len(seen.rows) == 2


def test_snapshot_omits_names_of_hidden_and_surplus_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = CacheRig(num_tokens=64)
    rig.insert(int32(1, 2, 3, 4), "a")
    node = next(rig.cache.tree.nodes())
    rig.cache.tree.hide(node, 2)
    assert Seen(rig.cache).finish().rows["namespace"].tolist() == [0, 0], "what is above it has a name"
    rig.cache.tree.hide(node, 0)
    assert Seen(rig.cache).finish().rows["namespace"].tolist() == [HIDDEN, HIDDEN]
    monkeypatch.setattr("baton.radix.snapshot.MAX_NAMES", 1)
    rig.insert(int32(5), "b")
    rig.insert(int32(5, 6), "c")
    seen = Seen(rig.cache).finish()
    assert len(seen.names) == 1 and MANY in seen.rows["namespace"].tolist()


def test_snapshot_marks_retired_nodes_and_their_last_use() -> None:
    rig = CacheRig(num_tokens=64)
    rig.insert(int32(1, 2, 3))
    node = next(rig.cache.tree.nodes())
    retire(rig.cache, node)
    (row,) = Seen(rig.cache).finish().rows
    assert Has(int(row["has"])) == Has.DEVICE | Has.RETIRED and row["used"] == node.used > 0


def test_snapshot_shows_tiers_and_leases() -> None:
    harness = Harness(num_tokens=256, page_size=16, host_tokens=512)
    for number in range(8):
        harness.add(f"r{number}", prompt_of(48, number), 4, retain_ttl=1e6 if number == 7 else 0.0)
        harness.run()
    seen = Seen(harness.cache).finish(3)
    tiers = {int(row["has"]) & (Has.DEVICE | Has.HOST) for row in seen.rows}
    assert Has.HOST in tiers and tiers <= {Has.HOST, Has.DEVICE, Has.DEVICE | Has.HOST}
    leased = [row for row in seen.rows if row["has"] & Has.LEASE]
    assert leased and all(row["has"] & Has.LOCK for row in leased)


def test_snapshot_of_long_chain_keeps_a_shallow_stack() -> None:
    """What has been visited is let go of at once, so that no slice finds a deep stack to climb."""
    rig = CacheRig(num_tokens=4096, rows=2, context=3000)
    for length in range(1, 400):
        rig.insert(np.arange(length, dtype=np.int32))
    seen = Seen(rig.cache)
    deepest = 0
    while not seen.walk.visit_nodes(1):
        deepest = max(deepest, len(seen.walk._open))
    assert seen.walk.nodes == rig.cache.total_nodes == 399 and deepest == 1
