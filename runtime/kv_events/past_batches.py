"""The batches of events that were published, as far as they are kept, and all that came before in one.

    asked for what is kept:     n, n+1, … last
    asked for what is not:      [all cleared, everything that is there] as batch s, s+1, … last

So a follower that has missed too much, has followed an earlier server, or has only just come, is right again, and need
not know how that was done: it applies batches in their order.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from ...radix.events.block_events import BlockEvent
from .known_blocks import KnownBlocks, events_for
from .wire import Packer

Batch = tuple[int, bytes]
"""Sequence number and payload."""


class PastBatches:
    """Filled by the thread of the worker, read by any other. max_bytes: of the payloads that are kept."""

    def __init__(self, packer: Packer, block_tokens: int, max_bytes: int, wall_clock: Callable[[], float]) -> None:
        self._packer = packer
        self._max_bytes = max_bytes
        self._wall_clock = wall_clock
        self._lock = threading.Lock()
        self._batches: deque[Batch] = deque()
        self._bytes = 0
        self._last = -1
        self._known = KnownBlocks(block_tokens)
        self._snapshot: Batch | None = None
        """What was there after that batch; used again as long as all later ones are kept."""

    def add(self, number: int, payload: bytes, events: Sequence[BlockEvent]) -> None:
        with self._lock:
            for event in events:
                self._known.apply(event)
            self._last = number
            self._batches.append((number, payload))
            self._bytes += len(payload)
            while self._bytes > self._max_bytes:
                self._bytes -= len(self._batches.popleft()[1])

    def since(self, first: int) -> list[Batch]:
        """The batches from number ``first`` on, or what stands for them."""
        with self._lock:
            batches, last = list(self._batches), self._last
            oldest = last + 1 - len(batches)
            if first >= oldest:
                return batches[first - oldest :]
            snapshot = self._snapshot
            if snapshot is not None and snapshot[0] + 1 >= oldest:
                return [snapshot, *batches[snapshot[0] + 1 - oldest :]]
            known = self._known.copy()
        snapshot = self._snapshot = (last, self._packer.payload(events_for(known), self._wall_clock()))
        return [snapshot]
