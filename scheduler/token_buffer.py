"""Token ids: packed for messages, and as buffers that grow while a sequence does."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np


def pack_ids(ids: Sequence[int] | np.ndarray) -> bytes:
    """Token ids -> little-endian int32, 4 bytes each: how they travel and how a RequestSpec holds them."""
    if isinstance(ids, list):  # mostly one id per message, where NumPy costs more than the packing
        return struct.pack(f"<{len(ids)}i", *ids)
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes) -> np.ndarray:
    """bytes -> int32 [len // 4], a read-only view."""
    return np.frombuffer(data, dtype="<i4")


class TokenMemory:
    """The memory that token buffers share. data: int32; its first ``writable`` ids may be written, and those behind
    ``used`` are free."""

    __slots__ = ("data", "used", "writable")

    def __init__(self, data: np.ndarray, used: int, *, writable: int) -> None:
        self.data = data
        self.used = used
        self.writable = writable

    def __len__(self) -> int:
        """Capacity in ids, used or not; constant."""
        return len(self.data)


class TokenBuffer:
    """Append-only token ids: amortised O(1) append, zero-copy int32 view.

    Buffers may share memory, like slices in Go: the one that ends where the memory's used part ends appends in place,
    any other copies first. So a child appends to its parent's memory, at no cost that grows with the prompt. The ids
    that a buffer begins with belong to the caller and must not change; the first append copies them.

    If `extend` needs a copy, the copy is put off until the ids are read: thousands of children may wait for one parent,
    and each copies its prompt only when it is admitted.
    """

    __slots__ = ("_length", "_memory", "_tail")

    def __init__(self, ids: np.ndarray) -> None:
        self._length = len(ids)
        self._memory = TokenMemory(ids, self._length, writable=0)
        self._tail: np.ndarray | None = None
        """The last ids, counted in the length, while they are not in the memory yet."""

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, position: int) -> int:
        if self._tail is not None:
            self._join()
        return int(self._memory.data[position])

    def append(self, token_id: int) -> None:
        if self._tail is not None:
            self._join()
        length, memory = self._length, self._memory
        if memory.used != length or length >= memory.writable:
            self._move(length, 1)
            memory = self._memory
        memory.data[length] = token_id
        self._length = memory.used = length + 1

    def extend(self, ids: np.ndarray) -> None:
        """Append int32 [n]."""
        if not len(ids):
            return
        if self._tail is not None:
            self._join()
        self._tail = ids
        self._length += len(ids)
        if self._has_room(self._length - len(ids), len(ids)):
            self._join()

    def _join(self) -> None:
        """Write the tail into the memory. If memory for a copy cannot be allocated, nothing has changed."""
        ids = self._tail
        assert ids is not None
        start = self._length - len(ids)
        if not self._has_room(start, len(ids)):
            self._move(start, len(ids))
        self._memory.data[start : self._length] = ids
        self._memory.used, self._tail = self._length, None

    def view(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """int32 view of ids[start:stop]; valid until the next append."""
        if self._tail is not None:
            self._join()
        return self._memory.data[start : self._length if stop is None else min(stop, self._length)]

    @property
    def memory(self) -> TokenMemory:
        """The memory that holds the ids, possibly shared with other buffers."""
        if self._tail is not None:
            self._join()
        return self._memory

    def share(self) -> TokenBuffer:
        """Another buffer of the same ids in the same memory."""
        if self._tail is not None:
            self._join()
        other = TokenBuffer.__new__(TokenBuffer)
        other._length, other._memory, other._tail = self._length, self._memory, None
        return other

    def cut(self, length: int) -> TokenBuffer:
        """A buffer of the first ``length`` ids. If this buffer ends the used memory, the ids after ``length`` are
        given up and must not be read again."""
        if self._tail is not None:
            self._join()
        if self._memory.used == self._length:
            self._memory.used = length
        other = self.share()
        other._length = length
        return other

    def _has_room(self, length: int, count: int) -> bool:
        """May ``count`` ids be written behind the first ``length``?"""
        memory = self._memory
        return memory.used == length and length + count <= memory.writable

    def _move(self, length: int, count: int) -> None:
        """Move to a copy of the first ``length`` ids, with room for ``count`` more and some to spare."""
        capacity = length + length // 4 + 64 + count
        data = np.empty(capacity, dtype=np.int32)
        data[:length] = self._memory.data[:length]
        self._memory = TokenMemory(data, length, writable=capacity)
