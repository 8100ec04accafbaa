"""The recurrent states that one sequence names, for models whose layers keep some.

    held      ── (slot 4, 96 tokens) ── (slot 9, 100 tokens)     newest last
    targets   ── slot 9                                          where the coming step writes what follows

A state is that of exactly so many tokens: it cannot be cut back to fewer, only replaced by an earlier one that was
kept. A step starts from the newest and writes to the targets. A target may be the newest state's own slot if no other
holder names that; the state is then gone as soon as the step is formed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ..memory_pool.state_slots import StateSlots


class HeldState(NamedTuple):
    """The state of a sequence after its first ``length`` tokens; a step in flight may still have to write it."""

    slot: int
    length: int


@dataclass(slots=True)
class SequenceStates:
    """The slots that a sequence names. Each entry of ``held`` is one name; so is each target in no entry."""

    held: list[HeldState] = field(default_factory=list)
    """Ascending by length."""
    targets: list[int] = field(default_factory=list)
    """Slots for the last states that the coming step writes; those before them are optional."""

    @property
    def newest(self) -> HeldState | None:
        return self.held[-1] if self.held else None

    def of(self, length: int) -> HeldState | None:
        """The state of exactly so many tokens."""
        return next((state for state in reversed(self.held) if state.length == length), None)

    def of_slot(self, slot: int) -> HeldState | None:
        """The state in this slot."""
        return next((state for state in self.held if state.slot == slot), None)

    def longest_within(self, length: int, align: int = 1) -> HeldState | None:
        """The state of the most tokens that are not more than ``length``, and a multiple of ``align``."""
        fitting = (state for state in reversed(self.held) if state.length <= length and not state.length % align)
        return next(fitting, None)

    def bases(self, length: int, align: int) -> list[HeldState | None]:
        """What a sequence of the first ``length`` tokens could begin from: the state of the most of them, and that at a
        multiple of ``align``, which the tree can take."""
        return [self.longest_within(length), self.longest_within(length, align)]

    def names(self) -> list[int]:
        """Every slot, as often as this sequence names it."""
        held = [state.slot for state in self.held]
        return held + [slot for slot in self.targets if slot not in held]

    def begin(self, slots: StateSlots, slot: int, length: int, fence: int | None = None) -> None:
        """Name the state that the sequence starts from, in place of all that it names. fence: of a step that may still
        write those."""
        slots.share(slot)
        self.release(slots, fence=fence)
        self.held = [HeldState(slot, length)]

    def write(self, states: list[HeldState]) -> None:
        """A step is formed that writes these, ascending; their slots are named already."""
        held, self.targets = self.held, []
        if held and held[-1].slot == states[-1].slot and len(states) == 1:
            held[-1] = states[0]
            return
        written = {state.slot for state in states}
        self.held = [state for state in held if state.slot not in written] + states

    def cut(self, slots: StateSlots, length: int, fence: int | None = None) -> None:
        """Name no state of more than ``length`` tokens any more. fence: of a step that may still write those."""
        for state in self.held:
            if state.length > length:
                slots.drop(state.slot, fence)
        kept = [state for state in self.held if state.length <= length]
        self._drop_targets(slots)
        self.held = kept

    def prune(self, slots: StateSlots, committed: int, align: int, cut_len: int | None = None) -> None:
        """Name no state any more that is of no more than the ``committed`` tokens; but still the `bases` of those, and
        of ``cut_len`` tokens."""
        if len(self.held) < 2:
            return
        kept = {*self.bases(committed, align), *(self.bases(cut_len, align) if cut_len is not None else ())}
        for state in self.held:
            if state.length <= committed and state not in kept:
                slots.drop(state.slot)
        self.held = [state for state in self.held if state.length > committed or state in kept]

    def forget(self, slots: StateSlots, committed: int) -> None:
        """Name no state of up to ``committed`` tokens any more."""
        for state in self.held:
            if state.length <= committed:
                slots.drop(state.slot)
        self.held = [state for state in self.held if state.length > committed]

    def release(self, slots: StateSlots, committed: int = 0, fence: int | None = None) -> None:
        """Name nothing any more. fence: of a step that still writes the states of more than ``committed`` tokens."""
        self._drop_targets(slots)
        for state in self.held:
            slots.drop(state.slot, fence if state.length > committed else None)
        self.held = []

    def fork(self, slots: StateSlots, length: int) -> SequenceStates | None:
        """A second sequence's names: the state of exactly ``length`` tokens. None if there is none."""
        state = self.of(length)
        if state is None:
            return None
        slots.share(state.slot)
        return SequenceStates([state])

    def _drop_targets(self, slots: StateSlots) -> None:
        held = {state.slot for state in self.held}
        for slot in self.targets:
            if slot not in held:
                slots.drop(slot)
        self.targets = []
