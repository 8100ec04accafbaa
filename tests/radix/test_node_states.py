"""Which recurrent states the tree gives up first: by what they are good for, then by what computing them anew costs."""

from __future__ import annotations

import numpy as np
import pytest

from baton.radix.discarding import retire
from baton.radix.node import StateKind, TreeNode
from baton.radix.node_states import TURNS_KEPT
from tests.doubles.state_rig import StateRig
from tests.doubles.state_tiers import StateTierRig


def ids_of(start: int, length: int) -> np.ndarray:
    """A prompt that shares nothing with those of another start."""
    return np.arange(start * 1000, start * 1000 + length, dtype=np.int32)


def scene(states: int = 8) -> StateRig:
    return StateRig(num_tokens=4096, page_size=4, rows=2, context=1024, states=states)


def leave(
    rig: StateRig, ids: np.ndarray, kind: StateKind = StateKind.TURN_END, turns_kept: int = TURNS_KEPT
) -> TreeNode:
    """A whole life: afterwards ``ids``, whole pages, are cached with their state."""
    running = rig.start(np.append(ids, np.int32(0)))
    if rig.slots.free == 0:
        rig.cache.evict_states(1, kept_too=True)
    assert rig.compute(running, len(ids))
    rig.finish_turn(running, kind, turns_kept=turns_kept)
    rig.verify()
    return rig.cache.find_prefix("", ids)[0]


def evict_one(rig: StateRig) -> None:
    assert rig.cache.evict_states(1, kept_too=True) == 1


class TestCost:
    @pytest.mark.parametrize("length", [8, 200])
    def test_states_that_need_not_be_kept_do_not_age_those_that_are(self, length: int) -> None:
        rig = scene(states=6)
        long = leave(rig, ids_of(1, 400))
        for number in range(2, 60):
            leave(rig, ids_of(number, length), StateKind.PASSING)
        short = leave(rig, ids_of(99, 40))
        while sum(1 for _ in rig.nodes.nodes()) > 1:
            evict_one(rig)
        assert long.state and not short.state

    def test_kept_states_do_not_age_others(self) -> None:
        rig = scene()
        long = leave(rig, ids_of(1, 100), StateKind.PASSING)
        running = rig.start(np.append(ids_of(1, 100), np.int32(0)))
        for number in range(2, 5):
            kept = leave(rig, ids_of(number, 400))
            evict_one(rig)
            assert not kept.state
        rig.release(running)
        short = leave(rig, ids_of(9, 40), StateKind.PASSING)
        evict_one(rig)
        assert long.state and not short.state

    @pytest.mark.parametrize("length", [40, 200])
    def test_expensive_state_outlives_cheaper_ones_and_sinks_at_last(self, length: int) -> None:
        """With room for six, each six of the others that go add what one of them costs."""
        rig = scene(states=6)
        long = leave(rig, ids_of(1, 800))
        lived = 0
        while long.state and lived < 200:
            lived += 1
            leave(rig, ids_of(1 + lived, length))
        assert 3 * 800 // length < lived < 6 * 800 // length + 6

    def test_a_use_makes_a_state_last_longer(self) -> None:
        rig = scene(states=6)
        long = leave(rig, ids_of(1, 800))
        for number in range(2, 100):
            leave(rig, ids_of(number, 100))
            if number % 10 == 0:
                rig.release(rig.start(np.append(ids_of(1, 800), np.int32(0))))
        assert long.state

    def test_a_cost_rises_when_the_state_above_is_gone(self) -> None:
        """A turn end was cheap while the state before its prompt's last token was there."""
        rig = scene()
        leave(rig, ids_of(1, 400), StateKind.PASSING)
        end = leave(rig, ids_of(1, 408))
        other = leave(rig, ids_of(2, 40))
        evict_one(rig)
        assert end.state and other.state
        evict_one(rig)
        assert end.state and not other.state


class TestTurns:
    @pytest.mark.parametrize("turns_kept", [1, 2, 3])
    def test_newest_turn_ends_are_kept(self, turns_kept: int) -> None:
        rig = scene()
        turns = [leave(rig, ids_of(1, 8 * turn), turns_kept=turns_kept) for turn in range(1, 6)]
        kinds = [StateKind.PASSING] * (5 - turns_kept) + [StateKind.TURN_END] * turns_kept
        assert [turn.state_kind for turn in turns] == kinds

    def test_a_turn_that_keeps_fewer_gives_up_several(self) -> None:
        rig = scene()
        turns = [leave(rig, ids_of(1, 8 * turn), turns_kept=9 if turn < 5 else 1) for turn in range(1, 6)]
        assert [turn.state_kind for turn in turns] == [StateKind.PASSING] * 4 + [StateKind.TURN_END]

    def test_turn_ends_above_a_branch_stay_as_they_are(self) -> None:
        rig = scene()
        above, parted = leave(rig, ids_of(1, 40), turns_kept=9), leave(rig, ids_of(1, 80), turns_kept=9)
        leave(rig, np.append(ids_of(1, 80), ids_of(2, 40)), turns_kept=9)
        leave(rig, np.append(ids_of(1, 80), ids_of(3, 40)), turns_kept=1)
        assert (above.state_kind, parted.state_kind) == (StateKind.TURN_END, StateKind.BRANCH)

    def test_state_left_where_several_continue_is_that_of_a_branch(self) -> None:
        rig = scene()
        parted = leave(rig, ids_of(1, 40))
        for start in (2, 3):
            leave(rig, np.append(ids_of(1, 40), ids_of(start, 40)))
        rig.nodes.remove(parted)
        leave(rig, ids_of(1, 40))
        assert parted.state and parted.state_kind is StateKind.BRANCH


class TestRetired:
    @pytest.mark.parametrize("kind", [StateKind.TURN_END, StateKind.BRANCH, StateKind.PASSING])
    def test_states_of_retired_kv_go_first(self, kind: StateKind) -> None:
        rig = scene()
        live = leave(rig, ids_of(1, 8), StateKind.PASSING)
        over = leave(rig, ids_of(2, 400), kind)
        retire(rig.cache, over)
        rig.verify()
        evict_one(rig)
        assert live.state and not over.state

    def test_nothing_else_has_to_go_for_them(self) -> None:
        """They give way also to what is optional."""
        rig = scene()
        over = leave(rig, ids_of(2, 400), StateKind.BRANCH)
        assert rig.cache.evict_states(1, kept_too=False) == 0
        retire(rig.cache, over)
        assert rig.cache.evict_states(1, kept_too=False) == 1

    def test_a_use_ends_it(self) -> None:
        rig = scene()
        over, other = leave(rig, ids_of(1, 80)), leave(rig, ids_of(2, 40), StateKind.PASSING)
        retire(rig.cache, over)
        rig.release(rig.start(np.append(ids_of(1, 80), np.int32(0))))
        evict_one(rig)
        assert over.state and not other.state

    def test_a_new_turn_end_there_is_kept(self) -> None:
        rig = scene()
        over = leave(rig, ids_of(1, 80))
        retire(rig.cache, over)
        assert over.state_kind is StateKind.RETIRED
        leave(rig, ids_of(1, 80))
        assert over.state_kind is StateKind.TURN_END

    def test_states_above_what_is_retired_stay_as_they_are(self) -> None:
        rig = scene()
        above = leave(rig, ids_of(1, 40), StateKind.BRANCH)
        over = leave(rig, ids_of(1, 80))
        retire(rig.cache, over, kept=40)
        assert (above.state_kind, over.state_kind) == (StateKind.BRANCH, StateKind.RETIRED)

    def test_copies_on_the_host_go_first_too(self) -> None:
        rig = StateTierRig(num_tokens=1024, host_tokens=1024, context=512)
        live, over = leave(rig, ids_of(1, 8), StateKind.PASSING), leave(rig, ids_of(2, 400))
        rig.store_all()
        assert live.host_state and over.host_state
        retire(rig.cache, over)
        assert rig.nodes.evict_from_host() is over

    def test_what_need_not_be_kept_goes_before_what_is_kept_with_a_copy(self) -> None:
        """Both have copies; to compute the kept one anew would cost less."""
        rig = StateTierRig(num_tokens=1024, host_tokens=1024, context=512)
        passing, kept = leave(rig, ids_of(1, 400), StateKind.PASSING), leave(rig, ids_of(2, 8))
        rig.store_all()
        assert passing.host_state and kept.host_state
        evict_one(rig)
        assert kept.state and not passing.state

    def test_a_use_makes_the_copy_last_longer_too(self) -> None:
        rig = StateTierRig(num_tokens=1024, host_tokens=1024, context=512)
        cheap, used, other = (leave(rig, ids_of(start, length)) for start, length in ((1, 80), (2, 200), (3, 240)))
        rig.store_all()
        assert rig.nodes.evict_from_host() is cheap
        rig.release(rig.start(np.append(ids_of(2, 200), np.int32(0))))
        assert rig.nodes.evict_from_host() is other and used.host_state

    def test_state_adopted_where_several_continue_is_that_of_a_branch(self) -> None:
        rig = StateTierRig(num_tokens=1024, host_tokens=1024, context=512)
        parted, single = leave(rig, ids_of(1, 40)), leave(rig, ids_of(5, 40))
        for start in (2, 3):
            leave(rig, np.append(ids_of(1, 40), ids_of(start, 40)))
        leave(rig, np.append(ids_of(5, 40), ids_of(6, 40)))
        for node, kind in ((parted, StateKind.BRANCH), (single, StateKind.TURN_END)):
            rig.nodes.remove(node)
            slot = rig.host_slots.take()
            assert slot is not None
            rig.nodes.adopt_on_host(node, slot)
            assert node.state_kind is kind


def test_evictions_are_counted_since_the_start() -> None:
    rig = scene()
    for number in range(3):
        leave(rig, ids_of(number, 8))
    evict_one(rig)
    assert rig.cache.evict_states(2, kept_too=True) == 2
    assert rig.nodes.evicted_total == 3
    taken = [rig.slots.take() for _ in range(8)]
    assert None not in taken and rig.nodes.evictable == 0, "no node has these slots any more"


def test_slots_of_forgotten_nodes_are_carried_by_none() -> None:
    """A dropped tree: a sequence may get the slot that a node had."""
    rig = scene(states=4)
    leave(rig, ids_of(1, 8))
    rig.nodes.forget_nodes()
    rig.slots.reset()
    taken = [rig.slots.take() for _ in range(4)]
    assert None not in taken and rig.nodes.evictable == 0
    assert not any(rig.nodes.carries(slot) for slot in taken if slot is not None)
