"""A heap of serial numbers, lowest key first, from which nothing needs to be removed.

The owner of the keys says which key a serial has now. An entry with any other key is dead: it stays where it is until
it comes first, or until the heap has twice as many entries as were live at the last clean-up; then all dead entries are
thrown away. So the heap stays bounded, and a push and a look at the first entry cost O(log n) on average.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

Key = TypeVar("Key", float, tuple[float, ...])

SPARE_ENTRIES = 16
"""This many dead entries are always tolerated: a small heap is not worth a clean-up."""


class LazyHeap(Generic[Key]):
    """``key_of`` gives the key that a serial has now, None for a serial that has left."""

    def __init__(self, key_of: Callable[[int], Key | None]) -> None:
        self._key_of = key_of
        self._entries: list[tuple[Key, int]] = []
        self._limit = SPARE_ENTRIES

    def __len__(self) -> int:
        """Entries, dead ones included."""
        return len(self._entries)

    def serials(self) -> set[int]:
        """Serials that have a live entry; for invariants."""
        return {entry[1] for entry in self._entries if self._is_live(entry)}

    def push_entry(self, key: Key, serial: int) -> None:
        """``key`` is the serial's key from now on; an entry with another one is dead."""
        heappush(self._entries, (key, serial))
        if len(self._entries) > self._limit:
            self._entries = list({entry for entry in self._entries if self._is_live(entry)})
            heapify(self._entries)
            self._limit = 2 * len(self._entries) + SPARE_ENTRIES

    def first(self) -> tuple[Key, int] | None:
        """(key, serial) with the lowest key, of equal keys with the lowest serial; None if the heap is empty."""
        while self._entries and not self._is_live(self._entries[0]):
            heappop(self._entries)
        return self._entries[0] if self._entries else None

    def may_have(self, key: Key) -> bool:
        """False if no live entry has this key or a lower one. True where only a dead entry has, too."""
        return bool(self._entries) and self._entries[0][0] <= key

    def pop(self) -> tuple[Key, int] | None:
        """As `first`, but removes the entry."""
        return heappop(self._entries) if self.first() is not None else None

    def _is_live(self, entry: tuple[Key, int]) -> bool:
        return self._key_of(entry[1]) == entry[0]
