"""The sliding windows of the KV-echo model: a pool of its own for the last tokens, with rows of its own.

What it has of a token there is a hash of the token's KV. A token that is read after its slot was given back is caught:
its slot is padding in the rows, or it was filled with rubbish (`free_slots`), or with another token's.
"""

from __future__ import annotations

import numpy as np

from baton.scheduler.batch import ScheduleBatch

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_RUBBISH = np.uint64(0xDEAD)


def windowed(kv: np.ndarray) -> np.ndarray:
    """uint64 [n] -> uint64 [n]: what the window's pool has of tokens with this KV."""
    with np.errstate(over="ignore"):
        return (kv ^ (kv >> np.uint64(29))) * _FACTOR


def digest_window(window: np.ndarray) -> np.uint64:
    """A hash of what a token sees, uint64 [n]."""
    with np.errstate(over="ignore"):
        return (window * np.arange(3, 3 + 2 * len(window), 2, dtype=np.uint64)).sum()


class EchoWindows:
    """``num_slots`` slots, padding included; the last ``reach`` tokens are seen. reach: 0 for a model without."""

    def __init__(self, num_slots: int, num_rows: int, max_context: int, reach: int, page_size: int) -> None:
        self.reach, self._page_size = reach, page_size
        self.free_slots = np.zeros(0, dtype=np.int32)
        """Those that are free once a step has been formed: only its copies may still read them."""
        self._kv = np.zeros(num_slots, dtype=np.uint64)
        self._mirror = np.zeros((num_rows, max_context), dtype=np.int32)

    def update_rows(self, batch: ScheduleBatch) -> None:
        """Bring the rows up to date."""
        windows, updates = batch.windows, batch.row_updates
        assert (windows is not None) == (self.reach > 0)
        if windows is None:
            return
        self._mirror.reshape(-1)[updates.flat_index(self._mirror.shape[1])] = windows.updates
        copies, before = updates.copies, self._mirror.copy()
        for source, target, length in zip(copies.sources.tolist(), copies.targets.tolist(), copies.lengths.tolist()):
            self._mirror[target, :length] = before[source, :length]

    def copy_slots(self, batch: ScheduleBatch) -> None:
        """Make the copies of a step."""
        if batch.windows is not None:
            copies = batch.windows.copies
            assert (copies.target >= self._page_size).all() and len(set(copies.target.tolist())) == len(copies)
            self._kv[copies.target] = self._kv[copies.source]
            self._kv[self.free_slots] = _RUBBISH

    def write(self, batch: ScheduleBatch, start: int, row: int, old: int, kv: np.ndarray) -> None:
        """Keep the new tokens of a row, from the step's token ``start`` on. kv: uint64 [n]."""
        if batch.windows is not None:
            slots = batch.windows.out[start : start + len(kv)]
            assert (slots >= self._page_size).all(), "a new token has no slot"
            assert np.array_equal(slots, self._mirror[row, old : old + len(kv)]), "rows and slots disagree"
            self._kv[slots] = windowed(kv)

    def read(self, row: int, length: int) -> np.ndarray:
        """uint64 [n]: what the last of ``length`` tokens sees."""
        slots = self._mirror[row, max(0, length - self.reach) : length]
        assert (slots >= self._page_size).all(), "a token is read that is behind the window"
        return self._kv[slots].copy()
