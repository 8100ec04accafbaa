"""Request rows: which slot of the KV pool holds each token of a sequence.

The host array is the truth. The device keeps a mirror of it, brought up to date once per step from `take_updates`;
this module only records what changed and knows nothing of devices, tokens or trees.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np


@dataclass(slots=True)
class RowCopies:
    """Starts of rows to copy from other rows. All int32 [n]; each target appears once and is not a source."""

    sources: np.ndarray
    targets: np.ndarray
    lengths: np.ndarray

    @classmethod
    def none(cls) -> RowCopies:
        nothing = np.empty(0, dtype=np.int32)
        return cls(nothing, nothing, nothing)

    def __len__(self) -> int:
        return len(self.targets)


@dataclass(slots=True)
class RowUpdates:
    """Spans of rows that changed, packed for one upload.

    Spans may overlap; they then carry equal values, so a device may apply them in any order. Copies come last.
    """

    rows: np.ndarray
    """int32 [k]: row of each span."""
    starts: np.ndarray
    """int32 [k]: first position of each span."""
    lengths: np.ndarray
    """int32 [k]: positions in each span."""
    values: np.ndarray
    """int32 [sum(lengths)]: the slots, span after span."""
    copies: RowCopies = field(default_factory=RowCopies.none)

    def __len__(self) -> int:
        return len(self.rows)

    def flat_index(self, max_context: int) -> np.ndarray:
        """int64 [sum(lengths)]: index of each value in the mirror, seen as one flat array of rows × max_context."""
        first = self.rows.astype(np.int64) * max_context + self.starts
        if len(self.values) == len(first):  # a decode step: spans of one position
            return first
        ends = np.cumsum(self.lengths, dtype=np.int64)
        index = np.repeat(first - (ends - self.lengths), self.lengths)
        index += np.arange(len(self.values), dtype=np.int64)
        return index


class ReqToTokenPool:
    """Owns the rows. ``rows``: int32 [num_rows, max_context], read it freely, change it only through `write*`."""

    def __init__(self, num_rows: int, max_context: int) -> None:
        if num_rows < 1 or max_context < 1:
            raise ValueError(f"num_rows and max_context must be at least 1, not {num_rows} and {max_context}")
        self.rows = np.zeros((num_rows, max_context), dtype=np.int32)
        self.reset()

    def reset(self) -> None:
        """Every row is free again, and nothing is left to report. The caller forgets the rows it holds."""
        self._free = list(range(self.num_rows - 1, -1, -1))
        self._is_free = bytearray(b"\1" * self.num_rows)
        self._spans: list[tuple[int, int, int]] = []
        self._points: list[tuple[np.ndarray, np.ndarray]] = []
        self._blocks: list[tuple[np.ndarray, int, int]] = []
        self._copies: list[tuple[np.ndarray, np.ndarray, int]] = []

    @property
    def num_rows(self) -> int:
        return self.rows.shape[0]

    @property
    def max_context(self) -> int:
        """Longest sequence a row can hold, in tokens."""
        return self.rows.shape[1]

    @property
    def num_free(self) -> int:
        return len(self._free)

    def alloc(self) -> int | None:
        """Take a free row; None if there is none. Its old contents are still in it."""
        if not self._free:
            return None
        row = self._free.pop()
        self._is_free[row] = 0
        return row

    def is_taken(self, row: int) -> bool:
        return 0 <= row < self.num_rows and not self._is_free[row]

    def free(self, row: int) -> None:
        """Give a row back. Raises ValueError if it is not taken."""
        if not self.is_taken(row):
            raise ValueError(f"row {row} is not taken (rows: {self.num_rows}); it was freed twice or never allocated")
        self._is_free[row] = 1
        self._free.append(row)

    def keep_only(self, rows: Collection[int]) -> None:
        """Free every row but these, because the owners of the others were lost."""
        self._free = [row for row in range(self.num_rows - 1, -1, -1) if row not in rows]
        self._is_free = bytearray(row not in rows for row in range(self.num_rows))

    def report_again(self, row: int, length: int) -> None:
        """Report the start of a row once more: a step that carried a part of it may never have been formed."""
        if length:
            self._spans.append((row, 0, length))

    def write(self, row: int, start: int, slots: np.ndarray) -> None:
        """Set row[start : start + n] to ``slots`` (int32 [n])."""
        count = len(slots)
        if count == 0:
            return
        if start < 0 or start + count > self.max_context:
            raise ValueError(
                f"positions {start} to {start + count} of row {row} are outside the row of {self.max_context} tokens; "
                "refuse longer requests before they get slots"
            )
        self.rows[row, start : start + count] = slots
        spans = self._spans
        if spans and spans[-1][0] == row and spans[-1][1] + spans[-1][2] == start:  # prefix, then the new tokens
            _, start, before = spans.pop()
            count += before
        spans.append((row, start, count))

    def write_block(self, rows: np.ndarray, start: int, slots: np.ndarray) -> None:
        """Set one span of several rows, each once: rows[i][start : start + n] = slots[i]. int32 [k], int32 [k, n]."""
        count = slots.shape[1]
        if not len(rows) or not count:
            return
        if start < 0 or start + count > self.max_context:
            raise ValueError(f"positions {start} to {start + count} are outside rows of {self.max_context} tokens")
        self.rows[rows, start : start + count] = slots
        self._blocks.append((rows.astype(np.int32), start, count))

    def copy_rows(self, sources: np.ndarray, targets: np.ndarray, length: int) -> None:
        """rows[targets[i]][:length] = rows[sources[i]][:length], int32 [n] each, no target twice. The device makes
        the same copies itself, so giving many rows one long prefix costs no upload."""
        if len(targets) and length:
            self.rows[targets, :length] = self.rows[sources, :length]
            self._copies.append((sources.astype(np.int32), targets.astype(np.int32), length))

    def write_many(self, rows: np.ndarray, positions: np.ndarray, slots: np.ndarray) -> None:
        """Set one slot in each of bs rows, as a decode step does: rows[i][positions[i]] = slots[i]. All int32 [bs]."""
        self.rows[rows, positions] = slots
        self._points.append((rows.astype(np.int32), positions.astype(np.int32)))

    def put_back(self, updates: RowUpdates) -> None:
        """Report these spans again: the step that was to carry them failed, and a mirror may not have got them."""
        self._spans += zip(updates.rows.tolist(), updates.starts.tolist(), updates.lengths.tolist())
        self._spans += [(row, 0, n) for row, n in zip(updates.copies.targets.tolist(), updates.copies.lengths.tolist())]

    def take_updates(self) -> RowUpdates:
        """Everything written since the last call, with its present values: the last write to a position wins."""
        copies = self._take_copies()
        spans, blocks, points = self._spans, self._blocks, self._points
        self._spans, self._blocks, self._points = [], [], []
        if len(points) == 1 and not spans and not blocks:  # a decode step
            rows, positions = points[0]
            return RowUpdates(rows, positions, np.ones_like(rows), self.rows[rows, positions], copies)
        parts = [np.array(spans, dtype=np.int32).reshape(-1, 3).T]
        values = [self.rows[row, start : start + count] for row, start, count in spans]
        for rows, start, count in blocks:
            parts.append(_span_table(rows, start, count))
            values.append(self.rows[rows, start : start + count].ravel())
        for rows, positions in points:
            parts.append(_span_table(rows, positions, 1))
            values.append(self.rows[rows, positions])
        table = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        every = np.concatenate(values) if values else np.empty(0, dtype=np.int32)
        return RowUpdates(rows=table[0], starts=table[1], lengths=table[2], values=every, copies=copies)

    def _take_copies(self) -> RowCopies:
        """The copies that still hold. Targets written since, copied to twice or copied from become spans instead."""
        if not self._copies:
            return RowCopies.none()
        pending, self._copies = self._copies, []
        every = np.concatenate([targets for _, targets, _ in pending]).tolist()
        copied = set(every)
        parts: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for sources, targets, length in pending:
            holds = (self.rows[sources, :length] == self.rows[targets, :length]).all(axis=1)
            if len(copied) < len(every) or not copied.isdisjoint(sources.tolist()):
                holds[:] = False
            self._spans += [(row, 0, length) for row in targets[~holds].tolist()]
            parts.append((sources[holds], targets[holds], np.full(int(holds.sum()), length, dtype=np.int32)))
        return RowCopies(
            sources=np.concatenate([sources for sources, _, _ in parts]),
            targets=np.concatenate([targets for _, targets, _ in parts]),
            lengths=np.concatenate([lengths for _, _, lengths in parts]),
        )


def _span_table(rows: np.ndarray, starts: np.ndarray | int, count: int) -> np.ndarray:
    """int32 [3, n]: row, start and length of n spans."""
    table = np.empty((3, len(rows)), dtype=np.int32)
    table[0], table[1], table[2] = rows, starts, count
    return table
