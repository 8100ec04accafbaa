"""Whoever applies all events knows at any time which whole blocks are on which tier."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import numpy as np
import pytest

from baton.radix.block_events import (
    DEVICE,
    HOST,
    AllCleared,
    BlockAnnouncer,
    BlocksRemoved,
    BlocksStored,
    root_hash,
    scope_name,
)
from baton.radix.discarding import drop_path
from baton.radix.tiers.host_tier import HostPolicy
from tests.doubles.block_mirror import BlockMirror, blocks_in_tree, slow_hash
from tests.doubles.cache_rig import CacheRig, Running, int32
from tests.doubles.host_rig import DiskRig, tokens

SEED = int(os.environ.get("BATON_RADIX_SEED", "1"))


class Episode:
    """Random operations on a device, a host and a disk, with a follower beside them."""

    def __init__(self, seed: int, page: int) -> None:
        self.rng = rng = random.Random(seed)
        self.page, self.block = page, page * rng.choice([1, 2, 4])
        self.rig = DiskRig(
            4 * page,
            host_tokens=page * rng.choice([30, 100]),
            num_tokens=page * rng.choice([40, 80, 200]),
            page_size=page,
            rows=6,
            context=40 * page,
            policy=HostPolicy(min_hits=rng.choice([0, 2]), write_back=rng.random() < 0.3),
        )
        self.announcer = BlockAnnouncer(self.rig.cache, self.block, self.rig.host_allocator.total_tokens)
        self.mirror = BlockMirror(self.block)
        self.stems = [[rng.randrange(3) for _ in range(12 * page)] for _ in range(3)]
        self.sent = [("", tokens(1))]
        self.hidden = self.events = 0

    def run(self, steps: int) -> None:
        rng, rig = self.rng, self.rig
        odds: dict[Callable[[], object], float] = {
            self.start: 5,
            self.compute: 6,
            lambda: self.with_running(rig.publish): 4,
            lambda: self.with_running(rig.finish): 3,
            lambda: self.with_running(rig.release): 1,
            lambda: rig.cache.evict(rng.randrange(1, 20 * self.page)): 4,
            rig.pump: 3,
            self.end_copy: 6,
            self.load: 6,
            lambda: rig.tier.evict(rng.randrange(1, 10 * self.page)): 1,
            rig.pump_disk: 2,
            self.end_disk: 3,
            self.read: 2,
            self.drop: 0.3,
            self.reset: 0.1,
            self.abandon: 0.05,
            self.lose_host: 0.05,
        }
        for _ in range(steps):
            rng.choices(list(odds), list(odds.values()))[0]()
            self.compare()

    def compare(self) -> None:
        events = self.announcer.take_events()
        self.events += len(events)
        self.mirror.apply(events)
        expected = blocks_in_tree(self.rig.cache, self.block)
        assert {tier: self.mirror.on.get(tier, set()) for tier in expected} == expected

    def ids(self) -> np.ndarray:
        stem = self.rng.choice(self.stems)
        ids = stem[: self.rng.randrange(1, len(stem))]
        return np.array([*ids, *(self.rng.randrange(3) for _ in range(self.rng.randrange(1, 5 * self.page)))], np.int32)

    def namespace(self) -> str:
        return self.rng.choice(["", "", "salt"])

    def start(self) -> None:
        if self.rig.pool.num_free:
            self.sent = [*self.sent[-20:], (self.namespace(), self.ids())]
            namespace, ids = self.sent[-1]
            self.rig.start(ids, namespace)

    def with_running(self, do: Callable[[Running], object]) -> None:
        if self.rig.running:
            do(self.rng.choice(self.rig.running))

    def compute(self) -> None:
        self.with_running(lambda one: self.rig.compute(one, self.rng.randrange(one.committed, len(one.ids) + 1)))

    def end_copy(self) -> None:
        if self.rig.copies:
            fence = self.rng.choice(list(self.rig.copies))
            self.rig.end(fence, ok=self.rng.random() < (0.9 if self.rig.copies[fence].to_host else 0.6))

    def load(self) -> None:
        namespace, ids = self.rng.choice(self.sent)
        self.rig.load(ids, namespace)

    def end_disk(self) -> None:
        if self.rig.orders:
            self.rig.end_disk(self.rng.choice(list(self.rig.orders)), self.rng.choice([0, 1, 1 << 30, 1 << 30]))

    def read(self) -> None:
        if (found := self.rig.disk.find_blocks(*self.rng.choice(self.sent))) is not None:
            self.rig.disk.begin_read(found, 1.0)

    def drop(self) -> None:
        nodes = list(self.rig.cache.tree.nodes())
        if nodes:
            node = self.rng.choice(nodes)
            kept = self.rng.randrange(node.prefix_len // self.page) * self.page
            if self.rig.cache.tree.reachable(node) is node:
                drop_path(self.rig.cache, node, kept)
                self.hidden += any(map(self.rig.cache.tree.is_hidden, self.rig.cache.tree.nodes()))

    def reset(self) -> None:
        for running in list(self.rig.running):
            self.rig.release(running)
        assert self.rig.cache.reset()

    def abandon(self) -> None:
        self.rig.cache.discard_all()
        self.rig.running.clear()

    def lose_host(self) -> None:
        self.rig.tier.discard_copies()


@pytest.mark.parametrize("page", [1, 4, 16, 64])
@pytest.mark.parametrize("offset", range(6))
def test_event_follower_tracks_blocks_on_all_tiers(offset: int, page: int) -> None:
    print(f"BATON_RADIX_SEED={SEED + offset}")
    Episode(SEED + offset, page).run({1: 1500, 4: 800, 16: 400, 64: 150}[page])


def test_announcer_simulation_covers_all_paths() -> None:
    print(f"BATON_RADIX_SEED={SEED}")
    episodes = [Episode(SEED + offset, 1) for offset in range(3)]
    for episode in episodes:
        episode.run(1500)
    counts = [episode.rig.tier.counts for episode in episodes]
    assert sum(episode.events for episode in episodes) > 300
    assert sum(episode.hidden for episode in episodes) > 3 and sum(count.loaded for count in counts) > 20
    assert sum(count.failed_stores for count in counts) > 5 and sum(count.failed_loads for count in counts) > 5
    assert sum(episode.rig.disk.counts.adopted for episode in episodes) > 5
    assert sum(episode.mirror.cleared for episode in episodes) > 2


@pytest.mark.slow
@pytest.mark.parametrize("offset", range(100))
def test_soak(offset: int) -> None:
    print(f"BATON_RADIX_SEED={SEED + 1000 + offset}")
    Episode(SEED + 1000 + offset, random.Random(offset).choice([1, 2, 4, 16, 64])).run(5000)


def announced(rig: CacheRig, block: int) -> BlockAnnouncer:
    return BlockAnnouncer(rig.cache, block)


def test_blocks_are_announced_when_their_last_page_arrives() -> None:
    rig = CacheRig(page_size=4)
    announcer = announced(rig, 8)
    running = rig.start(tokens(30))
    rig.compute(running, 7)
    rig.publish(running)
    assert announcer.take_events() == []
    rig.compute(running, 21)
    rig.publish(running)
    [stored] = announcer.take_events()
    first, second = (slow_hash("", tokens(end).tobytes(), 8) for end in (8, 16))
    assert stored == BlocksStored(DEVICE, [first, second], None, tokens(16).tobytes())
    rig.compute(running, 24)
    rig.publish(running)
    [more] = announcer.take_events()
    third = slow_hash("", tokens(24).tobytes(), 8)
    assert more == BlocksStored(DEVICE, [third], second, tokens(8, 17).tobytes())
    rig.finish(running)
    rig.cache.evict(4)
    assert announcer.take_events() == [BlocksRemoved(DEVICE, [third])]
    rig.cache.evict(4)
    assert announcer.take_events() == []  # what is left of that block was not announced any more
    rig.cache.evict(100)
    assert announcer.take_events() == [BlocksRemoved(DEVICE, [second, first])]


def test_namespaces_have_separate_block_hashes() -> None:
    rig = CacheRig()
    announcer = announced(rig, 4)
    for namespace in ("", "alice", "bob"):
        rig.insert(tokens(9), namespace)
    stored = announcer.take_events()
    assert [event.scope for event in stored if isinstance(event, BlocksStored)] == [
        "", scope_name("alice"), scope_name("bob")
    ]  # fmt: skip
    assert len({name for event in stored if isinstance(event, BlocksStored) for name in event.hashes}) == 6
    assert "alice" not in repr(stored) and len(scope_name("alice")) == 16 and scope_name("") == ""
    rig.insert(np.append(tokens(9), tokens(8, 50)), "alice")
    [more] = announcer.take_events()
    assert isinstance(more, BlocksStored) and more.scope == "" and more.parent is not None


def test_load_announces_hashes_of_host_copy() -> None:
    rig = DiskRig(4, page_size=4, num_tokens=64)
    announcer = BlockAnnouncer(rig.cache, 4, 512)
    rig.insert(tokens(16))
    rig.store_all()
    rig.cache.evict(16)
    stored, copied, removed = announcer.take_events()
    assert isinstance(stored, BlocksStored) and isinstance(copied, BlocksStored) and isinstance(removed, BlocksRemoved)
    assert (copied.tier, copied.hashes, copied.ids) == (HOST, stored.hashes, stored.ids)
    assert removed == BlocksRemoved(DEVICE, stored.hashes[::-1])
    fence = rig.load(tokens(16))
    assert fence is not None
    assert announcer.take_events() == [stored]
    rig.end(fence)
    assert announcer.take_events() == []


def test_announcer_may_leave_out_lower_tiers() -> None:
    rig = DiskRig(4, page_size=4, num_tokens=64)
    announcer = announced(rig, 4)
    rig.insert(tokens(16))
    rig.store_all()
    rig.cache.evict(16)
    rig.tier.evict(16)
    assert [event.tier for event in announcer.take_events() if not isinstance(event, AllCleared)] == [DEVICE, DEVICE]


def test_reset_replaces_pending_events() -> None:
    rig = CacheRig()
    announcer = announced(rig, 1)
    rig.insert(int32(1, 2, 3))
    assert rig.cache.reset()
    assert announcer.take_events() == [AllCleared()]


def test_changes_below_hidden_path_are_not_announced() -> None:
    rig = CacheRig()
    announcer = announced(rig, 2)
    running = rig.start(tokens(12))
    rig.compute(running, 5)
    rig.publish(running)
    drop_path(rig.cache, running.kv.open_node(), 3)
    stored, removed = announcer.take_events()
    assert isinstance(stored, BlocksStored) and removed == BlocksRemoved(DEVICE, stored.hashes[1:])
    rig.compute(running, 12)
    rig.publish(running)  # below what is hidden
    assert announcer.take_events() == []
    rig.insert(tokens(12))
    [again] = announcer.take_events()
    assert isinstance(again, BlocksStored) and again.hashes[0] == stored.hashes[1] and len(again.hashes) == 5
    rig.finish(running)
    rig.cache.evict(9)
    assert all(isinstance(event, BlocksRemoved) for event in announcer.take_events())


def test_block_size_must_be_multiple_of_page_size() -> None:
    with pytest.raises(ValueError, match="a block of 24 tokens is no multiple of the page size 16"):
        BlockAnnouncer(CacheRig(page_size=16).cache, 24)
    assert root_hash("") != root_hash("a")
