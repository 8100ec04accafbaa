"""Recurrent states on the host: a state leaves the device and comes back as it was, alone or with its KV, and no slot
of either tier is written while something else needs it."""

from __future__ import annotations

import random

import numpy as np
import pytest

from baton.radix.cache import MatchResult
from baton.radix.discarding import drop_path
from baton.radix.invariants import InvariantError
from baton.radix.node import StateKind, TreeNode
from baton.radix.tiers.host_tier import HostPolicy
from tests.doubles.host_rig import tokens
from tests.doubles.state_rig import path_of
from tests.doubles.state_tiers import StateTierRig

IDS = tokens(32)
NEXT = np.concatenate([IDS, tokens(16, 500)])


def stored(**options) -> StateTierRig:
    """One turn, with a copy on the host of its KV and its state."""
    rig = StateTierRig(**options)
    rig.turn(IDS)
    rig.store_all()
    rig.check()
    assert rig.host_slots.held == 1 and rig.tier.tokens == 32
    return rig


def node_of(rig: StateTierRig, ids: np.ndarray) -> TreeNode:
    return rig.cache.find_prefix("", ids)[0]


def lengths(match: MatchResult) -> tuple[int, int]:
    return match.device_len, match.host_len


class TestRoundTrip:
    def test_state_comes_back_with_its_kv(self) -> None:
        rig = stored()
        assert rig.cache.evict(32) == 32 and rig.slots.held == 0
        assert lengths(rig.cache.match_prefix("", NEXT)) == (0, 32) and rig.cache.match_len("", NEXT) == 32
        fence = rig.load(NEXT)
        assert fence is not None and len(rig.copies[fence].device_slots) == 32
        rig.check()
        rig.end(fence)
        rig.check()
        assert rig.start(NEXT).kv.length == 32
        assert (rig.tier.counts.stored_states, rig.tier.counts.loaded_states) == (1, 1)
        rig.check()

    def test_state_that_left_alone_comes_back_alone(self) -> None:
        rig = stored()
        assert rig.cache.evict_states(1, kept_too=True) == 1
        match = rig.cache.match_prefix("", NEXT)
        assert lengths(match) == (0, 32) and rig.tier.missing_tokens(match) == 0
        fence = rig.load(NEXT)
        assert fence is not None and not len(rig.copies[fence].device_slots)
        rig.check()
        rig.end(fence)
        rig.check()
        assert lengths(rig.cache.match_prefix("", NEXT)) == (32, 0)

    def test_state_on_device_counts_if_the_deeper_one_is_not_loaded(self) -> None:
        rig = stored()
        rig.turn(NEXT)
        rig.store_all()
        rig.nodes.remove(node_of(rig, NEXT))
        match = rig.cache.match_prefix("", NEXT)
        assert lengths(match) == (32, 16) and match.handle is node_of(rig, IDS)
        assert rig.start(np.append(NEXT, np.int32(9))).kv.length == 32
        rig.check()

    def test_only_the_last_state_is_loaded(self) -> None:
        rig = stored()
        rig.turn(NEXT)
        rig.store_all()
        rig.cache.evict(48)
        fence = rig.load(NEXT)
        assert fence is not None and len(rig.copies[fence].device_slots) == 48
        rig.end(fence)
        rig.check()
        assert rig.slots.held == 1 and node_of(rig, NEXT).state and not node_of(rig, IDS).state

    def test_state_put_after_its_kv_was_stored_is_stored_alone(self) -> None:
        rig = StateTierRig()
        running = rig.start(IDS)
        rig.compute(running)
        rig.publish(running)
        rig.store_all()
        assert rig.tier.tokens == 32 and not rig.host_slots.held
        rig.leave(running, StateKind.BRANCH)
        rig.pump()
        (copy,) = rig.copies.values()
        assert copy.device_state and not len(copy.device_slots)
        rig.end_all()
        rig.check()
        assert rig.host_slots.held == 1

    def test_kv_is_of_use_while_its_state_is_on_the_host(self) -> None:
        rig = stored()
        rig.cache.evict_states(1, kept_too=True)
        assert node_of(rig, IDS).last_access > 0
        rig.tier.evict(32)
        assert node_of(rig, IDS).last_access == 0 and not rig.host_slots.held
        rig.check()


class TestCopiesUnderWay:
    def test_slots_of_a_store_are_not_given_away(self) -> None:
        rig = StateTierRig()
        rig.turn(IDS)
        rig.pump()
        rig.check()
        assert rig.cache.evict_states(1, kept_too=True) == 0 and rig.nodes.evict_from_host() is None
        rig.end_all()
        assert rig.cache.evict_states(1, kept_too=True) == 1

    def test_slots_of_a_load_are_not_given_away(self) -> None:
        rig = stored()
        rig.cache.evict_states(1, kept_too=True)
        fence = rig.load(NEXT)
        assert fence is not None
        assert rig.cache.evict_states(1, kept_too=True) == 0 and rig.nodes.evict_from_host() is None
        running = rig.start(NEXT)
        state = running.kv.states.newest
        assert state is not None and rig.slots.refs[state.slot] == 3, "the node, the copy and the sequence"
        rig.end(fence)
        rig.check()

    def test_state_given_up_meanwhile_is_free_when_the_copy_ends(self) -> None:
        rig = stored()
        rig.cache.evict_states(1, kept_too=True)
        fence = rig.load(NEXT)
        assert fence is not None
        drop_path(rig.cache, node_of(rig, IDS))
        assert rig.slots.held == rig.host_slots.held == 1
        rig.end(fence)
        rig.check()
        assert rig.slots.free == rig.slots.total and rig.host_slots.free == rig.host_slots.total

    @pytest.mark.parametrize("to_host", [True, False])
    def test_reset_waits_for_the_copy(self, to_host: bool) -> None:
        rig = StateTierRig()
        rig.turn(IDS)
        if not to_host:
            rig.store_all()
            rig.cache.evict(32)
            rig.load(NEXT)
        rig.pump()
        (fence,) = rig.copies
        assert rig.cache.reset()
        assert rig.slots.quarantined == rig.host_slots.quarantined == 1
        rig.check()
        rig.end(fence)
        rig.check()
        assert rig.slots.free == rig.slots.total and rig.host_slots.free == rig.host_slots.total

    def test_discarded_copies_end_as_they_may(self) -> None:
        rig = StateTierRig()
        rig.turn(IDS)
        rig.store_all()
        rig.turn(NEXT)
        rig.pump()
        rig.tier.discard_copies()
        rig.check()
        assert rig.host_slots.held == 1 and rig.tier.states_add_up, "the copy still writes it"
        rig.end_all()
        rig.check()
        assert rig.host_slots.free == rig.host_slots.total and rig.slots.held == 2


class TestFailures:
    def test_failed_store_leaves_no_copy(self) -> None:
        rig = StateTierRig()
        rig.turn(IDS)
        rig.pump()
        rig.end_all(ok=False)
        rig.check()
        assert rig.host_slots.free == rig.host_slots.total and rig.slots.held == 1

    def test_failed_store_of_a_state_alone_leaves_the_kv(self) -> None:
        rig = StateTierRig()
        running = rig.start(IDS)
        rig.compute(running)
        rig.publish(running)
        rig.store_all()
        rig.leave(running, StateKind.BRANCH)
        rig.pump()
        rig.end_all(ok=False)
        rig.check()
        assert not rig.host_slots.held and rig.tier.tokens == 32

    def test_failed_load_of_a_state_alone_leaves_the_kv(self) -> None:
        rig = stored()
        rig.cache.evict_states(1, kept_too=True)
        fence = rig.load(NEXT)
        assert fence is not None and rig.end(fence, ok=False) is not None
        rig.check()
        assert not rig.slots.held and not rig.host_slots.held
        match = rig.cache.match_prefix("", NEXT)
        assert (*lengths(match), match.unused) == (0, 0, 32)

    def test_failed_load_takes_the_state_with_the_kv(self) -> None:
        rig = stored()
        rig.cache.evict(32)
        fence = rig.load(NEXT)
        assert fence is not None and rig.end(fence, ok=False) is not None
        rig.check()
        assert not rig.slots.held and not rig.host_slots.held and rig.cache.match_len("", NEXT) == 0

    def test_damaged_count_is_noticed_and_recounted(self) -> None:
        rig = stored()
        rig.host_slots.share(node_of(rig, IDS).host_state)
        assert not rig.tier.states_add_up
        rig.tier.recount()
        assert rig.tier.states_add_up
        rig.check()


class TestRoom:
    def test_turn_ends_with_a_copy_leave_the_device_for_what_is_optional(self) -> None:
        rig = StateTierRig()
        for first in (1, 1000):
            rig.turn(tokens(32, first))
            if first == 1:
                rig.store_all()
        assert rig.cache.evict_states(2, kept_too=False) == 1
        assert not node_of(rig, IDS).state and node_of(rig, tokens(32, 1000)).state
        rig.tier.evict(32)
        rig.check()

    def test_turn_ends_leave_the_host_last(self) -> None:
        rig = StateTierRig(host_states=2)
        rig.turn(IDS)
        rig.turn(tokens(32, 1000), StateKind.PASSING)
        rig.store_all()
        rig.cache.match_prefix("", tokens(32, 1000))
        rig.turn(tokens(32, 2000))
        rig.store_all()
        rig.check()
        kept = [bool(node_of(rig, tokens(32, first)).host_state) for first in (1, 1000, 2000)]
        assert kept == [True, False, True] and rig.tier.counts.evicted_states == 1

    def test_full_host_stores_the_kv_without_the_state(self) -> None:
        rig = stored(host_states=1)
        rig.cache.evict_states(1, kept_too=True)
        rig.load(NEXT)
        rig.turn(tokens(32, 1000))
        rig.pump()
        assert rig.tier.tokens == 64 and rig.tier.counts.no_room_states == 1
        rig.end_all()
        rig.check()

    def test_kv_that_lost_its_state_leaves_the_host_first(self) -> None:
        rig = StateTierRig(host_states=1, host_tokens=64)
        for first in (1, 1000):
            rig.turn(tokens(32, first))
            rig.store_all()
            rig.cache.evict(32)
        rig.cache.touch(node_of(rig, IDS))  # an access that no state follows
        rig.cache.mark_useless(node_of(rig, IDS))
        rig.turn(tokens(32, 2000), StateKind.PASSING)
        rig.store_all()
        rig.check()
        assert rig.cache.find_prefix("", IDS)[1] == 0 and rig.cache.find_prefix("", tokens(32, 1000))[1] == 32

    def test_copy_of_the_kv_takes_that_of_the_state_along(self) -> None:
        rig = stored()
        rig.tier.evict(4)
        rig.check()
        assert not rig.host_slots.held and rig.tier.tokens == 0, "it is not shortened: its last token has the state"


class TestPolicies:
    @pytest.mark.parametrize("kind", [StateKind.TURN_END, StateKind.PASSING])
    def test_write_back_stores_what_is_kept_at_once(self, kind: StateKind) -> None:
        rig = StateTierRig(policy=HostPolicy(write_back=True))
        rig.turn(IDS, kind)
        rig.store_all()
        rig.check()
        assert rig.host_slots.held == (kind is StateKind.TURN_END)

    def test_write_back_stores_a_passing_state_with_its_kv(self) -> None:
        rig = StateTierRig(policy=HostPolicy(write_back=True))
        rig.turn(IDS, StateKind.PASSING)
        rig.cache.evict(32)
        rig.pump()
        rig.end_all()
        assert rig.cache.evict(32) == 32
        rig.check()
        assert rig.host_slots.held == 1 and rig.cache.match_len("", NEXT) == 32

    def test_selective_stores_a_state_that_was_matched(self) -> None:
        rig = StateTierRig(policy=HostPolicy(min_hits=1))
        rig.turn(IDS)
        rig.store_all()
        assert not rig.host_slots.held
        rig.cache.match_prefix("", NEXT)
        rig.store_all()
        rig.check()
        assert rig.host_slots.held == 1


def forgets_its_copy(rig: StateTierRig, node: TreeNode) -> None:
    node.host_state = 0


def names_another(rig: StateTierRig, node: TreeNode) -> None:
    node.host_state -= 1


def is_never_evicted(rig: StateTierRig, node: TreeNode) -> None:
    rig.on_host._standings[node.host_state].rank += 1


def is_counted_twice(rig: StateTierRig, node: TreeNode) -> None:
    rig.host_slots.share(node.host_state)


def waits_in_vain(rig: StateTierRig, node: TreeNode) -> None:
    node.state_loading = 99


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (forgets_its_copy, "1 nodes with a state on the host are listed, not 0"),
        (names_another, "which it cannot"),
        (is_never_evicted, "would never be evicted from the host"),
        (is_counted_twice, "1 holders name host state"),
        (waits_in_vain, "which is not under way"),
    ],
)
def test_damage_is_detected(damage, message: str) -> None:
    rig = stored()
    damage(rig, node_of(rig, IDS))
    with pytest.raises(InvariantError, match=message):
        rig.check()


@pytest.mark.parametrize("seed", range(6))
def test_random_turns_and_copies(seed: int) -> None:
    """Turns of a few conversations, with copies that end in any order and fail, in little memory on both tiers."""
    rng = random.Random(seed)
    rig = StateTierRig(num_tokens=128, host_tokens=192, host_states=rng.choice([2, 5]), states=8)
    loaded = 0
    for _ in range(300):
        stem = tokens(4 * rng.randrange(1, 6), 1000 * rng.randrange(3))
        ids = np.concatenate([stem, tokens(4 * rng.randrange(1, 4), 100 * rng.randrange(1, 5))])
        match rng.randrange(5):
            case 0:
                if not rig.copies and rig.allocator.free_tokens + rig.cache.evictable_tokens >= len(ids):
                    rig.turn(ids, rng.choice([StateKind.TURN_END, StateKind.PASSING]))
            case 1:
                rig.pump()
            case 2:
                if rig.copies:
                    rig.end(rng.choice(list(rig.copies)), ok=rng.random() < 0.9)
            case 3:
                away = [node for node in rig.on_host.nodes.values() if not node.state]
                if away and rig.slots.free and rig.allocator.free_tokens >= 40:
                    path = path_of(rig, rng.choice(away))[1]
                    loaded += rig.load(np.frombuffer(path, dtype=np.int32)) is not None
            case 4:
                rig.cache.evict_states(rng.randrange(3), kept_too=True)
                rig.cache.evict(rng.choice([0, 8, 40]))
        rig.check()
    while rig.copies:
        rig.end_all()
        rig.pump()
    rig.check()
    assert loaded > 5
