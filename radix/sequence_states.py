"""The recurrent states that one sequence names, for models whose layers keep some.

    held      ── (slot 4, 96 tokens) ── (slot 9, 100 tokens)     newest last
    targets   ── slot 9                                          where the coming step writes what follows

A state is that of exactly so many tokens: it cannot be cut back to fewer, only replaced by an earlier one that was
kept. A step starts from the newest and writes to the targets. A target may be the newest state's own slot if no other
holder names that; the state is then gone as soon as the step is formed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..memory_pool.state_slots import StateSlots


class HeldState(NamedTuple):
    """The state of a sequence after its first ``length`` tokens; a step in flight may still have to write it."""

    slot: int
    length: int


class SequenceStates:
    """The slots that a sequence names. Each entry of ``held`` is one name; so is each target in no entry."""

    __slots__ = ("_held", "_place", "_run", "targets")

    def __init__(self, held: list[HeldState] | None = None) -> None:
        self._held = held or []
        self.targets: list[int] = []
        """Slots for the last states that the coming step writes; those before them are optional."""
        self._run: StateRun | None = None
        """The run that this sequence is in, and has its entries; None outside of one."""
        self._place = 0

    def __repr__(self) -> str:
        return f"SequenceStates({self.held}, targets={self.targets})"

    @property
    def held(self) -> list[HeldState]:
        """Ascending by length. To change it, assign it: the sequence then leaves the run that it is in."""
        return self._held if self._run is None else self._run.held_at(self._place)

    @held.setter
    def held(self, held: list[HeldState]) -> None:
        if self._run is not None:
            self._run.is_whole = False
            self._run = None
        self._held = held

    def join(self, run: StateRun, place: int) -> None:
        """Have a run keep the entries, which it has at ``place``."""
        self._run, self._place = run, place

    def leave(self, run: StateRun) -> None:
        """Keep the entries oneself again, if this run has them."""
        if self._run is run:
            self.held = self.held

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
        if len(states) > 1:
            written = {state.slot for state in states}
            kept = [state for state in held if state.slot not in written]
        else:
            written = states[0].slot
            kept = [state for state in held if state.slot != written]
        self.held = kept + states

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
        held = self.held
        past = [state.length for state in held if state.length <= committed]
        if len(past) < 2 or (len(past) == 2 and past[1] % align and not past[0] % align):
            return  # nearly always
        kept = {*self.bases(committed, align), *(self.bases(cut_len, align) if cut_len is not None else ())}
        for state in held:
            if state.length <= committed and state not in kept:
                slots.drop(state.slot)
        self.held = [state for state in held if state.length > committed or state in kept]

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


class StateRun:
    """The entries of sequences that step after step gives one token each. All change in the same way, so that a step of
    any number of them changes one count.

    Each sequence names one slot, which every step writes in place; or two, which the steps write in turn, so that the
    state before a step in flight is still there:

        tokens        96      97      98      99
        written to  slot 4  slot 9  slot 4  slot 9
    """

    __slots__ = ("_lengths", "_members", "_slots", "_steps", "is_whole")

    def __init__(self, members: Sequence[SequenceStates]) -> None:
        """members: each has one entry, or each has two, of lengths that differ by one; no targets."""
        self._members = members
        self._slots = [[state.slot for state in member.held] for member in members]
        self._lengths = np.array([member.held[-1].length for member in members], dtype=np.int32)
        self._steps = 0
        self.is_whole = True
        """False once a member has left."""
        for place, member in enumerate(members):
            member.join(self, place)

    @property
    def lengths(self) -> np.ndarray:
        """int32 [members]: tokens of each one's newest state."""
        return self._lengths + np.int32(self._steps)

    def write(self) -> None:
        """A step is formed that writes each member's next state, over its oldest."""
        self._steps += 1

    def held_at(self, place: int) -> list[HeldState]:
        """The entries of one member."""
        slots, newest = self._slots[place], int(self._lengths[place]) + self._steps
        turned = slots if not self._steps % len(slots) else slots[::-1]
        return [HeldState(slot, length) for length, slot in enumerate(turned, newest - len(slots) + 1)]

    def end(self) -> None:
        """Give each member its entries back."""
        for member in self._members:
            member.leave(self)
