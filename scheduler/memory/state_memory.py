"""Slots of recurrent states for what the coming step writes.

Every row starts from its sequence's newest state and writes the state after its last new token. Where no other holder
names the newest and it is not needed any more, the row writes over it. Else it takes a slot:

    the newest is shared with a node or another sequence          it must not change
    the newest may turn out to be the last                        a step in flight may end the request there
    the newest lies where the tree can take it, and pages are longer than a token
    a stop string may have begun behind the newest                it is the last once the string is cut off

The first is a must; the others give way when no slot is free. A row may also leave states behind on its way, where
others are expected to continue; these are written only while there are slots to spare.

Decodes of the same requests, one after the other, are a `DecodeRun`: each step reads and writes the same slots as the
one before it, or as the one before that, so nothing is planned anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...radix.cache import RadixCache
from ...radix.invariants import InvariantError
from ...radix.kv_sequence import KVSequence
from ...radix.node import StateKind, TreeNode
from ...radix.node_states import NodeStates
from ...radix.sequence_states import HeldState, SequenceStates, StateRun
from ..batch import StateRows
from ..batch_builder import PlannedStep
from ..beam.rows import NO_STATES, BeamKV
from ..request import Request, RequestFault

NO_SERIALS = np.empty(0, dtype=np.int64)


@dataclass(slots=True)
class DecodeRun:
    """Consecutive steps that give one token to each of the same requests, and compute nothing else."""

    requests: list[Request]
    states: StateRun
    rows: list[StateRows]
    """What the next steps read and write, in turn: the first is next."""
    slots: np.ndarray
    """int32 [n]: all slots that the requests name."""
    steps: list[int]
    """Ids of the last steps, as many as ``rows``; the newest last."""
    is_settled: bool = False
    """True once the result of the step is processed without which the next one may not be formed: the newest, where it
    is written in place; the one before it, where the oldest of two states is written over."""


class StateMemory:
    """Gives sequences the slots that their next steps write, and says which states a step reads and writes."""

    def __init__(self, cache: RadixCache, states: NodeStates) -> None:
        self._cache = cache
        self._states = states
        self._slots = states.slots
        self._run: DecodeRun | None = None
        self._last: tuple[int, np.ndarray] = (0, NO_SERIALS)
        """Id of the last step, and the serials of its rows, if it might be the first of a run."""

    @property
    def available(self) -> int:
        """Slots that are free, or that only a node of the tree names."""
        return self._slots.free + self._states.evictable

    @property
    def returning(self) -> int:
        """Slots that will be free once the steps in flight have ended."""
        return self._slots.quarantined

    @property
    def has_free(self) -> bool:
        """True if a slot is free, so that nothing has to give way."""
        return self._slots.free > 0

    def can_continue(self, kv: KVSequence, length: int, keep_parent: bool) -> bool:
        """True if the sequence that takes over the first ``length`` tokens of a lease, or copies them, can have a slot
        for the state after them, without breaking a lease."""
        exact = None if keep_parent else kv.states.of(length)
        if keep_parent or not length:
            return self.available > 0
        return exact is None or self.can_reserve(kv.states)

    def can_reserve(self, states: SequenceStates) -> bool:
        """True if `reserve` would find a slot for a sequence that names these, without breaking a lease."""
        newest = states.newest
        if newest is not None and (not self._slots.is_shared(newest.slot) or self._is_unsharable(newest.slot)):
            return True
        return self.available > 0

    def reserve_each(self, requests: Sequence[Request], *, is_decode: bool = False) -> bool:
        """Make sure that the next step of each request has a slot to write its last state to. False if one has none and
        no slot can be had; those that have one keep it. is_decode: the step gives these one token each, and has no
        other rows."""
        if is_decode and self._continues_run(requests):
            return True
        self._end_run()
        for request in requests:
            may_end = request.num_output_placeholders > 0
            if not self._reserve_own(request, may_end) and not self.reserve(
                request.held_kv.states, request.committed_len, may_end=may_end, cut_len=request.cut_len
            ):
                return False
        return True

    def _reserve_own(self, request: Request, may_end: bool) -> bool:
        """As `reserve`, for nearly every decode: its next state takes the place of the newest, or of the one before it
        if a step in flight may end the request. False, and nothing changed, in any other case."""
        states, align = request.held_kv.states, self._states.align
        held = states.held
        if not held or states.targets or request.cut_len is not None:
            return False
        if may_end and (len(held) < 2 or held[-2].length > request.committed_len):
            return False
        old, others = (held[-2], held[:-2]) if may_end else (held[-1], held[:-1])
        if align > 1 and not (old.length % align and held[-1].length % align):
            return False  # the tree can take one of them
        if may_end and others and (len(others) > 1 or align == 1 or others[0].length % align):
            return False  # one of them may be of no use any more
        if self._slots.refs[old.slot] > 1:
            return False
        if may_end:
            states.held = [*others, held[-1]]
        states.targets.append(old.slot)
        return True

    def reserve(self, states: SequenceStates, committed: int, *, may_end: bool, cut_len: int | None = None) -> bool:
        """Make sure that the next step of a sequence has a slot to write its last state to. committed: its tokens that
        no step in flight computes. may_end: a step in flight may end it, so that its newest state is the last.
        cut_len: see `Request.cut_len`. False, and nothing changed, if no slot can be had."""
        if states.targets and states.of_slot(states.targets[0]) is None:
            return True
        target = self._find_target(states, committed, may_end, cut_len)
        if target is None:
            return False
        states.targets[:1] = [target]
        return True

    def reserve_drafts(self, states: SequenceStates, wanted: int) -> int:
        """Take slots for the states before each of ``wanted`` guesses, after `reserve`. Returns how many there are room
        for."""
        while len(states.targets) <= wanted and (slot := self._take_spare()) is not None:
            states.targets.append(slot)
        while len(states.targets) > wanted + 1:
            self._slots.drop(states.targets.pop())
        return len(states.targets) - 1

    def reserve_beams(self, beams: BeamKV) -> bool:
        """Make sure that each beam of a search has a slot for its next state: its own, or a new one where several name
        it. False, and nothing reserved, if there are too few."""
        self._release_targets(beams)
        targets: list[int] = []
        for slot in beams.states.tolist():
            target = self.take(kept_too=True) if self._slots.is_shared(slot) else slot
            if target is None:
                break
            targets.append(target)
        beams.targets = np.array(targets, dtype=np.int32)
        if len(targets) < len(beams.states):
            beams.targets = np.concatenate([beams.targets, beams.states[len(targets) :]])
            self._release_targets(beams)
            return False
        return True

    def _release_targets(self, beams: BeamKV) -> None:
        for slot, target in zip(beams.states.tolist(), beams.targets.tolist()):
            if target != slot:
                self._slots.drop(target)
        beams.targets = NO_STATES

    def take(self, *, kept_too: bool) -> int | None:
        """A slot, from a node if none is free. kept_too: also from nodes that go after all others."""
        slot = self._slots.take()
        if slot is None and self._cache.evict_states(1, kept_too=kept_too):
            slot = self._slots.take()
        return slot

    def take_beside(self, node: TreeNode) -> int | None:
        """A slot that the caller alone names, as for a sequence that begins; the state of this node does not give
        way."""
        kept = node.state
        if kept:
            self._slots.share(kept)
        slot = self.take(kept_too=True)
        if kept:
            self._slots.drop(kept)
        return slot

    def _take_spare(self) -> int | None:
        return self.take(kept_too=False)

    def _find_target(self, states: SequenceStates, committed: int, may_end: bool, cut_len: int | None) -> int | None:
        newest = states.newest
        if newest is None:
            return self.take(kept_too=True)
        is_own = not self._slots.is_shared(newest.slot)
        align = self._states.align
        wanted = [states.longest_within(newest.length, align)] if align > 1 else []
        if cut_len is not None:
            wanted += states.bases(cut_len, align)
        if is_own and not may_end and newest not in wanted:
            return newest.slot
        if (old := self._take_old(states, committed, wanted)) is not None:
            return old
        slot = self._take_spare()
        if slot is not None:
            return slot
        if is_own:
            return newest.slot
        if self._is_unsharable(newest.slot):
            self._cache.remove_state(self._states.node_of(newest.slot))
            return newest.slot
        slot = self.take(kept_too=True)
        return slot if slot is not None else self._take_old(states, committed, [])

    def _take_old(self, states: SequenceStates, committed: int, wanted: Sequence[HeldState | None]) -> int | None:
        """The slot of an older state that is not wanted; the sequence, and a node that need not keep it, do not hold
        that state any more."""
        for state in states.held[:-1]:  # the step that reads it is in flight, and ends before this one begins
            if state.length <= committed and state not in wanted and self._unshare(state.slot):
                states.held = [other for other in states.held if other is not state]
                return state.slot
        return None

    def _unshare(self, slot: int) -> bool:
        """True if the caller alone names this slot; a node that need not keep its state gives its name up."""
        if self._is_unsharable(slot) and self._states.node_of(slot).state_kind <= StateKind.PASSING:
            self._cache.remove_state(self._states.node_of(slot))
        return not self._slots.is_shared(slot)

    def _is_unsharable(self, slot: int) -> bool:
        """True if only one sequence and a node name a slot: the node can do without."""
        return self._states.carries(slot) and self._slots.refs[slot] == 2

    # -- steps --------------------------------------------------------------------------------------------------------

    def plan_rows(self, step: PlannedStep) -> StateRows:
        """What each row of a step reads and writes. The step's fence is open, and its sequences have targets; they name
        what it writes from now on."""
        batch = step.batch
        if self._run is not None and self._run.requests == step.requests:
            return self._continue_run(self._run, step)
        sources: list[int] = []
        rows: list[int] = []
        ends: list[int] = []
        slots: list[int] = []
        written: list[tuple[SequenceStates, list[HeldState]]] = []
        beams = {beam.start: search for beam, search in zip(batch.beams, step.searches) if search.beam_kv is not None}
        single = step.requests[: min(beams, default=len(batch))]
        for row, (request, old, new) in enumerate(zip(single, batch.prefix_lens.tolist(), batch.seq_lens.tolist())):
            states = request.held_kv.states
            held, targets = states.held, states.targets
            if (held[-1].length if held else 0) != old or not targets:
                raise RequestFault(request) from InvariantError(f"a row after {old} tokens, but {states}")
            sources.append(held[-1].slot if held else 0)
            last = new - len(targets) + 1
            outs = [HeldState(slot, length) for length, slot in enumerate(targets, last)]
            if row < step.num_prompts:
                outs = self._inner_states(request, old, last) + outs
            for slot, length in outs:
                rows.append(row)
                ends.append(length - old)
                slots.append(slot)
            written.append((states, outs))
        for start, search in beams.items():
            group = search.held_beams
            is_ready = len(group.targets) == len(group.states) == len(group.rows)
            if not is_ready or group.states_len != group.length - 1:
                raise RequestFault(search) from InvariantError(f"beams without states or targets: {group}")
            sources += group.states.tolist()
            rows += range(start, start + len(group.rows))
            ends += [1] * len(group.rows)
            slots += group.targets.tolist()
        for states, outs in written:
            states.write(outs)
        for search in beams.values():
            self._write_beams(search.held_beams, step.fence)
        planned = StateRows(*np.array([sources], dtype=np.int32), *np.array([rows, ends, slots], dtype=np.int32))
        self._begin_run(step, planned)
        return planned

    # -- runs ---------------------------------------------------------------------------------------------------------

    def _begin_run(self, step: PlannedStep, rows: StateRows) -> None:
        """Begin a run if a step is a decode of the same requests as the one before it, and the next may be like it."""
        batch, (last_id, last_serials) = step.batch, self._last
        if self._states.align > 1 or step.num_prompts or batch.beams or batch.draft_lens is not None:
            self._last = (0, NO_SERIALS)
            return
        self._last = (batch.step_id, batch.serials)
        if not np.array_equal(batch.serials, last_serials):
            return
        in_place = np.array_equal(rows.sources, rows.slots)
        writes = zip(step.requests, rows.sources.tolist(), rows.slots.tolist(), batch.seq_lens.tolist())
        for request, source, slot, length in writes:
            names = [(slot, length)] if in_place else [(source, length - 1), (slot, length)]
            if request.held_kv.states.held != names:
                return
        states = StateRun([request.held_kv.states for request in step.requests])
        if in_place:
            self._run = DecodeRun(step.requests, states, [rows], rows.slots, [batch.step_id])
        else:
            following = StateRows(rows.slots, rows.rows, rows.ends, rows.sources)
            slots = np.concatenate([rows.sources, rows.slots])
            self._run = DecodeRun(step.requests, states, [following, rows], slots, [last_id, batch.step_id])

    def _continues_run(self, requests: Sequence[Request]) -> bool:
        """True if a decode of these requests is the next step of the run."""
        run = self._run
        return (
            run is not None
            and run.is_settled
            and run.states.is_whole
            and run.requests == requests
            and bool((self._slots.refs[run.slots] == 1).all())
        )

    def _continue_run(self, run: DecodeRun, step: PlannedStep) -> StateRows:
        """As `plan_rows`, for the next step of the run."""
        wrong = np.flatnonzero(run.states.lengths != step.batch.prefix_lens)
        if len(wrong):
            request = step.requests[wrong[0]]
            raise RequestFault(request) from InvariantError(f"a step that follows {request.held_kv.states}")
        run.states.write()
        run.rows.append(run.rows.pop(0))
        run.steps = [*run.steps[1:], step.batch.step_id]
        run.is_settled = False
        return run.rows[-1]

    def settle_run(self, step_id: int, begins_stop: bool) -> bool:
        """True if a step of the run has ended, so that there is nothing to settle. begins_stop: a stop string may have
        begun in what it brought. Else the run is over."""
        run = self._run
        if run is not None and run.steps[0] == step_id and not begins_stop:
            run.is_settled = True
            return True
        self._end_run()
        return False

    def _end_run(self) -> None:
        """Plan the next step anew."""
        if self._run is not None:
            self._run.states.end()
            self._run = None

    def _write_beams(self, beams: BeamKV, fence: int) -> None:
        """A step is formed that writes the targets of these beams, after their last token. fence: the step's. It still
        reads what no beam names any more, and a load from the host would not wait for that."""
        for slot, target in zip(beams.states.tolist(), beams.targets.tolist()):
            if target != slot:
                self._slots.drop(slot, fence)
        beams.states, beams.states_len, beams.targets = beams.targets, beams.length, NO_STATES

    def _inner_states(self, request: Request, old: int, last: int) -> list[HeldState]:
        """States to leave behind between ``old`` and ``last``, as far as there are slots."""
        align = self._states.align
        wanted = {point - point % self._cache.page_size for point in request.state_points}
        wanted.add(last - last % align)
        found = []
        for length in sorted(wanted):
            if old < length < last and (slot := self._take_spare()) is not None:
                found.append(HeldState(slot, length))
        return found

    def settle(self, request: Request) -> None:
        """After a step of a request: name no state any more that nothing can use."""
        request.held_kv.states.prune(self._slots, request.committed_len, self._states.align, request.cut_len)
