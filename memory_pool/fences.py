"""Tracks the operations in flight that may still use slots: steps of the model, copies between tiers.

    open_fence ──▶ 7     a step is formed, or a copy is ordered        is_open(7)
    close_fence(7)       it has ended; a failed one counts as ended

Slots that are freed while a step still writes them, or a copy still reads or writes them, wait for its fence in an
allocator's quarantine. (Slots that a step only reads need no fence: docs/design/memory_and_radix.md.)
Steps end in order, copies as they please; so a fence is a name, not a point in time. One object serves all pools.
"""

from __future__ import annotations

from collections.abc import Collection


class Fences:
    """Owns the names of the operations that have not ended."""

    def __init__(self) -> None:
        self._next = 0
        self._open: set[int] = set()

    def __len__(self) -> int:
        """Operations that have not ended."""
        return len(self._open)

    def open_fence(self) -> int:
        """A new fence; no number is used twice."""
        self._next += 1
        self._open.add(self._next)
        return self._next

    def close_fence(self, fence: int) -> None:
        """The operation has ended. Raises KeyError for a fence that is not open."""
        self._open.remove(fence)

    def keep_only(self, fences: Collection[int]) -> None:
        """Close all others, because the owners that should close them were lost."""
        self._open.intersection_update(fences)

    def open_fences(self) -> list[int]:
        """Those of all operations that have not ended."""
        return sorted(self._open)

    def is_open(self, fence: int) -> bool:
        return fence in self._open
