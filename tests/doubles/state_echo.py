"""The recurrent states of the KV-echo model: in each slot a hash over all tokens of a sequence, and their number.

A state is read at most once for each step of a row, and checked then: it must be of exactly the tokens before the row's
first new one. What breaks a promise of `StateRows` raises AssertionError. A state that has the right length but not the
right tokens changes the output, into which the model mixes it.
"""

from __future__ import annotations

import numpy as np

from baton.radix.tiers.host_tier import TierCopy
from baton.scheduler.batch import ScheduleBatch, StateRows

START = 11
"""The state of no tokens."""
UNKNOWN = -1
"""Length of a state that a failed step has left, and of a slot that was never written."""
SPOILED = 5
"""A state that is not finite, and every state that follows it."""
_MULTIPLIER, _INCREMENT, _MASK = 2862933555777941757, 3037000493, 2**64 - 1


def mix_state(state: int, token: int) -> int:
    """The state after one more token. It depends on their order, and no update can be undone or skipped."""
    if state == SPOILED:
        return SPOILED
    mixed = ((state ^ (token + 1)) * _MULTIPLIER + _INCREMENT) & _MASK
    return (mixed ^ (mixed >> 31)) + (mixed == SPOILED)


class EchoStates:
    """``num_states`` slots from 1 on; slot 0 is read by rows that begin, and never written."""

    def __init__(self, num_states: int) -> None:
        self.hashes = np.zeros(num_states + 1, dtype=np.uint64)
        self.hashes[0] = START
        self.lengths = np.full(num_states + 1, UNKNOWN, dtype=np.int64)
        self.lengths[0] = 0
        self.host_hashes = np.zeros(0, dtype=np.uint64)
        self.host_lengths = np.zeros(0, dtype=np.int64)
        """What copies between the tiers put on the host, see `add_host`."""
        self._just_lost: frozenset[int] = frozenset()
        self._step: StateRows | None = None

    def __len__(self) -> int:
        return len(self.hashes) - 1

    def add_host(self, num_states: int) -> None:
        """Have room for so many states on the host."""
        self.host_hashes = np.zeros(num_states + 1, dtype=np.uint64)
        self.host_lengths = np.full(num_states + 1, UNKNOWN, dtype=np.int64)

    def copy(self, copy: TierCopy, ok: bool) -> None:
        """Make the copy of a state between device and host; one that fails leaves rubbish behind. Steps that are
        launched after a failed load still read that, and fail."""
        device, host = (self.hashes, self.lengths), (self.host_hashes, self.host_lengths)
        source, target, start, to = device, host, copy.device_state, copy.host_state
        if not copy.to_host:
            source, target, start, to = host, device, to, start
        if not to:
            return
        target[0][to] = source[0][start] if ok else 0xBAD
        target[1][to] = source[1][start] if ok or not copy.to_host else UNKNOWN
        assert not ok or target[1][to] != UNKNOWN, f"{copy} copies a state that nothing has written"

    def open_step(self, batch: ScheduleBatch) -> None:
        """Check what a step is to read and write. It may read what the step just before it lost when that was launched
        before the failure was known; its rows end with that failure."""
        states = batch.states
        if not len(self):
            assert states is None, "a model without states got some"
            return
        assert states is not None, "the step has no states"
        _check_form(states, batch.extend_lens)
        sources = states.sources
        assert (sources >= 0).all() and (sources <= len(self)).all(), f"no slots of the pool: {sources}"
        assert ((states.slots >= 1) & (states.slots <= len(self))).all(), f"no slots of the pool: {states.slots}"
        assert ((sources == 0) == (batch.prefix_lens == 0)).all(), "a row has a source if, and only if, it has a prefix"
        assert len(np.unique(states.slots)) == len(states.slots), "a slot is written twice"
        self._check_readers(states)
        wrong = self.lengths[sources] != batch.prefix_lens
        wrong &= ~np.isin(sources, list(self._just_lost))
        for row in np.flatnonzero(wrong):
            raise AssertionError(
                f"row {row} with {batch.prefix_lens[row]} tokens before it starts from slot {sources[row]}, which has "
                f"the state of {self.lengths[sources[row]]}"
            )
        self._step = states

    def read(self, row: int) -> int:
        """The state that a row of the step starts from."""
        return int(self.hashes[0 if self._step is None else self._step.sources[row]])

    def write(self, row: int, after: list[int], prefix_len: int) -> None:
        """after: the states after 0, 1, … of the row's new tokens."""
        states = self._step
        if states is None:
            return
        is_known = self.lengths[states.sources[row]] != UNKNOWN  # its own slot is written below
        for place in np.flatnonzero(states.rows == row).tolist():
            slot, end = int(states.slots[place]), int(states.ends[place])
            self.hashes[slot] = after[end]
            self.lengths[slot] = prefix_len + end if is_known else UNKNOWN

    def close_step(self) -> None:
        self._just_lost, self._step = frozenset(), None

    def lose_step(self, batch: ScheduleBatch, is_known_at_launch: bool) -> None:
        """The step has failed: what it wrote, or was to write, is rubbish of unknown length."""
        self.close_step()
        if batch.states is None:
            return
        slots = batch.states.slots
        self.lengths[slots] = UNKNOWN
        self.hashes[slots] ^= np.uint64(0xBAD5EED) + slots.astype(np.uint64)
        if not is_known_at_launch:
            self._just_lost = frozenset(slots.tolist())

    def _check_readers(self, states: StateRows) -> None:
        """A slot that is written may be read by its own row, and by no other."""
        readers: dict[int, set[int]] = {}
        for row, source in enumerate(states.sources.tolist()):
            readers.setdefault(source, set()).add(row)
        for row, slot in zip(states.rows.tolist(), states.slots.tolist()):
            others = readers.get(slot, set()) - {row}
            assert not others, f"row {row} writes slot {slot}, which rows {sorted(others)} read"


def _check_form(states: StateRows, extend_lens: np.ndarray) -> None:
    """Each row writes states in ascending order, and the last after its last token."""
    count = len(states.rows)
    for array, length in ((states.sources, len(extend_lens)), (states.ends, count), (states.slots, count)):
        assert array.dtype == np.int32 and array.shape == (length,), f"not int32 [{length}]: {array.dtype} {array}"
    assert states.rows.dtype == np.int32 and states.rows.ndim == 1, f"not int32 [{count}]: {states.rows}"
    assert (np.diff(states.rows) >= 0).all(), f"rows are out of order: {states.rows}"
    assert np.array_equal(np.unique(states.rows), np.arange(len(extend_lens))), "a row writes no state"
    assert (states.ends >= 1).all(), f"a state of no new token is written: {states.ends}"
    within = np.diff(states.rows) == 0
    assert (np.diff(states.ends)[within] > 0).all(), f"ends are out of order: {states.ends}"
    last = np.append(~within, True)[:count]
    assert np.array_equal(states.ends[last], extend_lens), f"last ends {states.ends[last]} are not {extend_lens}"
