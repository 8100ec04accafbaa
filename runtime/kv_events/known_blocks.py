"""What all events together say is there, for followers that have missed some of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ...radix.events.block_events import AllCleared, BlockEvent, BlocksRemoved, BlocksStored
from ...radix.node import ID_BYTES

KnownBlock = tuple[int | None, bytes, str, tuple[str, ...]]
"""Hash of the block before, token ids, scope, tiers. A plain tuple: there is one for each block in the cache."""


class KnownBlocks:
    """Blocks by hash, in an order in which each stands behind its parent: it came later, and leaves sooner. Takes
    about 250 bytes for one of 16 tokens."""

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
