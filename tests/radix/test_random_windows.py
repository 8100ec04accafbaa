"""Sliding windows in the tree against a naive model, from seeds: how far a prefix can be continued, and what
is evicted.

The naive model asks the pool, slot by slot, whether all is there that the next token sees. All invariants, and what the
slots of each sequence hold, are checked after every operation.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import numpy as np
import pytest

from baton.radix.discarding import drop_path
from tests.doubles.cache_rig import Running
from tests.doubles.window_rig import WindowRig
from tests.radix.test_random_states import random_ids

SEED = int(os.environ.get("BATON_RADIX_SEED", "1"))


class Episode:
    """Random operations on one rig."""

    def __init__(self, seed: int, page: int) -> None:
        self.rng = rng = random.Random(seed)
        self.page = page
        tokens = page * rng.choice([24, 60, 200])
        windows = page * rng.choice([20, 24, 60])
        self.rig = WindowRig(tokens, page, rows=6, context=600, windows=min(tokens, windows), window=rng.randint(1, 30))
        self.stems = [[rng.randrange(3) for _ in range(6 * page + 10)] for _ in range(3)]
        self.fences: list[tuple[int, int]] = []
        self.unused = 0
        """Matches of which a part could not be continued."""

    def run(self, steps: int) -> None:
        weights: dict[Callable[[], None], float] = {self.start: 5, self.compute: 9, self.publish: 3, self.finish: 4}
        weights |= {self.overrun: 1, self.release: 1, self.cut: 2, self.fork: 1, self.evict: 2, self.evict_windows: 3}
        weights |= {self.look: 3, self.drop: 0.3, self.flush: 0.1}
        operations, odds = list(weights), list(weights.values())
        for step in range(steps):
            self.rng.choices(operations, odds)[0]()
            for entry in [entry for entry in self.fences if entry[0] < step - 4]:
                self.rig.close(entry[1])
                self.fences.remove(entry)
            self.fences = [(when or step, fence) for when, fence in self.fences]
            self.rig.verify()

    def end(self) -> None:
        """Every slot can be evicted, and none is missing."""
        for running in list(self.rig.running):
            self.rig.release(running)
        for _, fence in self.fences:
            self.rig.close(fence)
        self.rig.cache.evict_windows(10**9)
        assert self.rig.windows.free_tokens == self.rig.windows.total_tokens
        self.rig.cache.evict(10**9)
        assert self.rig.verify().free == self.rig.allocator.total_tokens

    def usable(self, namespace: str, ids: np.ndarray) -> int:
        """The longest cached prefix before which all is there that the next token sees."""
        cache, windows = self.rig.cache, self.rig.windows
        _, cached, last = cache.find_prefix(namespace, ids)
        path = [np.empty(0, dtype=np.int32), *cache.tree.path_values(last, cache.tree.root)]
        there = windows.slots_of(np.concatenate(path)[:cached]) >= self.page
        lengths = range(cached, 0, -self.page)
        return next((n for n in lengths if there[max(0, n - windows.window + 1) : n].all()), 0)

    def pick(self) -> Running | None:
        return self.rng.choice(self.rig.running) if self.rig.running else None

    def launch(self) -> int:
        fence = self.rig.allocator.fences.open_fence()
        self.fences.append((0, fence))
        return fence

    def start(self) -> None:
        if self.rig.pool.num_free:
            namespace, ids = self.rng.choice(["", "", "salt"]), random_ids(self.rng, self.stems, self.page)
            expected = self.usable(namespace, ids[:-1])
            assert self.rig.start(ids, namespace).kv.tree_len == expected

    def look(self) -> None:
        namespace, ids = self.rng.choice(["", "salt"]), random_ids(self.rng, self.stems, self.page)
        expected, cached = self.usable(namespace, ids), self.rig.cache.find_prefix(namespace, ids)[1]
        assert self.rig.cache.match_len(namespace, ids) == expected
        match = self.rig.cache.match_prefix(namespace, ids)
        assert (match.device_len, match.unused) == (expected, cached - expected)
        self.unused += match.unused > 0

    def compute(self) -> None:
        if (running := self.pick()) is None:
            return
        if running.committed == len(running.ids):
            more = [self.rng.randrange(3) for _ in range(self.rng.randrange(1, 2 * self.page + 2))]
            running.ids = np.append(running.ids, np.array(more, dtype=np.int32))[:590]
        length = self.rng.randint(running.committed, len(running.ids))
        if length > running.committed and running.kv.length <= length:
            self.rig.compute(running, length)

    def publish(self) -> None:
        if (running := self.pick()) is not None:
            self.rig.publish(running)

    def finish(self) -> None:
        if (running := self.pick()) is not None:
            self.rig.finish(running)

    def overrun(self) -> None:
        """A step in flight writes more tokens when the sequence ends."""
        running = self.pick()
        if running is not None and running.kv.length < 580 and self.rig.extend(running, running.kv.length + 2):
            self.rig.finish(running, self.launch())

    def release(self) -> None:
        if (running := self.pick()) is not None:
            self.rig.release(running, self.launch() if self.rng.random() < 0.5 else None)

    def cut(self) -> None:
        if (running := self.pick()) is not None and running.committed:
            length = running.committed - self.rng.choice([0, 1, 3, self.rng.randint(0, running.committed)])
            self.rig.cut(running, max(0, length))
            assert running.committed <= max(0, length)

    def fork(self) -> None:
        running = self.pick()
        if running is not None and self.rig.pool.num_free and running.kv.length == running.committed:
            self.rig.fork(running)

    def evict(self) -> None:
        self.rig.cache.evict(self.rng.randrange(1, 4 * self.page))

    def evict_windows(self) -> None:
        """As many as are asked for, in whole pages, if there are so many."""
        count, windows = self.rng.randrange(1, 4 * self.page), self.rig.windows
        before, there = windows.free_tokens, windows.evictable_tokens
        self.rig.cache.evict_windows(count)
        assert windows.free_tokens - before >= min(count, there)

    def drop(self) -> None:
        if (running := self.pick()) is not None and running.kv.node is not None:
            node = running.kv.node
            self.rig.release(running)
            drop_path(self.rig.cache, node, self.rng.randrange(3) * self.page)

    def flush(self) -> None:
        self.rig.cache.reset()


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("seed", range(6))
def test_episode(seed: int, page: int) -> None:
    print(f"BATON_RADIX_SEED={SEED}")
    episode = Episode(100 * SEED + seed, page)
    episode.run(400)
    assert episode.unused
    episode.end()


def rig_of(window: int) -> WindowRig:
    return WindowRig(512, 1, rows=4, context=256, windows=256, window=window)


def ids_of(start: int, count: int) -> np.ndarray:
    return np.arange(start, start + count, dtype=np.int32)


def test_what_no_end_needs_is_evicted_first_and_then_what_the_oldest_end_needs() -> None:
    rig = rig_of(20)
    rig.insert(ids_of(0, 60))  # keeps 25, or a few more
    rig.insert(ids_of(0, 100))
    rig.insert(ids_of(500, 60))
    rig.cache.match_prefix("", ids_of(0, 100))
    assert rig.cache.match_len("", ids_of(0, 60)) == 60
    rig.cache.evict_windows(1)
    assert rig.cache.match_len("", ids_of(0, 60)) == 0 and rig.cache.match_len("", ids_of(0, 100)) == 100
    rig.cache.evict_windows(rig.windows.evictable_tokens - 2 * 19)
    assert rig.cache.match_len("", ids_of(500, 60)) == 60
    rig.cache.evict_windows(1)
    assert rig.cache.match_len("", ids_of(500, 60)) == 0 and rig.cache.match_len("", ids_of(0, 100)) == 100


def test_window_of_one_token_needs_nothing() -> None:
    rig = rig_of(1)
    rig.insert(ids_of(0, 60))
    rig.cache.evict_windows(rig.windows.evictable_tokens)
    assert rig.cache.match_len("", ids_of(0, 60)) == 60 and rig.cache.match_len("", ids_of(0, 30)) == 30


def test_many_short_turns_keep_the_window_of_the_last() -> None:
    """Each turn is shorter than the window, so it reaches over the ends of others."""
    rig = rig_of(40)
    for turn in range(1, 20):
        rig.insert(ids_of(0, 7 * turn))
    rig.cache.evict_windows(rig.windows.evictable_tokens - 39)
    assert rig.cache.match_len("", ids_of(0, 7 * 19)) == 7 * 19
    assert rig.cache.match_len("", ids_of(0, 7 * 18)) == 0
