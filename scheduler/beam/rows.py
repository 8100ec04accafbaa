"""The KV of a beam search: many rows of req_to_token over one prompt, forked without copying what is full.

    trunk (KVSequence)  |--- whole pages of the prompt: in the tree, or the trunk's own ---|
    beam row 0          |--- the same slots ----------------------------------------------| p | g g g g | g
    beam row 1          |--- the same slots ----------------------------------------------| p | g g g g | g' g'
                        0                                                          start               length

A beam is a row of slots. All rows name the trunk's slots up to ``start``. The pages after it belong to the group, and
several rows may name the same one. When a beam forks, all its children name the pages it has filled: only indices are
copied. The first child takes over the page it is filling; the others copy that one page before they write. So the rows
are all the book-keeping there is: a page that no row names any more is free.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...memory_pool.allocator import Allocator
from ...memory_pool.req_to_token import ReqToTokenPool
from ...memory_pool.state_slots import StateSlots
from ...radix.kv_sequence import KVSequence
from ..batch import KVCopies

NO_STATES = np.empty(0, dtype=np.int32)


@dataclass(slots=True, eq=False)
class BeamKV:
    """Everything the beams of one search hold besides the trunk."""

    rows: np.ndarray
    """int32 [live]: row of each beam. The trunk's row is one of the group's, in ``rows`` or ``spare``."""
    start: int
    """row[:start] belongs to the trunk; whole pages."""
    length: int
    """row[:length] has slots, in each row."""
    parents: np.ndarray
    """int32 [beams of the next step]: the index into ``rows`` of the beam that each continues; `fork_rows` makes it the
    identity."""
    committed: int = 0
    """row[:committed] is computed, and the result of its step is known."""
    spare: list[int] = field(default_factory=list)
    """Rows of beams that have ended, for reuse."""
    kept: list[np.ndarray] = field(default_factory=list)
    """int32 [n] each: slots after ``start`` of finished sequences with KV that will be leased."""
    states: np.ndarray = field(default_factory=lambda: NO_STATES)
    """int32 [live]: slot of each beam's recurrent state after ``states_len`` tokens, named once for each beam. Empty
    for models without states."""
    states_len: int = 0
    """Equal to ``length``, but while the step that computes the last token is being formed. If that fails, the states
    are of no use: they may or may not be written."""
    targets: np.ndarray = field(default_factory=lambda: NO_STATES)
    """int32 [live]: where the step that is being formed writes each beam's next state; empty outside of that."""
    kept_states: list[int] = field(default_factory=list)
    """Slots of the states of finished sequences that will be leased; each is one name."""

    @property
    def has_states(self) -> bool:
        """Each beam has the recurrent state that its next step starts from."""
        return len(self.states) == len(self.rows) and self.states_len == self.length

    @property
    def is_forked(self) -> bool:
        """Each beam of the next step has its row, and the rows are in the order of the beams."""
        return len(self.parents) == len(self.rows) and bool((self.parents == np.arange(len(self.rows))).all())

    def state_names(self) -> list[int]:
        """Every slot of recurrent states, as often as the group names it."""
        fresh = self.targets[self.targets != self.states] if len(self.targets) else NO_STATES
        return [*self.states.tolist(), *fresh.tolist(), *self.kept_states]


class BeamRows:
    """The operations on `BeamKV`. Owns nothing."""

    def __init__(self, req_to_token: ReqToTokenPool, allocator: Allocator, slots: StateSlots | None = None) -> None:
        """slots: of recurrent states; None for models without."""
        self._req_to_token = req_to_token
        self._allocator = allocator
        self._slots = slots

    def adopt(self, trunk: KVSequence, num_beams: int) -> BeamKV:
        """Begin a search on a computed prompt. The trunk keeps its whole pages; its partial page goes to the group."""
        length = trunk.length
        trunk.length = start = length - length % self._allocator.page_size
        parents = np.zeros(num_beams, dtype=np.int32)
        kv = BeamKV(np.array([trunk.row], dtype=np.int32), start, length, parents, committed=length)
        newest = trunk.states.newest
        if self._slots is not None and newest is not None:
            self._slots.share(newest.slot)
            kv.states, kv.states_len = np.array([newest.slot], dtype=np.int32), newest.length
            trunk.states.cut(self._slots, start)
        return kv

    def pages(self, kv: BeamKV) -> np.ndarray:
        """int32 [n]: the pages that the group owns, each once."""
        table, forked = self._first_slots(kv)
        kept = [slots[:: self._allocator.page_size] for slots in kv.kept]
        return np.unique(np.concatenate([table[0], forked.ravel(), *kept]) // self._allocator.page_size)

    def _first_slots(self, kv: BeamKV) -> tuple[np.ndarray, np.ndarray]:
        """The first slot of each page after ``start``, int32 [beams, pages]; then the same without the pages that all
        beams share. Most pages are shared, and comparing them dominates the cost."""
        table = self._req_to_token.rows[kv.rows, kv.start : kv.length : self._allocator.page_size]
        return table, table[:, (table != table[0]).any(axis=0)]

    def choose(self, kv: BeamKV, parents: np.ndarray, kept: list[np.ndarray]) -> None:
        """Continue these beams in the next step (int32 [n], indices into ``kv.rows``, which have been forked). The
        others end, and pages that neither a beam nor ``kept`` names any more are freed."""
        survivors, index = np.unique(parents, return_inverse=True)
        kv.parents = index.astype(np.int32)
        if len(survivors) == len(kv.rows) and not (kept or kv.kept):
            return
        page = self._allocator.page_size
        table, forked = self._first_slots(kv)
        gone = np.ones(len(kv.rows), dtype=bool)
        gone[survivors] = False
        given_up = np.concatenate([forked[gone].ravel(), *(slots[::page] for slots in kv.kept)])
        named = np.concatenate([forked[survivors].ravel(), *(slots[::page] for slots in kept)])
        if kv.kept:
            # Sequences that were kept before may have held pages that all beams share.
            named = np.concatenate([named, table[survivors[0]]])
        kv.spare += kv.rows[gone].tolist()
        kv.rows = kv.rows[survivors]
        if self._slots is not None:
            for slot in kv.states[gone].tolist():
                self._slots.drop(slot)
            kv.states = kv.states[survivors]
        kv.kept = kept
        self._allocator.free(np.unique(given_up[~np.isin(given_up, named)]))

    def tokens_to_fork(self, kv: BeamKV) -> int:
        """The tokens that `fork_rows` will allocate, in whole pages."""
        page = self._allocator.page_size
        return (len(kv.parents) - len(kv.rows)) * page if kv.length % page else 0

    def fork_rows(self, kv: BeamKV) -> KVCopies | None:
        """Give each beam of the next step its row. Returns the copies that must be made before that step computes
        anything; None, and nothing changed, if there is no memory."""
        pool, page = self._req_to_token, self._allocator.page_size
        begin = kv.length - kv.length % page
        partial = kv.length - begin
        beams = np.arange(len(kv.parents), dtype=np.int32)
        first = np.empty(len(kv.rows), dtype=np.int32)
        first[kv.parents[::-1]] = beams[::-1]  # of several children the first, which is written last
        extra = beams[first[kv.parents] != beams]
        count = len(extra)
        targets = np.empty(0, dtype=np.int32)
        if partial and count:
            old, new = np.full(count, begin, dtype=np.int32), np.full(count, kv.length, dtype=np.int32)
            slots = self._allocator.alloc_extend(old, new, old)  # begin is whole pages: no last slot is needed
            if slots is None:
                return None
            targets = slots
        parent_rows = kv.rows[kv.parents[extra]]
        sources = pool.rows[parent_rows, begin : kv.length].ravel()
        own = pool.rows[parent_rows, kv.start : kv.length]
        own[:, begin - kv.start :] = targets.reshape(count, partial)
        reused = [kv.spare.pop() for _ in range(min(count, len(kv.spare)))]
        made = [self._new_row() for _ in range(count - len(reused))]
        extra_rows = np.array(reused + made, dtype=np.int32)
        pool.copy_rows(parent_rows[len(reused) :], extra_rows[len(reused) :], kv.start)
        pool.write_block(extra_rows, kv.start, own)
        rows = np.empty(len(kv.parents), dtype=np.int32)
        rows[first] = kv.rows
        rows[extra] = extra_rows
        kv.rows = rows
        if self._slots is not None:
            kv.states = kv.states[kv.parents]
            for slot in kv.states[extra].tolist():
                self._slots.share(slot)
        kv.parents = beams
        return KVCopies(sources, targets)

    def _new_row(self) -> int:
        row = self._req_to_token.alloc()
        assert row is not None, "admission counts the rows of a search"
        return row

    def keep_states(self, kv: BeamKV, slots: list[int]) -> None:
        """Name the states of these finished sequences, in place of those that were named."""
        if self._slots is None:
            return
        for slot in slots:
            self._slots.share(slot)
        for slot in kv.kept_states:
            self._slots.drop(slot)
        kv.kept_states = slots

    def close(self, kv: BeamKV, trunk: KVSequence, fence: int | None) -> None:
        """Free everything that the group owns; the trunk and its row stay.

        fence: of a step in flight, which still writes; the pages are freed after it.
        """
        slots = self.pages(kv) * self._allocator.page_size
        if self._slots is not None:
            for slot in kv.state_names():
                self._slots.drop(slot, fence)
            kv.states, kv.targets, kv.kept_states = NO_STATES, NO_STATES, []
        for row in (*kv.rows.tolist(), *kv.spare):
            if row != trunk.row:
                self._req_to_token.free(row)
        if fence is None:
            self._allocator.free(slots)
        else:
            self._allocator.quarantine(slots, [fence])
