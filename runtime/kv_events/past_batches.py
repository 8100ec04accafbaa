"""Recent batches of published events, and one synthetic batch that replaces all earlier ones.

    asked for what is kept:     n, n+1, … last
    asked for what is not:      [all cleared, everything that is there] as batch s, s+1, … last

So a follower that missed too much, followed an earlier server, or has just connected, ends in the right state by
applying batches in order.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from ...radix.events.block_events import AllCleared, BlockEvent, BlocksRemoved, BlocksStored
from ...radix.node import ID_BYTES
from .wire import Packer

KnownBlock = tuple[int | None, bytes, str, tuple[str, ...]]
"""Hash of the block before, token ids, scope, tiers. A plain tuple: there is one for each block in the cache."""


class KnownBlocks:
    """The state that all events so far add up to: blocks by hash, each after its parent. A block of 16 tokens takes
    about 250 bytes."""

    def __init__(self, block_tokens: int) -> None:
        self._step = block_tokens * ID_BYTES
        self._blocks: dict[int, KnownBlock] = {}

    def apply(self, event: BlockEvent) -> None:
        match event:
            case BlocksStored():
                self._store(event)
            case BlocksRemoved():
                self._remove(event)
            case AllCleared():
                self._blocks.clear()

    def _store(self, event: BlocksStored) -> None:
        blocks, step, ids = self._blocks, self._step, event.ids
        parent, scope, tiers = event.parent, event.scope, (event.tier,)
        for start, name in zip(range(0, len(ids), step), event.hashes, strict=True):
            there = blocks.get(name)
            if there is None:
                blocks[name] = (parent, ids[start : start + step], scope, tiers)
            elif event.tier not in there[3]:
                blocks[name] = (*there[:3], there[3] + tiers)
            parent, scope = name, ""

    def _remove(self, event: BlocksRemoved) -> None:
        blocks, tiers = self._blocks, (event.tier,)
        for name in event.hashes:
            there = blocks.get(name)
            if there is None:
                continue  # two blocks had the same hash
            if there[3] == tiers:
                del blocks[name]
            else:
                blocks[name] = (*there[:3], tuple(tier for tier in there[3] if tier != event.tier))

    def copy(self) -> list[tuple[int, KnownBlock]]:
        """For another thread, to make `events_for` of it."""
        return list(self._blocks.items())


def events_for(blocks: Sequence[tuple[int, KnownBlock]]) -> list[BlockEvent]:
    """Events that lead to these blocks, and to no others, from any state."""
    tiers = dict.fromkeys(tier for _, block in blocks for tier in block[3])
    events: list[BlockEvent] = [AllCleared()]
    for tier in tiers:
        events += _stored(tier, ((name, block) for name, block in blocks if tier in block[3]))
    return events


def _stored(tier: str, blocks: Iterable[tuple[int, KnownBlock]]) -> list[BlocksStored]:
    """Runs of blocks that follow one another are one event."""
    runs: list[tuple[list[int], list[KnownBlock]]] = []
    for name, block in blocks:
        if runs and block[0] == runs[-1][0][-1]:
            runs[-1][0].append(name)
            runs[-1][1].append(block)
        else:
            runs.append(([name], [block]))
    return [
        BlocksStored(tier, names, parent, b"".join(ids for _, ids, *_ in run), scope)
        for names, run in runs
        for parent, _, scope, _ in run[:1]
    ]


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
        """The state after that batch; reused as long as all later ones are kept."""

    def add_batch(self, number: int, payload: bytes, events: Sequence[BlockEvent]) -> None:
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
