from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from baton.memory_pool.allocator import DoubleFreeError
from baton.memory_pool.fences import Fences
from baton.memory_pool.state_slots import StateSlots


def test_every_slot_is_handed_out_once_and_slot_0_never() -> None:
    slots = StateSlots(4, check=True)
    assert sorted(slots.take() or 0 for _ in range(4)) == [1, 2, 3, 4]
    assert slots.take() is None
    assert (slots.free, slots.held, slots.total) == (0, 4, 4)


def test_a_shared_slot_is_free_after_its_last_holder_only() -> None:
    slots = StateSlots(2, check=True)
    slot = slots.take()
    assert slot is not None
    assert not slots.is_shared(slot)
    slots.share(slot)
    assert slots.is_shared(slot)
    slots.drop(slot)
    assert (slots.free, slots.is_shared(slot)) == (1, False)
    slots.drop(slot)
    assert slots.free == 2


def test_a_slot_that_a_step_writes_is_free_once_the_step_has_ended() -> None:
    fences = Fences()
    slots = StateSlots(1, fences=fences, check=True)
    slot, fence = slots.take(), fences.open_fence()
    assert slot is not None
    slots.drop(slot, fence)
    assert (slots.free, slots.quarantined, slots.take()) == (0, 1, None)
    fences.close_fence(fence)
    assert slots.release_quarantine() == 1
    assert slots.take() == slot


@pytest.mark.parametrize("fault", ["drop", "share"])
def test_a_slot_that_no_holder_names_cannot_be_dropped_or_shared(fault: str) -> None:
    slots = StateSlots(2)
    slot = slots.take()
    assert slot is not None
    slots.drop(slot)
    with pytest.raises(DoubleFreeError, match=f"state slot {slot}"):
        getattr(slots, fault)(slot)


def test_rebuild_counts_anew_and_frees_what_was_lost() -> None:
    fences = Fences()
    slots = StateSlots(5, fences=fences, check=True)
    named, lost, doubly = slots.take(), slots.take(), slots.take()
    assert named and lost and doubly
    fence = fences.open_fence()
    assert slots.rebuild({named: 1, doubly: 2}, [fence]) == 1
    assert (slots.free, slots.quarantined, slots.held) == (2, 1, 2)
    assert slots.is_shared(doubly)
    fences.close_fence(fence)
    slots.release_quarantine()
    assert slots.free == 3


def test_a_reset_waits_for_the_steps_in_flight() -> None:
    fences = Fences()
    slots = StateSlots(3, fences=fences, check=True)
    slot, fence = slots.take(), fences.open_fence()
    assert slot is not None
    slots.share(slot)
    slots.reset([fence])
    assert (slots.free, slots.quarantined, slots.held) == (2, 1, 0)
    fences.close_fence(fence)
    slots.release_quarantine()
    assert slots.free == 3


class AgainstCounter(RuleBasedStateMachine):
    """Random holders against a plain count of names."""

    def __init__(self) -> None:
        super().__init__()
        self.fences = Fences()
        self.slots = StateSlots(6, fences=self.fences, check=True)
        self.names: Counter[int] = Counter()
        self.waiting: dict[int, int] = {}

    @rule()
    def take(self) -> None:
        slot = self.slots.take()
        assert (slot is None) == (len(+self.names) + len(self.waiting) == 6)
        if slot is not None:
            assert slot not in +self.names and slot not in self.waiting
            self.names[slot] = 1

    @precondition(lambda self: +self.names)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(+self.names)))
        self.slots.share(slot)
        self.names[slot] += 1

    @precondition(lambda self: +self.names)
    @rule(data=st.data(), is_written=st.booleans())
    def drop(self, data: st.DataObject, is_written: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(+self.names)))
        fence = self.fences.open_fence() if is_written else None
        self.slots.drop(slot, fence)
        self.names[slot] -= 1
        if not self.names[slot] and fence is not None:
            self.waiting[slot] = fence

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def end_step(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.waiting)))
        self.fences.close_fence(self.waiting.pop(slot))
        assert self.slots.release_quarantine() == 1

    @invariant()
    def agrees(self) -> None:
        names = +self.names
        assert (self.slots.held, self.slots.quarantined) == (len(names), len(self.waiting))
        assert self.slots.free == 6 - len(names) - len(self.waiting)
        assert all(self.slots.refs[slot] == count for slot, count in names.items())


TestAgainstCounter = AgainstCounter.TestCase
TestAgainstCounter.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
