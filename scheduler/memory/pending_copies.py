"""KV copies that no step has made yet: noted when a row is forked or cut, made by the runtime in a step.

    fork, cut ──add_copies──▶ book ──take_copies──▶ the step now formed makes the copies before it computes anything
                        │
                        └── the sequence is closed, or gives the target slots back: they are not needed any more

The rules of the book:

- A row has one entry: a later change of the row replaces what was noted before.
- A sequence's copies go with the very next step, whatever that computes: a lease may be waiting for them, and a lease
  never computes anything.
- A beam search's copies wait for a step that computes the search, so that no other step can lose them by failing.
- A step reads all its sources before it writes any target. So a copy from a slot that is still to be filled
  must read from where the KV is now (`source_of`).
- A source may have been freed by then, and the slot beside it in the window pool with it. So the book notes both.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ...memory_pool.req_to_token import ReqToTokenPool
from ...memory_pool.window_pages import WindowPages
from ...radix.kv_sequence import KVSequence
from ..batch import NO_COPIES, KVCopies


@dataclass(slots=True, frozen=True)
class _Entry:
    sequence: KVSequence
    copies: KVCopies
    own_step: bool
    """True if they wait for a step that computes the sequence."""
    windows: KVCopies = NO_COPIES
    """The same in the window pool, as far as both slots have one beside them."""


class PendingCopies:
    """The book of copies that no step has made yet, by the row of the sequence that needs them."""

    def __init__(self, req_to_token: ReqToTokenPool, windows: WindowPages | None = None) -> None:
        self._req_to_token = req_to_token
        self._windows = windows
        self._entries: dict[int, _Entry] = {}
        self.taken: dict[int, _Entry] = {}
        """The copies of the step that is being formed."""
        self._taken_windows: list[KVCopies] = []

    def add_copies(
        self, sequence: KVSequence, source: np.ndarray, target: np.ndarray, owner: KVSequence | None = None
    ) -> None:
        """Fill slots of a sequence. source, target: int32 [n]. owner: the sequence that holds the sources, which may
        have to be filled themselves."""
        windows = self._beside(source, target, owner)
        source = self.source_of(owner, source) if owner is not None else source
        self._entries[sequence.row] = _Entry(sequence, KVCopies(source, target), False, windows)

    def add_beam_copies(self, trunk: KVSequence, copies: KVCopies) -> None:
        """Fill slots of the beams that continue a computed prompt, ``trunk``."""
        windows = self._beside(copies.source, copies.target)
        self._entries[trunk.row] = _Entry(trunk, copies, True, windows)

    def has_copies(self, sequence: KVSequence) -> bool:
        """True if slots of the sequence, or of its beams, are still to be filled."""
        return self._find(sequence) is not None

    def reads_slots(self, slots: np.ndarray) -> bool:
        """True if a pending copy reads some of these slots, int32 [n]. They may have been freed since: the step that
        makes the copies does so before it writes anything, but a load would not wait for that."""
        return any(np.isin(entry.copies.source, slots).any() for entry in self._entries.values())

    def source_of(self, sequence: KVSequence, slots: np.ndarray) -> np.ndarray:
        """The slots that now hold the K and V which the sequence expects in ``slots``; int32 [n] both."""
        entry = self._find(sequence)
        return slots if entry is None else _sources_in(entry.copies, slots)

    def take_copies(self, searches: Iterable[KVSequence] = ()) -> list[KVCopies]:
        """The copies that the step now formed has to make; they leave the book. ``searches``: the prompts of the beam
        searches that it computes."""
        self._taken_windows = []
        if not self._entries:
            return []
        rows = {trunk.row for trunk in searches}
        taken: list[KVCopies] = []
        waiting: dict[int, _Entry] = {}
        for row, entry in self._entries.items():
            if entry.sequence.node is None:
                continue
            if not entry.own_step:
                taken.append(self._still_wanted(entry))
            elif row in rows:
                taken.append(entry.copies)
            else:
                waiting[row] = entry
                continue
            self._taken_windows.append(self._still_beside(taken[-1], entry))
        self.taken, self._entries = self._entries, waiting
        return taken

    def taken_windows(self) -> KVCopies:
        """The copies in the window pool that go with those of the last `take_copies`."""
        return KVCopies.join(self._taken_windows)

    def confirm_taken(self) -> None:
        """Call once the step that took copies is formed: they need not be put back."""
        self.taken = {}

    def keep_only(self, sequences: Iterable[KVSequence]) -> None:
        """Put back the copies taken for a step that was not formed, and keep only those of these sequences."""
        held = {id(sequence) for sequence in sequences}
        entries, self.taken = self.taken | self._entries, {}
        self._entries = {
            row: entry for row, entry in entries.items() if id(entry.sequence) in held and entry.sequence.row == row
        }

    def drop_copies(self, sequence: KVSequence) -> None:
        """Forget the copies of a sequence, or of its beams."""
        if self.has_copies(sequence):
            del self._entries[sequence.row]

    def clear_copies(self) -> None:
        """Forget all copies."""
        self._entries.clear()
        self.taken = {}

    def _find(self, sequence: KVSequence) -> _Entry | None:
        entry = self._entries.get(sequence.row)
        return entry if entry is not None and entry.sequence is sequence else None

    def _beside(self, source: np.ndarray, target: np.ndarray, owner: KVSequence | None = None) -> KVCopies:
        """The copies in the window pool that go with these; see `add_copies`."""
        if self._windows is None:
            return NO_COPIES
        source, target = self._windows.slots_of(source), self._windows.slots_of(target)
        entry = self._find(owner) if owner is not None else None
        if entry is not None:
            source = _sources_in(entry.windows, source)
        page = self._windows.page_size
        are_there = (source >= page) & (target >= page)
        return KVCopies(source[are_there], target[are_there])

    def _still_beside(self, copies: KVCopies, entry: _Entry) -> KVCopies:
        """Of an entry's copies in the window pool those with a target beside one of ``copies``, the entry's own that
        are still wanted."""
        if self._windows is None:
            return NO_COPIES
        wanted = np.isin(entry.windows.target, self._windows.slots_of(copies.target))
        return KVCopies(entry.windows.source[wanted], entry.windows.target[wanted])

    def _still_wanted(self, entry: _Entry) -> KVCopies:
        """The copies of an entry, except those with a target slot that the sequence has given back since."""
        sequence, copies = entry.sequence, entry.copies
        named = np.isin(copies.target, self._req_to_token.rows[sequence.row, : sequence.length])
        return copies if named.all() else KVCopies(copies.source[named], copies.target[named])


def _sources_in(copies: KVCopies, slots: np.ndarray) -> np.ndarray:
    """int32 [n]: where each of these slots is copied from; itself, where it is not."""
    source, target = copies.source, copies.target
    if not len(target):
        return slots
    order = np.argsort(target)
    place = order[np.searchsorted(target, slots, sorter=order).clip(max=len(order) - 1)]
    return np.where(target[place] == slots, source[place], slots)
