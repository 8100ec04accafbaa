"""What all events together say is there, for followers that have missed some of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...radix.events.block_events import AllCleared, BlockEvent, BlocksRemoved, BlocksStored
from ...radix.node import ID_BYTES


class KnownBlock(NamedTuple):
    parent: int | None
    ids: bytes
    scope: str
    tiers: tuple[str, ...]


class KnownBlocks:
    """Blocks by hash, in an order in which each stands behind its parent: it came later, and leaves sooner. Takes
    about 400 bytes for a block."""

    def __init__(self, block_tokens: int) -> None:
        self._step = block_tokens * ID_BYTES
        self._blocks: dict[int, KnownBlock] = {}

    def apply(self, event: BlockEvent) -> None:
        match event:
            case BlocksStored():
                parent, scope, step = event.parent, event.scope, self._step
                for number, name in enumerate(event.hashes):
                    there = self._blocks.get(name)
                    tiers = (*there.tiers, event.tier) if there is not None else (event.tier,)
                    ids = event.ids[number * step : (number + 1) * step] if there is None else there.ids
                    self._blocks[name] = KnownBlock(parent, ids, scope, tiers)
                    parent, scope = name, ""
            case BlocksRemoved():
                for name in event.hashes:
                    self._remove(name, event.tier)
            case AllCleared():
                self._blocks.clear()

    def _remove(self, name: int, tier: str) -> None:
        there = self._blocks.get(name)
        if there is None:
            return  # two blocks had the same hash
        tiers = tuple(other for other in there.tiers if other != tier)
        if tiers:
            self._blocks[name] = there._replace(tiers=tiers)
        else:
            del self._blocks[name]

    def copy(self) -> list[tuple[int, KnownBlock]]:
        """For another thread, to make `events_for` of it."""
        return list(self._blocks.items())


def events_for(blocks: Sequence[tuple[int, KnownBlock]]) -> list[BlockEvent]:
    """Events that lead to these blocks, and to no others, from any state."""
    tiers = dict.fromkeys(tier for _, block in blocks for tier in block.tiers)
    events: list[BlockEvent] = [AllCleared()]
    for tier in tiers:
        events += _stored(tier, ((name, block) for name, block in blocks if tier in block.tiers))
    return events


def _stored(tier: str, blocks: Iterable[tuple[int, KnownBlock]]) -> list[BlocksStored]:
    """Runs of blocks that follow one another are one event."""
    runs: list[tuple[list[int], list[KnownBlock]]] = []
    for name, block in blocks:
        if runs and block.parent == runs[-1][0][-1]:
            runs[-1][0].append(name)
            runs[-1][1].append(block)
        else:
            runs.append(([name], [block]))
    return [
        BlocksStored(tier, names, run[0].parent, b"".join(block.ids for block in run), run[0].scope)
        for names, run in runs
    ]
