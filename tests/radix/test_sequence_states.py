"""The names that a sequence gives: none is lost, none is given up twice, and what a step still writes waits for it."""

from __future__ import annotations

import numpy as np
import pytest

from baton.memory_pool.fences import Fences
from baton.memory_pool.state_slots import StateSlots
from baton.radix.sequence_states import HeldState, SequenceStates, StateRun


class Scene:
    """Eight slots, and a sequence with states of these lengths."""

    def __init__(self, *lengths: int) -> None:
        self.fences = Fences()
        self.slots = StateSlots(8, fences=self.fences, check=True)
        self.states = SequenceStates([HeldState(self.take(), length) for length in lengths])
        self.of = {state.length: state for state in self.states.held}

    def take(self) -> int:
        slot = self.slots.take()
        assert slot is not None
        return slot

    def lengths(self) -> list[int]:
        return [state.length for state in self.states.held]

    def check(self, *quarantined: int) -> None:
        """The sequence names all slots that are held, once each; those of states of these lengths wait for a fence, and
        all others are free."""
        counts = np.bincount(self.states.names(), minlength=9)
        assert counts.tolist() == self.slots.refs.tolist()
        waiting = {self.of[length].slot for length in quarantined}
        assert set(self.slots.quarantined_slots().tolist()) == waiting
        assert self.slots.free == 8 - len(self.states.names()) - len(quarantined)


def test_look_ups_find_newest_state_that_fits() -> None:
    scene = Scene(8, 16, 21)
    states, of = scene.states, scene.of
    assert states.newest == of[21] and SequenceStates().newest is None
    assert states.of(16) == of[16] and states.of(17) is None
    assert states.of_slot(of[8].slot) == of[8] and states.of_slot(scene.take()) is None
    assert states.longest_within(20) == of[16] and states.longest_within(7) is None
    assert states.longest_within(40, align=8) == of[16] and states.longest_within(15, align=16) is None


def test_first_state_replaces_all_names() -> None:
    scene = Scene(8, 16)
    scene.states.targets = [scene.take()]
    node = scene.take()
    scene.states.begin(scene.slots, node, 4)
    assert scene.states.held == [HeldState(node, 4)] and scene.slots.refs[node] == 2
    scene.slots.drop(node)
    scene.check()


def test_beginning_from_the_own_only_state_keeps_it() -> None:
    scene = Scene(8)
    scene.states.begin(scene.slots, scene.of[8].slot, 8)
    assert scene.lengths() == [8]
    scene.check()


def test_written_slot_has_new_state_only() -> None:
    scene = Scene(8, 9)
    own, other = scene.of[9].slot, scene.take()
    scene.states.targets = [other, own]
    scene.states.write([HeldState(other, 10), HeldState(own, 11)])
    assert scene.states.held == [scene.of[8], HeldState(other, 10), HeldState(own, 11)] and not scene.states.targets
    scene.check()


@pytest.mark.parametrize("in_place", [False, True])
def test_cut_gives_up_longer_states_and_targets(in_place: bool) -> None:
    scene = Scene(8, 16, 17, 18)
    scene.states.targets = [scene.of[18].slot if in_place else scene.take()]
    fence = scene.fences.open_fence()
    scene.states.cut(scene.slots, 16, fence)
    assert scene.lengths() == [8, 16]
    scene.check(17, 18)
    scene.fences.close_fence(fence)
    assert scene.slots.release_quarantine() == 2
    scene.check()


def test_shared_state_that_is_cut_off_stays_with_its_other_holder() -> None:
    scene = Scene(8, 16)
    scene.slots.share(scene.of[16].slot)
    scene.states.cut(scene.slots, 8)
    assert scene.lengths() == [8] and scene.slots.refs[scene.of[16].slot] == 1


@pytest.mark.parametrize(
    ("committed", "align", "kept"),
    [
        (20, 1, [20, 21]),
        (20, 16, [16, 20, 21]),
        (21, 16, [16, 21]),
        (21, 1, [21]),
        (19, 16, [16, 17, 20, 21]),
        (21, 64, [21]),
        (7, 1, [8, 16, 17, 20, 21]),
    ],
)
def test_pruned_sequence_keeps_newest_and_newest_aligned_state(committed: int, align: int, kept: list[int]) -> None:
    scene = Scene(8, 16, 17, 20, 21)
    scene.states.prune(scene.slots, committed, align)
    assert scene.lengths() == kept
    scene.check()


def test_pruned_sequence_keeps_what_a_cut_would_begin_from() -> None:
    scene = Scene(8, 16, 17, 19, 20, 21)
    scene.states.prune(scene.slots, 21, 8, cut_len=18)
    assert scene.lengths() == [16, 17, 21]
    scene.states.prune(scene.slots, 21, 1, cut_len=17)
    assert scene.lengths() == [17, 21]
    scene.check()


def test_forgotten_states_are_those_that_no_step_may_write() -> None:
    scene = Scene(8, 16, 17)
    scene.states.forget(scene.slots, 16)
    assert scene.lengths() == [17]
    scene.check()


@pytest.mark.parametrize(("committed", "waiting"), [(16, [17]), (0, [8, 16, 17]), (17, [])])
def test_released_states_wait_for_step_that_writes_them(committed: int, waiting: list[int]) -> None:
    scene = Scene(8, 16, 17)
    scene.states.targets = [scene.take()]
    scene.states.release(scene.slots, committed, scene.fences.open_fence())
    assert not scene.states.names()
    scene.check(*waiting)


def test_fork_names_state_of_its_length_too() -> None:
    scene = Scene(8, 16, 17)
    scene.states.targets = [scene.take()]
    fork = scene.states.fork(scene.slots, 16)
    assert fork is not None and fork.held == [scene.of[16]] and not fork.targets
    assert scene.slots.is_shared(scene.of[16].slot)
    assert scene.states.fork(scene.slots, 9) is None
    fork.release(scene.slots)
    scene.check()


@pytest.mark.parametrize("width", [1, 2])
def test_sequences_in_a_run_name_what_each_step_writes(width: int) -> None:
    """As if each had been told of each step; one that leaves keeps what it has then."""
    scenes, twins = ([Scene(*range(length - width + 1, length + 1)) for length in (5, 90, 7)] for _ in range(2))
    run = StateRun([scene.states for scene in scenes])
    for step in range(1, 6):
        run.write()
        for twin in twins:
            twin.states.write([HeldState(twin.states.held[0].slot, twin.states.held[-1].length + 1)])
        assert [scene.states.held for scene in scenes] == [twin.states.held for twin in twins]
        assert run.lengths.tolist() == [5 + step, 90 + step, 7 + step] and run.is_whole
    scenes[1].states.cut(scenes[1].slots, 94)
    assert not run.is_whole and scenes[1].lengths() == [94] * (width - 1)
    run.write()
    run.end()
    assert [scene.lengths()[-1:] for scene in scenes] == [[11], [94] * (width - 1), [13]]
    for scene in scenes:
        scene.check()
