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
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ...memory_pool.req_to_token import ReqToTokenPool
from ...radix.kv_sequence import KVSequence
from ..batch import KVCopies


@dataclass(slots=True, frozen=True)
class _Entry:
    sequence: KVSequence
    copies: KVCopies
    own_step: bool
    """True if they wait for a step that computes the sequence."""


class PendingCopies:
    """The book of copies that no step has made yet, by the row of the sequence that needs them."""

    def __init__(self, req_to_token: ReqToTokenPool) -> None:
        self._req_to_token = req_to_token
        self._entries: dict[int, _Entry] = {}
        self.taken: dict[int, _Entry] = {}
        """The copies of the step that is being formed."""

    def add_copies(self, sequence: KVSequence, source: np.ndarray, target: np.ndarray) -> None:
        """Fill slots of a sequence. source, target: int32 [n]."""
        self._entries[sequence.row] = _Entry(sequence, KVCopies(source, target), own_step=False)

    def add_beam_copies(self, trunk: KVSequence, copies: KVCopies) -> None:
        """Fill slots of the beams that continue a computed prompt, ``trunk``."""
        self._entries[trunk.row] = _Entry(trunk, copies, own_step=True)

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
        if entry is None:
            return slots
        source, target = entry.copies.source, entry.copies.target
        order = np.argsort(target)
        place = order[np.searchsorted(target, slots, sorter=order).clip(max=len(order) - 1)]
        return np.where(target[place] == slots, source[place], slots)

    def take_copies(self, searches: Iterable[KVSequence] = ()) -> list[KVCopies]:
        """The copies that the step now formed has to make; they leave the book. ``searches``: the prompts of the beam
        searches that it computes."""
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
        self.taken, self._entries = self._entries, waiting
        return taken

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

    def _still_wanted(self, entry: _Entry) -> KVCopies:
        """The copies of an entry, except those with a target slot that the sequence has given back since."""
        sequence, copies = entry.sequence, entry.copies
        named = np.isin(copies.target, self._req_to_token.rows[sequence.row, : sequence.length])
        return copies if named.all() else KVCopies(copies.source[named], copies.target[named])
