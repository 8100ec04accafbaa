"""Blocks are announced while a prompt can use them: with recurrent states, or windows, that is not all that is cached.

What is announced is compared with the tree, block by block (`blocks_in_tree`).
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import numpy as np
import pytest

from baton.radix import usable_ends
from baton.radix.block_events import DEVICE, HOST, AllCleared, BlockAnnouncer, BlockEvent, BlocksRemoved, BlocksStored
from baton.radix.discarding import drop_path
from baton.radix.node import StateKind
from baton.radix.repair import restore_tree
from baton.radix.tiers.host_tier import HostPolicy
from tests.doubles.block_mirror import TreeFollower
from tests.doubles.cache_rig import Running
from tests.doubles.counted_lines import lines_run
from tests.doubles.host_rig import tokens
from tests.doubles.state_rig import path_of
from tests.doubles.state_tiers import StateTierRig
from tests.doubles.window_rig import WindowRig
from tests.radix.test_random_states import random_ids
from tests.radix.test_random_windows import Episode as WindowEpisode

SEED = int(os.environ.get("BATON_RADIX_SEED", "1"))


class StateEpisode:
    """Random operations on recurrent states on a device and a host, with a follower beside them."""

    def __init__(self, seed: int, page: int) -> None:
        self.rng = rng = random.Random(seed)
        self.page = page
        self.rig = StateTierRig(
            num_tokens=page * rng.choice([60, 200]),
            page_size=page,
            rows=5,
            context=40 * page,
            states=rng.choice([12, 30]),
            host_tokens=page * rng.choice([40, 200]),
            host_states=rng.choice([3, 20]),
            policy=HostPolicy(min_hits=rng.choice([0, 2]), write_back=rng.random() < 0.3),
        )
        self.follower = TreeFollower(self.rig.cache, page * rng.choice([1, 2, 4]), self.rig.host_allocator.total_tokens)
        self.stems = [[rng.randrange(3) for _ in range(6 * page + 10)] for _ in range(3)]
        self.loads = self.hidden = 0

    def run(self, steps: int) -> None:
        rng, rig = self.rng, self.rig
        odds: dict[Callable[[], object], float] = {
            self.start: 5,
            self.compute: 8,
            self.leave: 3,
            self.finish: 4,
            self.cut: 1,
            self.fork: 1,
            lambda: self.with_running(rig.release): 0.5,
            lambda: rig.cache.evict(rng.randrange(1, 8 * self.page)): 2,
            lambda: rig.cache.evict_states(rng.randrange(1, 4), kept_too=True): 2,
            lambda: rig.tier.evict(rng.randrange(1, 8 * self.page)): 1,
            self.evict_state_from_host: 1,
            rig.pump: 3,
            self.end_copy: 5,
            self.load: 3,
            self.drop: 0.4,
            self.recover: 0.2,
            self.reset: 0.1,
            self.abandon: 0.05,
            rig.tier.discard_copies: 0.05,
        }
        for _ in range(steps):
            rng.choices(list(odds), list(odds.values()))[0]()
            if rng.random() < 0.6:  # several changes in one batch of events
                self.follower.compare()

    def with_running(self, do: Callable[[Running], object]) -> None:
        if self.rig.running:
            do(self.rng.choice(self.rig.running))

    def start(self) -> None:
        ids, namespace = random_ids(self.rng, self.stems, self.page), self.rng.choice(["", "", "salt"])
        if self.rig.pool.num_free and (not self.rig.copies or not self.rig.cache.match_prefix(namespace, ids).host_len):
            self.rig.start(ids, namespace)

    def compute(self) -> None:
        rig, rng = self.rig, self.rng
        if rig.running and (rig.slots.free or rig.nodes.evictable):
            running = rng.choice(rig.running)
            length = rng.randint(running.committed, len(running.ids))
            points = range(running.kv.length + 1, length)
            chosen = sorted(rng.sample(points, min(len(points), rng.choice([0, 0, 2]))))
            if length > running.kv.length and not rig.extend(running, length, chosen, rng.random() < 0.5):
                return
            rig.compute(running, max(running.committed, min(length, running.kv.length)))
            rig.settle(running)

    def kind(self) -> StateKind:
        return self.rng.choice([StateKind.PASSING, StateKind.TURN_END])

    def leave(self) -> None:
        self.with_running(lambda running: self.rig.leave(running, self.kind()))

    def finish(self) -> None:
        self.with_running(lambda running: self.rig.finish_turn(running, self.kind()))

    def cut(self) -> None:
        self.with_running(lambda running: self.rig.cut(running, self.rng.randint(0, running.committed)))

    def fork(self) -> None:
        rig = self.rig
        if rig.running and rig.pool.num_free:
            running = self.rng.choice(rig.running)
            if running.committed >= running.kv.tree_len:
                rig.fork(running)

    def evict_state_from_host(self) -> None:
        if (node := self.rig.nodes.evict_from_host()) is not None:
            self.rig.cache.mark_useless(node)

    def end_copy(self) -> None:
        if self.rig.copies:
            self.rig.end(self.rng.choice(list(self.rig.copies)), ok=self.rng.random() < 0.8)

    def load(self) -> None:
        rig = self.rig
        away = [node for node in rig.on_host.nodes.values() if not node.state]
        if away and rig.slots.free:
            node = self.rng.choice(away)
            namespace, ids = path_of(rig, node)
            if rig.allocator.free_tokens >= node.prefix_len:
                self.loads += rig.load(np.frombuffer(ids, dtype=np.int32), namespace) is not None

    def drop(self) -> None:
        tree = self.rig.cache.tree
        nodes = [node for node in tree.nodes() if tree.reachable(node) is node]
        if nodes:
            node = self.rng.choice(nodes)
            drop_path(self.rig.cache, node, self.rng.randrange(node.prefix_len // self.page) * self.page)
            self.hidden += any(map(tree.is_hidden, tree.nodes()))

    def recover(self) -> None:
        """States of some nodes are lost in an exception, and all that follows from them is counted anew."""
        rig = self.rig
        for node in rig.cache.tree.nodes():
            if node.state and not node.state_loading and not rig.copies and self.rng.random() < 0.3:
                rig.slots.drop(node.state)
                node.state = 0
        restore_tree(rig.cache, [running.kv for running in rig.running])

    def reset(self) -> None:
        for running in list(self.rig.running):
            self.rig.release(running)
        assert self.rig.cache.reset()

    def abandon(self) -> None:
        self.rig.cache.discard_all()
        self.rig.running.clear()


@pytest.mark.parametrize("page", [1, 4, 16])
@pytest.mark.parametrize("offset", range(4))
def test_random_states(offset: int, page: int) -> None:
    print(f"BATON_RADIX_SEED={SEED + offset}")
    episode = StateEpisode(SEED + offset, page)
    episode.run({1: 500, 4: 300, 16: 150}[page])


def test_random_states_cover_all_paths() -> None:
    print(f"BATON_RADIX_SEED={SEED}")
    episodes = [StateEpisode(SEED + 50 + offset, 1) for offset in range(3)]
    for episode in episodes:
        episode.run(500)
    counts = [episode.rig.tier.counts for episode in episodes]
    assert sum(episode.loads for episode in episodes) > 5 and sum(episode.hidden for episode in episodes) > 0
    assert sum(episode.follower.of_no_use for episode in episodes) > 50
    assert sum(count.loaded_states for count in counts) > 3 and sum(count.failed_stores for count in counts) > 3


@pytest.mark.slow
@pytest.mark.parametrize("offset", range(100))
def test_random_states_soak(offset: int) -> None:
    print(f"BATON_RADIX_SEED={SEED + 1000 + offset}")
    StateEpisode(SEED + 1000 + offset, random.Random(offset).choice([1, 2, 4, 16])).run(2000)


def follow_windows(seed: int, page: int, steps: int, monkeypatch: pytest.MonkeyPatch) -> TreeFollower:
    """The operations of the random test of windows."""
    episode = WindowEpisode(seed, page)
    follower = TreeFollower(episode.rig.cache, page * episode.rng.choice([1, 2]))
    monkeypatch.setattr(episode.rig, "verify", lambda: episode.rng.random() < 0.6 and follower.compare())
    episode.run(steps)
    return follower


@pytest.mark.parametrize("page", [1, 4, 16])
def test_random_windows(page: int, monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"BATON_RADIX_SEED={SEED}")
    steps = {1: 300, 4: 200, 16: 100}[page]
    followers = [follow_windows(SEED + offset, page, steps, monkeypatch) for offset in range(4)]
    assert sum(follower.of_no_use for follower in followers) > 10


@pytest.mark.slow
@pytest.mark.parametrize("offset", range(100))
def test_random_windows_soak(offset: int, monkeypatch: pytest.MonkeyPatch) -> None:
    print(f"BATON_RADIX_SEED={SEED + 1000 + offset}")
    follow_windows(SEED + 1000 + offset, random.Random(offset).choice([1, 2, 4, 16]), 1000, monkeypatch)


def state_rig(**options) -> tuple[StateTierRig, BlockAnnouncer]:
    """A turn of 16 tokens and one of 24 that continues it, in blocks of 4."""
    rig = StateTierRig(**options)
    announcer = BlockAnnouncer(rig.cache, 4, rig.host_allocator.total_tokens)
    for count in (16, 24):
        rig.turn(tokens(count))
    return rig, announcer


def announced(events: list[BlockEvent]) -> list[tuple[str, str, int]]:
    """(kind, tier, number of blocks) of each event."""
    return [
        (type(event).__name__, event.tier, len(event.hashes)) for event in events if not isinstance(event, AllCleared)
    ]


def lose_state(rig: StateTierRig, count: int) -> None:
    rig.cache.remove_state(rig.cache.find_prefix("", tokens(count))[0])


class TestStates:
    def test_blocks_are_announced_when_a_state_comes_and_withdrawn_with_the_last(self) -> None:
        rig = StateTierRig()
        announcer = BlockAnnouncer(rig.cache, 4)
        running = rig.start(tokens(24))
        rig.compute(running)
        rig.publish(running)
        assert announcer.take_events() == []
        rig.leave(running, StateKind.TURN_END)
        [stored] = announcer.take_events()
        assert isinstance(stored, BlocksStored) and stored.parent is None and stored.ids == tokens(24).tobytes()
        lose_state(rig, 24)
        assert announcer.take_events() == [BlocksRemoved(DEVICE, stored.hashes[::-1])]
        rig.leave(running, StateKind.TURN_END)
        assert announcer.take_events() == [stored]

    def test_blocks_up_to_the_state_above_stay(self) -> None:
        rig, announcer = state_rig()
        announcer.take_events()
        lose_state(rig, 24)
        assert announced(announcer.take_events()) == [("BlocksRemoved", DEVICE, 2)]

    def test_state_further_down_keeps_blocks_announced(self) -> None:
        rig, announcer = state_rig()
        announcer.take_events()
        lose_state(rig, 16)
        assert announcer.take_events() == []

    def test_state_that_came_and_went_in_a_turn_hides_no_loss_above_it(self) -> None:
        rig = StateTierRig()
        announcer = BlockAnnouncer(rig.cache, 4)
        rig.turn(tokens(16))
        announcer.take_events()
        rig.turn(tokens(24))
        lose_state(rig, 16)
        lose_state(rig, 24)
        assert announced(announcer.take_events()) == [("BlocksRemoved", DEVICE, 4)]

    def test_state_that_came_and_went_in_a_turn_hides_none_above_it(self) -> None:
        """The split gives the upper part what the lower one was before its state counted."""
        rig = StateTierRig()
        announcer = BlockAnnouncer(rig.cache, 4)
        rig.turn(tokens(24))
        rig.turn(tokens(16))
        lose_state(rig, 24)
        assert announced(announcer.take_events()) == [("BlocksStored", DEVICE, 4)]

    def test_state_that_moves_on_in_a_turn_makes_no_events(self) -> None:
        rig = StateTierRig()
        announcer = BlockAnnouncer(rig.cache, 4)
        running = rig.start(tokens(24))
        rig.compute(running, 16)
        rig.leave(running, StateKind.PASSING)
        announcer.take_events()
        lose_state(rig, 16)
        rig.compute(running)
        rig.leave(running, StateKind.PASSING)
        [stored] = announcer.take_events()
        assert isinstance(stored, BlocksStored) and stored.ids == tokens(8, 17).tobytes()

    def test_state_on_the_host_keeps_blocks_announced_on_both_tiers(self) -> None:
        rig, announcer = state_rig()
        rig.store_all()
        announcer.take_events()
        rig.cache.evict_states(2, kept_too=True)
        assert announcer.take_events() == []
        for _ in range(2):
            rig.nodes.evict_from_host()
        removed = announced(announcer.take_events())
        blocks = {tier: sum(count for _, where, count in removed if where == tier) for tier in (DEVICE, HOST)}
        assert blocks == {DEVICE: 6, HOST: 6} and {kind for kind, *_ in removed} == {"BlocksRemoved"}

    def test_blocks_on_the_host_go_with_the_last_state_below_them(self) -> None:
        rig = StateTierRig()
        announcer = BlockAnnouncer(rig.cache, 4, rig.host_allocator.total_tokens)
        for first in (17, 500):
            rig.turn(np.concatenate([tokens(16), tokens(8, first)]))
        rig.store_all()
        rig.cache.evict(100)
        announcer.take_events()
        rig.tier.evict(8)
        assert announced(announcer.take_events()) == [("BlocksRemoved", HOST, 2)]
        rig.tier.evict(8)
        assert rig.tier.tokens == 16
        assert announced(announcer.take_events()) == [("BlocksRemoved", HOST, 2), ("BlocksRemoved", HOST, 4)]

    def test_other_conversations_are_not_looked_at(self) -> None:
        counts = set[int]()
        for conversations in (2, 40):
            rig = StateTierRig(num_tokens=2048, states=100)
            announcer = BlockAnnouncer(rig.cache, 4)
            for number in range(conversations):
                rig.turn(np.concatenate([tokens(8), tokens(8, 100 * (number + 1))]))
            announcer.take_events()
            ids = np.concatenate([tokens(8), tokens(8, 100)])
            rig.cache.remove_state(rig.cache.find_prefix("", ids)[0])
            counts.add(lines_run(announcer.take_events, usable_ends))
        assert len(counts) == 1


class TestWindows:
    def rig(self) -> tuple[WindowRig, TreeFollower]:
        rig = WindowRig(512, 1, rows=4, context=256, windows=256, window=20)
        return rig, TreeFollower(rig.cache, 1)

    def test_blocks_are_withdrawn_where_the_window_has_gone(self) -> None:
        rig, _ = self.rig()
        announcer = BlockAnnouncer(rig.cache, 4)
        rig.insert(tokens(60))
        [stored] = announcer.take_events()
        assert isinstance(stored, BlocksStored) and len(stored.hashes) == 15
        rig.cache.evict_windows(rig.windows.evictable_tokens - 19)
        assert announcer.take_events() == []
        rig.cache.evict_windows(1)
        assert announcer.take_events() == [BlocksRemoved(DEVICE, stored.hashes[::-1])]
        rig.insert(tokens(61))  # computed anew
        assert announcer.take_events() == [stored]

    def test_recomputed_beginning_makes_what_follows_usable_again(self) -> None:
        """The end at 62 sees tokens from 43 on, so not those of the first node, but of the second."""
        rig, follower = self.rig()
        for count in (30, 45, 48, 62):
            rig.insert(tokens(count))
        rig.cache.evict_windows(rig.windows.evictable_tokens - 17)
        assert rig.cache.match_len("", tokens(62)) == 0
        follower.compare()
        assert not follower.mirror.on.get(DEVICE)
        rig.insert(tokens(45))
        assert rig.cache.match_len("", tokens(62)) == 62
        follower.compare()

    def test_part_that_a_split_made_is_looked_at_where_the_rest_has_lost_its_window(self) -> None:
        rig, follower = self.rig()
        rig.insert(tokens(60))
        rig.insert(np.concatenate([tokens(54), tokens(6, 500)]))
        rig.cache.match_prefix("", tokens(54))
        rig.cache.evict_windows(rig.windows.evictable_tokens - 19)
        assert rig.cache.match_len("", tokens(60)) == 54
        follower.compare()

    def test_nodes_without_slots_are_of_use_where_a_token_sees_itself_alone(self) -> None:
        rig = WindowRig(512, 1, rows=4, context=256, windows=256, window=1)
        follower = TreeFollower(rig.cache, 1)
        running = rig.start(tokens(60))
        rig.compute(running)
        length = running.kv.window_start
        rig.cut(running, length)
        rig.publish(running)
        follower.compare()
        assert len(follower.mirror.on[DEVICE]) == length > 50

    def test_slots_lost_in_an_exception_are_noticed(self) -> None:
        rig, follower = self.rig()
        rig.insert(tokens(60))
        follower.compare()
        [node] = rig.cache.tree.nodes()
        rig.windows.take_back(node.value)
        rig.nodes.restore([node])
        follower.compare()
        assert not follower.mirror.on[DEVICE]
