"""Recurrent states in the tree against a naive model, from seeds: which prefixes carry one, what it is of, what rank it
has, and which go first.

The model is a dict from prefixes to what is known of their states. All invariants are checked after every operation.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from baton.radix.discarding import retire
from baton.radix.node import StateKind
from baton.radix.node_states import KEPT, PASSING, RETIRED
from baton.radix.repair import restore_tree
from tests.doubles.cache_rig import Running
from tests.doubles.state_rig import StateRig, path_of

SEED = int(os.environ.get("BATON_RADIX_SEED", "1"))

Prefix = tuple[str, bytes]


@dataclass
class Known:
    """A state in the tree."""

    kind: StateKind
    cost: int = 0
    rank: float = 0.0

    @property
    def group(self) -> int:
        """The states of a lower one go first."""
        return {StateKind.RETIRED: RETIRED, StateKind.PASSING: PASSING}.get(self.kind, KEPT)


class Model:
    """Which prefixes carry a state. A prefix is (namespace, id bytes), always in whole pages."""

    def __init__(self, rig: StateRig) -> None:
        self.rig = rig
        self.width = 4 * rig.cache.page_size
        self.states: dict[Prefix, Known] = {}
        self.floors = dict.fromkeys((RETIRED, PASSING, KEPT), 0.0)
        """By class."""

    def longest(self, namespace: str, data: bytes) -> int:
        """Tokens of the longest prefix of ``data`` with a state."""
        found = [len(key) for ns, key in self.states if ns == namespace and data.startswith(key)]
        return max(found, default=0) // 4

    def branches(self, prefix: Prefix) -> int:
        """The different pages that follow a prefix on the way to states."""
        namespace, start = prefix
        below = [key for ns, key in self.states if ns == namespace and key.startswith(start) and key != start]
        return len({key[len(start) : len(start) + self.width] for key in below})

    def above(self, prefix: Prefix) -> list[Prefix]:
        """All prefixes of one, the longest first."""
        namespace, key = prefix
        return [(namespace, key[:end]) for end in range(len(key) - self.width, 0, -self.width)]

    def cost(self, prefix: Prefix) -> int:
        """Tokens that computing a state anew takes."""
        namespace, key = prefix
        return len(key) // 4 - self.longest(namespace, key[:-1])

    def use(self, prefix: Prefix) -> None:
        known = self.states[prefix]
        self.set_kind(prefix, max(known.kind, StateKind.PASSING))
        known.cost = self.cost(prefix)
        known.rank = self.floors[known.group] + known.cost

    def set_kind(self, prefix: Prefix, kind: StateKind) -> None:
        """It stays as far above the floor of its class."""
        known = self.states[prefix]
        known.rank -= self.floors[known.group]
        known.kind = kind
        known.rank += self.floors[known.group]

    def put(self, prefix: Prefix, kind: StateKind) -> None:
        self.states.setdefault(prefix, Known(StateKind.PASSING))
        for each in [prefix, *self.above(prefix)]:
            if each in self.states and self.branches(each) > 1:
                self.set_kind(each, StateKind.BRANCH)
        self.set_kind(prefix, max(self.states[prefix].kind, kind))
        self.use(prefix)
        if kind is StateKind.TURN_END and self.branches(prefix) < 2:
            self.demote_turns_before(prefix)

    def demote_turns_before(self, prefix: Prefix) -> None:
        """The turn ends before this one are kept no longer, up to where several continue."""
        for each in self.above(prefix):
            if self.branches(each) > 1:
                return
            if each in self.states and self.states[each].kind is StateKind.TURN_END:
                self.set_kind(each, StateKind.PASSING)

    def evict_one(self, kept_too: bool) -> None:
        """The cheapest state that no sequence names goes. Those that come first, but have become more expensive, get
        another rank."""
        slots = {path_of(self.rig, node): node.state for node in self.rig.nodes.nodes()}
        free = [prefix for prefix, slot in slots.items() if not self.rig.slots.is_shared(slot)]
        if not kept_too:
            free = [prefix for prefix in free if self.states[prefix].group != KEPT]
        victim = None
        while free:
            victim = min(free, key=lambda prefix: (self.states[prefix].group, self.states[prefix].rank, slots[prefix]))
            known = self.states[victim]
            if (rise := self.cost(victim) - known.cost) <= 0:
                self.floors[known.group] = max(self.floors[known.group], known.rank)
                break
            known.cost, known.rank = known.cost + rise, known.rank + rise
        assert self.rig.cache.evict_states(1, kept_too=kept_too) == (victim is not None)
        assert self.forget_removed() == ({victim} if victim is not None else set())

    def retire(self, prefix: Prefix, kept: int) -> None:
        """See `discarding.retire`, for paths that nothing branches off or holds."""
        for each in [prefix, *self.above(prefix)]:
            if each in self.states and len(each[1]) // 4 > kept:
                self.set_kind(each, StateKind.RETIRED)

    def forget_removed(self) -> set[Prefix]:
        """Read from the tree which states are gone."""
        there = {path_of(self.rig, node) for node in self.rig.nodes.nodes()}
        gone = self.states.keys() - there
        for prefix in gone:
            del self.states[prefix]
        return gone

    def compare(self) -> None:
        self.rig.verify()
        nodes = {path_of(self.rig, node): node for node in self.rig.cache.tree.nodes() if node.state}
        assert nodes.keys() == self.states.keys()
        for prefix, known in self.states.items():
            node = nodes[prefix]
            rank = self.rig.nodes.on_device.rank_of(node.state)
            assert (node.state_kind, *rank) == (known.kind, known.group, known.rank), prefix


def random_ids(rng: random.Random, stems: list[list[int]], page: int) -> np.ndarray:
    """Few different ids and shared stems, so that prefixes are shared and split everywhere."""
    ids = (stem := rng.choice(stems))[: rng.randrange(len(stem))]
    return np.array(ids + [rng.randrange(3) for _ in range(rng.randrange(1, 2 * page + 6))], dtype=np.int32)


class Episode:
    """Random operations on one rig, in lockstep with the model."""

    def __init__(self, seed: int, page: int) -> None:
        self.rng = rng = random.Random(seed)
        self.page = page
        self.rig = StateRig(
            page * rng.choice([24, 60, 200]), page, rows=6, context=600, states=rng.choice([14, 20, 60])
        )
        self.model = Model(self.rig)
        self.stems = [[rng.randrange(3) for _ in range(6 * page + 10)] for _ in range(3)]
        self.fences: list[tuple[int, int]] = []
        """(step, fence) of what is in flight."""
        self.written: dict[int, list[int]] = {}
        """By fence, the slots that only a sequence named which has given them up, and that are still written."""
        self.step = 0

    def run(self, steps: int) -> None:
        weights: dict[Callable[[], None], float] = {self.start: 5, self.compute: 8, self.leave: 3, self.finish: 4}
        weights |= {self.overrun: 1, self.release: 1, self.cut: 2, self.fork: 1}
        weights |= {self.evict: 2, self.evict_state: 2, self.look: 2, self.recover: 0.2, self.flush: 0.1}
        weights |= {self.retire: 1}
        operations, odds = list(weights), list(weights.values())
        for self.step in range(steps):
            operation = self.rng.choices(operations, odds)[0]
            operation()
            self.end_steps(self.step - 4)
            self.model.compare()
            quarantined = self.rig.slots.quarantined_slots().tolist()
            assert sorted(quarantined) == sorted(slot for slots in self.written.values() for slot in slots)

    def end_steps(self, last: int) -> None:
        """All up to this one; they may end in any order."""
        due = [entry for entry in self.fences if entry[0] <= last]
        for entry in self.rng.sample(due, len(due)):
            self.rig.close(entry[1])
            self.fences.remove(entry)
            self.written.pop(entry[1], None)

    def end(self) -> None:
        """Every state can be evicted, and then no slot is missing."""
        for running in list(self.rig.running):
            self.rig.release(running)
        self.end_steps(self.step)
        assert self.rig.cache.evict_states(10**9, kept_too=True) == len(self.model.states)
        assert self.rig.slots.free == self.rig.slots.total
        self.rig.cache.evict(10**9)
        assert self.rig.verify().free == self.rig.allocator.total_tokens

    def kind(self) -> StateKind:
        return self.rng.choice([StateKind.PASSING, StateKind.TURN_END, StateKind.BRANCH])

    def launch(self) -> int:
        """The fence of a step that is in flight for some operations."""
        fence = self.rig.allocator.fences.open_fence()
        self.fences.append((self.step, fence))
        return fence

    def note_written(self, running: Running, length: int, fence: int | None) -> None:
        """A sequence gives up its states of more than ``length`` tokens, which the step of this fence may write."""
        if fence is not None:
            held = [state.slot for state in running.kv.states.held if state.length > length]
            self.written[fence] = [slot for slot in held if not self.rig.slots.is_shared(slot)]

    def pick(self) -> Running | None:
        return self.rng.choice(self.rig.running) if self.rig.running else None

    def start(self) -> None:
        if self.rig.pool.num_free == 0:
            return
        namespace = self.rng.choice(["", "", "salt"])
        ids = random_ids(self.rng, self.stems, self.page)
        expected = self.model.longest(namespace, ids[:-1].tobytes())
        running = self.rig.start(ids, namespace)
        assert running.kv.tree_len == expected
        assert [state.length for state in running.kv.states.held] == [expected] * (expected > 0)
        if expected:
            self.model.use((namespace, ids[:expected].tobytes()))

    def look(self) -> None:
        namespace, ids = self.rng.choice(["", "salt"]), random_ids(self.rng, self.stems, self.page)
        expected = self.model.longest(namespace, ids.tobytes())
        assert self.rig.cache.match_len(namespace, ids) == expected
        match = self.rig.cache.match_prefix(namespace, ids)
        assert (match.device_len, match.host_len) == (expected, 0)
        assert match.device_len + match.unused == self.rig.cache.find_prefix(namespace, ids)[1]

    def compute(self) -> None:
        if (running := self.pick()) is None:
            return
        length = self.rng.randrange(running.committed, len(running.ids) + 1)
        if length > running.kv.length and not self.extend(running, length):
            return
        assert self.rig.compute(running, max(running.committed, min(length, running.kv.length)))
        if self.rng.random() < 0.7:
            self.rig.settle(running)

    def extend(self, running: Running, length: int) -> bool:
        points = range(running.kv.length + 1, length)
        chosen = sorted(self.rng.sample(points, min(len(points), self.rng.choice([0, 0, 1, 3]))))
        ok = self.make_room(running, length) and self.rig.extend(running, length, chosen, self.rng.random() < 0.5)
        self.model.forget_removed()
        return ok

    def make_room(self, running: Running, length: int) -> bool:
        """For KV, and for one state."""
        old, new = np.array([running.kv.length], dtype=np.int32), np.array([length], dtype=np.int32)
        allocator = self.rig.allocator
        if allocator.tokens_needed(old, new) > allocator.free_tokens + self.rig.cache.evictable_tokens:
            return False
        while self.rig.slots.free == 0 and self.rig.nodes.evictable:
            self.model.evict_one(kept_too=True)
        return self.rig.slots.free > 0

    def leave(self) -> None:
        if (running := self.pick()) is None:
            return
        prefix, kind = self.newest_in_pages(running), self.kind()
        self.rig.leave(running, kind)
        if prefix is not None:
            self.model.put(prefix, kind)

    def finish(self, fence: int | None = None) -> None:
        if (running := self.pick()) is None:
            return
        prefix, kind = self.newest_in_pages(running), self.kind()
        self.note_written(running, running.committed, fence)
        self.rig.finish_turn(running, kind, fence)
        if prefix is not None:
            self.model.put(prefix, kind)

    def newest_in_pages(self, running: Running) -> Prefix | None:
        """Where the newest of a sequence's states lies that the tree can carry."""
        lengths = [state.length for state in running.kv.states.held]
        length = max((n for n in lengths if n <= running.committed and n % self.page == 0), default=0)
        return (running.kv.namespace, running.ids[:length].tobytes()) if length else None

    def overrun(self) -> None:
        """Slots for a step in flight, then the end."""
        if (running := self.pick()) is None:
            return
        length = running.kv.length + self.rng.randrange(1, 3)
        if self.extend(running, length):
            fence = self.launch()
            self.rng.choice([self.finish_one, self.release_one])(running, fence)

    def finish_one(self, running: Running, fence: int) -> None:
        prefix = self.newest_in_pages(running)
        self.note_written(running, running.committed, fence)
        self.rig.finish_turn(running, StateKind.TURN_END, fence)
        if prefix is not None:
            self.model.put(prefix, StateKind.TURN_END)

    def release_one(self, running: Running, fence: int | None) -> None:
        self.note_written(running, 0, fence)
        self.rig.release(running, fence)

    def release(self) -> None:
        if (running := self.pick()) is not None:
            self.release_one(running, self.rng.choice([None, self.launch()]))

    def cut(self) -> None:
        """Back to any length; a state must be there."""
        if (running := self.pick()) is None or not running.committed:
            return
        kv, length = running.kv, self.rng.randrange(running.committed + 1)
        lengths = [state.length for state in kv.states.held]
        own = [n for n in lengths if n <= length and (n >= kv.tree_len or n % self.page == 0)]
        in_tree = self.model.longest(kv.namespace, running.ids[: min(length, kv.tree_len)].tobytes())
        expected = max(0, in_tree, *own)
        fence = self.rng.choice([None, self.launch()])
        self.note_written(running, expected, fence)
        self.rig.cut(running, length, fence)
        assert kv.length == expected, (length, lengths, in_tree)
        newest = kv.states.newest
        assert (newest.length if newest is not None else 0) == expected
        if expected and expected not in own:
            self.model.use((kv.namespace, running.ids[:expected].tobytes()))

    def fork(self) -> None:
        if (running := self.pick()) is None or self.rig.pool.num_free == 0:
            return
        if running.committed < running.kv.tree_len:
            return
        has_state = not running.committed or running.kv.states.of(running.committed) is not None
        fork = self.rig.fork(running)
        assert fork is None or has_state

    def evict_state(self) -> None:
        self.model.evict_one(kept_too=self.rng.random() < 0.5)

    def evict(self) -> None:
        """KV without states goes first, and what was retired."""
        tokens = self.rng.randrange(1, 4 * self.page + 1)
        cache = self.rig.cache
        possible = min(cache.evictable_tokens, -(-tokens // self.page) * self.page)
        useless = [node for node in cache.tree.nodes() if not (node.children or node.lock_ref or node.state)]
        assert cache.evict(tokens) >= possible
        known = dict(self.model.states)
        if any(known[gone].kind is not StateKind.RETIRED for gone in self.model.forget_removed()):
            left = [node for node in useless if node.parent is not None]
            assert not left, f"KV with a state was evicted before KV that is of no use: {left}"

    def recover(self) -> None:
        """All that follows from the structure of the tree and from the holders is lost, and counted anew."""
        rig = self.rig
        for node in (*rig.cache.tree.nodes(), rig.cache.tree.root):
            node.states_below = self.rng.randrange(3)
        rig.slots.refs[:] = self.rng.randrange(3)
        rig.nodes.forget_nodes()
        restore_tree(rig.cache, [running.kv for running in rig.running])
        names = [slot for running in rig.running for slot in running.kv.states.names()]
        names += [node.state for node in rig.nodes.nodes()]
        rig.slots.rebuild(Counter(names), [fence for _, fence in self.fences])
        for prefix, known in self.model.states.items():
            known.cost = self.model.cost(prefix)
            known.rank = self.model.floors[known.group] + known.cost

    def retire(self) -> None:
        """The end of a path, up to where something else continues or is held."""
        leaves = [node for node in self.rig.cache.tree.nodes() if not (node.children or node.lock_ref)]
        if not leaves:
            return
        node = self.rng.choice(leaves)
        prefix, top = path_of(self.rig, node), node
        while top.parent is not None and not (top.branched or top.lock_ref or len(top.children) > 1):
            top = top.parent
        retire(self.rig.cache, node)
        self.model.retire(prefix, top.prefix_len)

    def flush(self) -> None:
        fence = self.launch()
        held = np.flatnonzero(self.rig.slots.refs).tolist()
        assert self.rig.cache.reset(fence) == (not self.rig.running)
        if not self.rig.running:
            self.written[fence] = held
            self.model.states.clear()


@pytest.mark.parametrize("page", [1, 2, 16, 64])
@pytest.mark.parametrize("offset", range(6))
def test_random_operations_match_naive_model(offset: int, page: int) -> None:
    print(f"BATON_RADIX_SEED={SEED + offset}")
    episode = Episode(SEED + offset, page)
    episode.run(300)
    episode.end()


@pytest.mark.slow
@pytest.mark.parametrize("offset", range(100))
def test_random_operations_soak(offset: int) -> None:
    print(f"BATON_RADIX_SEED={SEED + 1000 + offset}")
    episode = Episode(SEED + 1000 + offset, random.Random(offset).choice([1, 2, 4, 16, 64]))
    episode.run(2000)
    episode.end()
