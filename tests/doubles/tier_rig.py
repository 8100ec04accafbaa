"""The tiers below the device for a scheduler on the KV-echo model: what it orders is made late, ends in any order, and
fails."""

from __future__ import annotations

import random
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

import numpy as np

from baton.memory_pool.allocator import Allocator
from baton.memory_pool.state_slots import StateSlots
from baton.memory_pool.stores.block_store import StoreSize
from baton.radix.cache import RadixCache
from baton.radix.invariants import check_blocks
from baton.radix.tiers.block_orders import BlockFind, BlockOrder, BlockRead, BlockTouch, BlockWrite
from baton.radix.tiers.block_tier import BlockNames, BlockTier
from baton.radix.tiers.host_tier import HostPolicy, HostTier, TierCopy
from tests.doubles.kv_echo import KVEchoModel, Snapshot


@dataclass
class _Ordered:
    what: TierCopy | BlockFind | BlockRead | BlockWrite
    ok: bool
    made: bool = False
    blocks: int = 0


@dataclass(frozen=True)
class Ended:
    fence: int
    ok: bool
    blocks: int | None
    """None for a copy between device and host."""


class FakeBlocks:
    """Blocks by name. total: how many it has room for; None for one that does not know."""

    def __init__(self, total: int | None = None) -> None:
        self.total = total
        self.blocks: MutableMapping[bytes, np.ndarray] = {}
        self.touched: list[tuple[bytes, ...]] = []
        self.snapshots: MutableMapping[bytes, Snapshot] = {}

    @property
    def of_snapshots(self) -> SnapshotIndex:
        return SnapshotIndex(self)

    def size(self) -> StoreSize | None:
        """Size with blocks of 10 bytes."""
        used = len(self.blocks)
        return None if self.total is None else StoreSize(used, self.total, 10 * used, 10 * self.total, 0)

    def contains(self, key: bytes) -> bool:
        return key in self.blocks

    def longest(self, keys: Sequence[bytes]) -> int:
        return next((number for number, key in enumerate(keys) if key not in self.blocks), len(keys))

    def touch(self, keys: tuple[bytes, ...]) -> None:
        assert len({*keys}) == len(keys) > 0
        self.touched.append(keys)


@dataclass(frozen=True)
class SnapshotIndex:
    """Those among the blocks of a store."""

    of: FakeBlocks

    def size(self) -> StoreSize | None:
        total, used = self.of.total, len(self.of.snapshots)
        return None if total is None else StoreSize(used, total, 30 * used, 30 * total, 0)

    def contains(self, key: bytes) -> bool:
        return key in self.of.snapshots


class FakeTiers:
    """Owns the tiers and what they have ordered. Without ``rng`` every order is made, and ends, with the next turn."""

    def __init__(
        self,
        cache: RadixCache,
        model: KVEchoModel,
        *,
        host_tokens: int,
        host_states: int = 0,
        policy: HostPolicy | None = None,
        block_tokens: int = 0,
        blocks: tuple[FakeBlocks, FakeBlocks] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        """host_states: room for recurrent states on the host; 0 if it keeps none. block_tokens: of a disk tier; 0 for
        none. blocks: what is there already, on disk and in a remote store."""
        page = cache.page_size
        allocator = Allocator(host_tokens, page, fences=cache.allocator.fences, check=True)
        slots = StateSlots(host_states, fences=allocator.fences, check=True) if host_states else None
        self.host = HostTier(cache, allocator, policy, slots)
        model.states.add_host(host_states)
        cache.residency = self.host
        self.blocks, self.far = blocks or (FakeBlocks(), FakeBlocks())
        self.far_index = FakeBlocks()
        """What of the remote store's blocks is known here."""
        self.disk: BlockTier | None = None
        self.remote: BlockTier | None = None
        if block_tokens:
            names = BlockNames(cache, b"echo", block_tokens)
            disk, remote = (index.of_snapshots if host_states else None for index in (self.blocks, self.far_index))
            self.disk = BlockTier(cache, self.host, self.blocks, names, snapshots=disk)
            self.remote = BlockTier(cache, self.host, self.far_index, names, name="remote", asks=True, snapshots=remote)
        self.failure_rate = 0.0
        self._cache = cache
        self._model = model
        self._rng = rng
        self._ordered: list[_Ordered] = []
        model.host_kv = np.zeros(host_tokens + page, dtype=np.uint64)

    @property
    def stores(self) -> list[BlockTier]:
        return [tier for tier in (self.disk, self.remote) if tier is not None]

    def __len__(self) -> int:
        """Orders that have not ended."""
        return len(self._ordered)

    def order(self, orders: Sequence[TierCopy | BlockOrder]) -> None:
        rng = self._rng
        for order in orders:
            if isinstance(order, BlockTouch):
                self._of(order.store)[0].touch(order.keys + order.snapshots)
            else:
                self._ordered.append(_Ordered(order, rng is None or rng.random() >= self.failure_rate))

    def load_all(self) -> bool:
        """A step is launched: what it may read is brought first. False if that failed: so does the step."""
        ok = True
        for ordered in self._ordered:
            if isinstance(ordered.what, TierCopy) and not ordered.what.to_host:
                self._make(ordered)
                ok = ok and ordered.ok
        return ok

    def take_ended(self) -> list[Ended]:
        """Orders that end now: all, or those that chance picks, in any order."""
        rng = self._rng
        if rng is not None:
            rng.shuffle(self._ordered)
        count = len(self._ordered) if rng is None else rng.randrange(len(self._ordered) + 1)
        ended, self._ordered = self._ordered[:count], self._ordered[count:]
        for ordered in ended:
            self._make(ordered)
        return [
            Ended(ordered.what.fence, ordered.ok, None if isinstance(ordered.what, TierCopy) else ordered.blocks)
            for ordered in ended
        ]

    def check(self) -> None:
        """What the scheduler's own check leaves out."""
        for tier in self.stores:
            check_blocks(tier, self.host, self._cache.tree)

    def _make(self, ordered: _Ordered) -> None:
        if ordered.made:
            return
        ordered.made = True
        match ordered.what:
            case TierCopy() as copy:
                self._model.copy(copy, ordered.ok)
            case BlockWrite(host_state=state) as write if state:
                ordered.blocks = int(ordered.ok)
                if ordered.ok:
                    snapshot = self._model.write_snapshot(write.host_slots, state)
                    for blocks in self._of(write.store):
                        assert blocks.snapshots.setdefault(write.key, snapshot) == snapshot, "a name for two states"
            case BlockWrite() as write:
                ordered.blocks = int(ordered.ok)
                if ordered.ok:
                    block = self._model.write_block(write.host_slots)
                    for blocks in self._of(write.store):
                        blocks.blocks[write.key] = block
            case BlockRead() as read:
                self._read(read, ordered)
            case BlockFind() as find:
                ordered.blocks = self._of(find.store)[0].longest(find.keys) if ordered.ok else 0
                for key in find.keys[: ordered.blocks]:
                    self.far_index.blocks[key] = self.far.blocks[key]
                if find.places is not None and ordered.ok:
                    for _, key in find.places.within(find.first + ordered.blocks):
                        if key in self.far.snapshots:
                            self.far_index.snapshots[key] = self.far.snapshots[key]

    def _of(self, store: str) -> list[FakeBlocks]:
        """Its blocks, and the index of them if that is another thing."""
        return [self.blocks] if store == "disk" else [self.far, self.far_index]

    def _read(self, read: BlockRead, ordered: _Ordered) -> None:
        blocks, *index = self._of(read.store)
        ordered.blocks = blocks.longest(read.keys)
        if not ordered.ok and ordered.blocks and self._rng is not None:  # one is damaged
            ordered.blocks = self._rng.randrange(ordered.blocks)
            for each in (blocks, *index):
                each.blocks.pop(read.keys[ordered.blocks], None)
        for key in read.keys[ordered.blocks :]:
            for each in index:
                each.blocks.pop(key, None)
        size = next(tier.block_tokens for tier in self.stores)
        end = len(read.keys) * size
        for number, slots in enumerate(read.host_slots[:end].reshape(len(read.keys), size)):
            block = blocks.blocks[read.keys[number]] if number < ordered.blocks else None
            self._model.read_block(slots, block)
        if read.host_state:
            there = ordered.ok and ordered.blocks == len(read.keys) and read.snapshot in blocks.snapshots
            snapshot = blocks.snapshots[read.snapshot] if there else None
            self._model.read_snapshot(read.host_slots[end:], read.host_state, snapshot)
            ordered.blocks += there
            for each in (blocks, *index) if not there and ordered.blocks == len(read.keys) else ():
                each.snapshots.pop(read.snapshot, None)
