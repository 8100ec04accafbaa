"""Keeps track of the slots of the pool of recurrent states, and of how many holders name each.

A state is never changed once the step that wrote it has ended, unless a single holder names its slot. So sequences,
leases and nodes of the tree may name the same one, and a fork copies nothing: a branch writes elsewhere from its first
step on. A slot is free again when no holder names it any more.

    take ──▶ named once ──share──▶ named twice ──drop──▶ named once ──drop──▶ free, or in quarantine until the step
                                                                              that still writes it has ended
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .allocator import Allocator, DoubleFreeError
from .fences import Fences


class StateSlots:
    """Owns the slots 1 … num_states. Pure bookkeeping: the tensors are elsewhere (`StatePool`).

    fences: the operations that may still write slots which are given back.
    check: verify every call (raises DoubleFreeError); for tests.
    """

    def __init__(self, num_states: int, *, fences: Fences | None = None, check: bool = False) -> None:
        self._allocator = Allocator(num_states, fences=fences, check=check)
        self.refs = np.zeros(num_states + 1, dtype=np.int32)
        """int32 [num_states + 1]: how many holders name each slot."""

    @property
    def total(self) -> int:
        return self._allocator.total_tokens

    @property
    def free(self) -> int:
        return self._allocator.free_tokens

    @property
    def quarantined(self) -> int:
        """Slots that no holder names, but a step in flight still writes."""
        return self._allocator.quarantined_tokens

    @property
    def held(self) -> int:
        """Slots that at least one holder names."""
        return int(np.count_nonzero(self.refs))

    def take(self) -> int | None:
        """A slot that the caller alone names; None if none is free."""
        slots = self._allocator.take_pages(1)
        if slots is None:
            return None
        slot = int(slots[0])
        self.refs[slot] = 1
        return slot

    def share(self, slot: int) -> None:
        """One more holder names this slot."""
        if self.refs[slot] < 1:
            raise DoubleFreeError(f"state slot {slot} is shared, but no holder names it")
        self.refs[slot] += 1

    def is_shared(self, slot: int) -> bool:
        """True if several holders name it, so that none of them may write it."""
        return bool(self.refs[slot] > 1)

    def drop(self, slot: int, fence: int | None = None) -> None:
        """A holder names this slot no more. fence: of a step in flight that still writes it."""
        if self.refs[slot] < 1:
            raise DoubleFreeError(f"state slot {slot} is given back, but no holder names it")
        self.refs[slot] -= 1
        if not self.refs[slot]:
            self._allocator.quarantine(np.array([slot], dtype=np.int32), [] if fence is None else [fence])

    def release_quarantine(self) -> int:
        """Free what waits for closed fences only; call it when a fence has been closed. Returns the slots freed."""
        return self._allocator.release_quarantine()

    def rebuild(self, names: Mapping[int, int], fences: Sequence[int]) -> int:
        """Count holders anew: ``names`` says how many name each slot. Slots that were nowhere wait for ``fences``, of
        steps that may still write them. Returns how many these were.

        Used after an exception, when a holder may have been lost.
        """
        self.refs[:] = 0
        for slot, count in names.items():
            self.refs[slot] = count
        return self._allocator.rebuild(np.flatnonzero(self.refs).astype(np.int32), fences)

    def reset(self, fences: Sequence[int] = ()) -> None:
        """Everything is free again; the holders forget what they name. What a holder names now waits for ``fences``:
        steps in flight may still write it."""
        named = np.flatnonzero(self.refs).astype(np.int32)
        self.refs[:] = 0
        self._allocator.quarantine(named, fences)

    # -- inspection --------------------------------------------------------------------------------------------------

    def free_slots(self) -> np.ndarray:
        """int32 [n]: the slots in the free list, for invariants and dumps."""
        return self._allocator.free_pages()

    def quarantined_slots(self) -> np.ndarray:
        """int32 [n]: the slots in quarantine, for invariants and dumps."""
        return self._allocator.quarantined_pages()
