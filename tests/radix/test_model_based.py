"""The whole memory side against naive models, from seeds: what is cached, what is evicted, and what slots hold.

The cache is compared with a set of prefixes, the order of eviction with a list of all accesses ever made, and the slots
in every row with what was computed into them (see CacheRig). All invariants are checked after every operation.
"""

from __future__ import annotations

import os
import random

import numpy as np
import pytest

from baton.radix import cache as cache_module
from baton.radix.node import TreeNode
from tests.doubles.cache_rig import CacheRig, Running

SEED = int(os.environ.get("BATON_RADIX_SEED", "1"))

Prefix = tuple[str, bytes]


class Model:
    """What the cache should be. A prefix is (namespace, id bytes), always in whole pages."""

    def __init__(self, rig: CacheRig) -> None:
        self.rig = rig
        self.page_bytes = 4 * rig.cache.page_size
        self.cached: set[Prefix] = set()
        self.accesses: list[Prefix] = []

    def prefixes(self, namespace: str, data: bytes) -> list[Prefix]:
        return [(namespace, data[:end]) for end in range(self.page_bytes, len(data) + 1, self.page_bytes)]

    def longest(self, namespace: str, data: bytes) -> int:
        """Tokens of ``data`` that are cached, by brute force."""
        found = [len(key) for ns, key in self.prefixes(namespace, data) if (ns, key) in self.cached]
        return max(found, default=0) // 4

    def access(self, namespace: str, ids: np.ndarray, length: int) -> None:
        self.accesses.append((namespace, ids[:length].tobytes()))

    def insert(self, namespace: str, ids: np.ndarray, committed: int) -> None:
        whole = committed - committed % self.rig.cache.page_size
        self.cached.update(self.prefixes(namespace, ids[:whole].tobytes()))
        self.access(namespace, ids, whole)

    def path(self, node: TreeNode) -> Prefix:
        keys: list[bytes] = []
        while True:
            keys.append(node.key)
            assert node.parent is not None
            if node.parent is self.rig.cache.tree.root:
                assert isinstance(node.child_key, tuple)
                return node.child_key[0], b"".join(reversed(keys))
            node = node.parent

    def last_access(self, prefix: Prefix) -> int:
        """When anything was accessed that begins with ``prefix``."""
        namespace, key = prefix
        return max(i for i, (ns, data) in enumerate(self.accesses) if ns == namespace and data.startswith(key))

    def evict_one(self) -> None:
        """The cache must evict the last page of the unlocked leaf that was not accessed for longest."""
        leaves = [node for node in self.rig.cache.tree.nodes() if not node.children and not node.lock_ref]
        if not leaves:
            assert self.rig.cache.evict(1) == 0
            assert self.rig.cache.evictable_tokens == 0
            return
        victim = min(leaves, key=lambda node: self.last_access(self.path(node)))
        namespace, key = self.path(victim)
        free, page = self.rig.allocator.free_tokens, self.rig.cache.page_size
        assert self.rig.cache.evict(1) == page
        assert self.rig.allocator.free_tokens == free + page
        assert victim.parent is None, "a handle to it is dead, though some of it may be left"
        self.cached.remove((namespace, key))

    def last_pages(self, count: int) -> set[Prefix]:
        """The pages that go if ``count`` must: of leaves that nobody locks, the one that was not accessed for longest,
        again and again."""
        nodes = [(self.path(node), node) for node in self.rig.cache.tree.nodes()]
        kept = {p for path, node in nodes if node.lock_ref for p in self.prefixes(*path)}
        left = {prefix for prefix in self.cached if prefix not in kept}
        gone: set[Prefix] = set()
        for _ in range(count):
            inner = {(ns, data[: -self.page_bytes]) for ns, data in left}
            victim = min(left - inner, key=lambda prefix: (self.last_access(prefix), -len(prefix[1])))
            left.remove(victim)
            gone.add(victim)
        return gone

    def compare(self) -> None:
        """Everything cached is there, nothing else is."""
        self.rig.verify()
        tree = {prefix for node in self.rig.cache.tree.nodes() for prefix in self.prefixes(*self.path(node))}
        assert tree == self.cached
        assert 4 * (self.rig.cache.evictable_tokens + self.rig.cache.protected_tokens) == self.page_bytes * len(tree)


def random_ids(rng: random.Random, stems: list[list[int]], page: int) -> np.ndarray:
    """Few different ids and shared stems, so that prefixes are shared and split everywhere."""
    stem = rng.choice(stems)
    ids = stem[: rng.randrange(len(stem))]
    ids = ids + [rng.randrange(3) for _ in range(rng.randrange(1, 2 * page + 6))]
    return np.array(ids, dtype=np.int32)


class Episode:
    """Random operations on one rig, in lockstep with the model."""

    def __init__(self, seed: int, page: int) -> None:
        self.rng = rng = random.Random(seed)
        self.page = page
        self.rig = CacheRig(num_tokens=page * rng.choice([24, 60, 200]), page_size=page, rows=6, context=600)
        self.model = Model(self.rig)
        self.stems = [[rng.randrange(3) for _ in range(6 * page + 10)] for _ in range(3)]
        self.fences: list[tuple[int, int]] = []
        """(step, fence) of what is in flight."""
        self.step = 0

    def run(self, steps: int) -> None:
        weights = {self.start: 5, self.compute: 6, self.publish: 4, self.finish: 3, self.overrun: 1}
        weights |= {self.release: 1, self.evict: 3, self.look: 2, self.flush: 0.1}
        operations, odds = list(weights), list(weights.values())
        for self.step in range(steps):
            self.rng.choices(operations, odds)[0]()
            self.end_steps(self.step - 4)
            self.model.compare()

    def end_steps(self, last: int) -> None:
        """All up to this one; they may end in any order."""
        due = [entry for entry in self.fences if entry[0] <= last]
        for entry in self.rng.sample(due, len(due)):
            self.rig.close(entry[1])
            self.fences.remove(entry)

    def end(self) -> None:
        """Everything can be given back, and then nothing is missing."""
        for running in list(self.rig.running):
            self.rig.release(running)
        self.end_steps(self.step)
        self.rig.cache.evict(10**9)
        assert self.rig.verify().free == self.rig.allocator.total_tokens
        assert self.rig.cache.total_nodes == 0

    def start(self) -> None:
        if self.rig.pool.num_free == 0:
            return
        namespace = self.rng.choice(["", "", "salt"])
        ids = random_ids(self.rng, self.stems, self.page)
        expected = self.model.longest(namespace, ids[:-1].tobytes())
        assert self.rig.cache.match_len(namespace, ids[:-1]) == expected
        running = self.rig.start(ids, namespace)
        assert running.kv.tree_len == expected
        self.model.access(namespace, ids, expected)

    def pick(self) -> Running | None:
        return self.rng.choice(self.rig.running) if self.rig.running else None

    def room_for(self, running: Running, length: int) -> bool:
        """Evict one by one, as the model does, until ``length`` fits."""
        kv, allocator = running.kv, self.rig.allocator
        old, new = np.array([kv.length], dtype=np.int32), np.array([length], dtype=np.int32)
        while allocator.tokens_needed(old, new) > allocator.free_tokens:
            if self.rig.cache.evictable_tokens == 0:
                return False
            self.model.evict_one()
        return True

    def compute(self) -> None:
        running = self.pick()
        if running is None:
            return
        length = self.rng.randrange(running.committed, len(running.ids) + 1)
        if self.room_for(running, max(length, running.kv.length)):
            assert self.rig.compute(running, length)

    def publish(self) -> None:
        if (running := self.pick()) is None:
            return
        before = running.kv.tree_len
        self.rig.publish(running)
        if running.kv.tree_len > before:
            self.model.insert(running.kv.namespace, running.ids, running.committed)

    def finish(self, fence: int | None = None) -> None:
        if (running := self.pick()) is None:
            return
        namespace, before = running.kv.namespace, running.kv.tree_len
        self.rig.finish(running, fence)
        if running.committed - running.committed % self.page > before:
            self.model.insert(namespace, running.ids, running.committed)

    def overrun(self) -> None:
        """Slots for a step in flight, then the end."""
        if (running := self.pick()) is None:
            return
        length = running.kv.length + self.rng.randrange(3)
        if self.room_for(running, length) and length > running.kv.length:
            assert self.rig.extend(running, length)
        self.finish(self.launch())

    def launch(self) -> int:
        """The fence of a step that is in flight for some operations."""
        fence = self.rig.allocator.fences.open_fence()
        self.fences.append((self.step, fence))
        return fence

    def release(self) -> None:
        if (running := self.pick()) is not None:
            self.rig.release(running, self.rng.choice([None, self.launch()]))

    def evict(self) -> None:
        """Some pages at once go in the order in which they would go one by one."""
        tokens = self.rng.randrange(1, 4 * self.page + 1)
        before = self.rig.cache.evictable_tokens
        pages = min(-(-tokens // self.page), before // self.page)
        gone = self.model.last_pages(pages)
        assert self.rig.cache.evict(tokens) == pages * self.page
        self.model.cached -= gone

    def look(self) -> None:
        namespace, ids = self.rng.choice(["", "salt"]), random_ids(self.rng, self.stems, self.page)
        expected = self.model.longest(namespace, ids.tobytes())
        assert self.rig.cache.match_len(namespace, ids) == expected
        match = self.rig.cache.match_prefix(namespace, ids)
        assert (match.device_len, match.host_len) == (expected, 0)
        self.model.access(namespace, ids, expected)

    def flush(self) -> None:
        assert self.rig.cache.reset() == (not self.rig.running)
        if not self.rig.running:
            self.model.cached.clear()


@pytest.mark.parametrize("page", [1, 2, 16, 64])
@pytest.mark.parametrize("offset", range(6))
def test_random_operations_match_naive_models(offset: int, page: int) -> None:
    print(f"BATON_RADIX_SEED={SEED + offset}")
    episode = Episode(SEED + offset, page)
    episode.run(300)
    episode.end()


@pytest.mark.parametrize("offset", range(8))
def test_partial_lookup_of_long_prompts_matches_models(offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever counts as long, the same is found."""
    print(f"BATON_RADIX_SEED={SEED + offset}")
    rng = random.Random(offset)
    monkeypatch.setattr(cache_module, "LONG_PROMPT", rng.randrange(12))
    monkeypatch.setattr(cache_module, "FIRST_LOOK", rng.randrange(1, 12))
    episode = Episode(SEED + offset, rng.choice([1, 2, 4]))
    episode.run(300)
    episode.end()


@pytest.mark.slow
@pytest.mark.parametrize("offset", range(100))
def test_random_operations_soak(offset: int) -> None:
    print(f"BATON_RADIX_SEED={SEED + 1000 + offset}")
    episode = Episode(SEED + 1000 + offset, random.Random(offset).choice([1, 2, 4, 16, 64]))
    episode.run(2000)
    episode.end()


@pytest.mark.parametrize("page", [1, 4, 16])
def test_failure_of_any_allocation_leaks_nothing(page: int) -> None:
    """The same little program, with the N-th allocation refused, for all N until none is refused any more."""
    refused, completed = -1, False
    while not completed:
        refused += 1
        completed = _program(page, refused)
    assert refused == 24  # 4 sequences × 6 chunks


def _program(page: int, refused: int) -> bool:
    """Four sequences that share and diverge, computed in turns. True if no call was the refused one."""
    rig = CacheRig(num_tokens=page * 100, page_size=page)
    rng = random.Random(7)
    calls = 0
    alloc_extend = rig.allocator.alloc_extend

    def failing(*arguments: np.ndarray) -> np.ndarray | None:
        nonlocal calls
        calls += 1
        return None if calls - 1 == refused else alloc_extend(*arguments)

    rig.allocator.alloc_extend = failing  # type: ignore[method-assign]
    shared = [rng.randrange(3) for _ in range(3 * page)]
    all_ids = [np.array(shared + [i % 2] * (3 * page), dtype=np.int32) for i in range(4)]
    sequences = [rig.start(ids) for ids in all_ids]
    for chunk in range(1, 7):
        for running in sequences:
            if running.kv.node is None:
                continue
            before = rig.verify()
            if rig.compute(running, chunk * page):
                rig.publish(running)
            else:  # no room: what was computed stays cached, all else is given back
                assert rig.verify() == before
                rig.finish(running)
            rig.verify()
    for running in list(rig.running):
        rig.finish(running)
    rig.cache.evict(10**9)
    assert rig.verify().free == rig.allocator.total_tokens
    return refused >= calls
