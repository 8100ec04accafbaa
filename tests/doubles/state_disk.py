"""A disk tier behind the host for a model with recurrent states, over memories that remember what each slot holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from baton.radix.invariants import check_blocks
from baton.radix.tiers.block_orders import BlockFind, BlockRead, BlockTouch, BlockWrite
from baton.radix.tiers.block_tier import BlockNames, BlockTier
from tests.doubles.host_rig import FakeDisk
from tests.doubles.state_tiers import StateTierRig


@dataclass(frozen=True)
class FakeSnapshot:
    kv: list[object]
    state: object


class FakeSnapshots:
    """Snapshots by name."""

    def __init__(self) -> None:
        self.by_key: dict[bytes, FakeSnapshot] = {}

    def size(self) -> None:
        """It does not know."""

    def contains(self, key: bytes) -> bool:
        return key in self.by_key


class StateDiskRig(StateTierRig):
    """`pump_disk` starts reads and writes, `end_disk` ends one."""

    def __init__(self, block_tokens: int = 16, *, max_writing: int = 8, asks: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.blocks, self.snapshots = FakeDisk(), FakeSnapshots()
        names = BlockNames(self.cache, b"a model", block_tokens)
        self.disk = BlockTier(
            self.cache, self.tier, self.blocks, names, max_writing=max_writing, asks=asks, snapshots=self.snapshots
        )
        self.orders: dict[int, BlockFind | BlockRead | BlockWrite] = {}
        self.touches: list[BlockTouch] = []

    def pump_disk(self, now: float = 0.0) -> None:
        for order in self.disk.take_orders(now):
            if isinstance(order, BlockTouch):
                self.touches.append(order)
            else:
                self.orders[order.fence] = order

    def end_disk(self, fence: int, most: int = 1 << 30) -> None:
        """It is carried out only now. most: of a read so many blocks come, the snapshot included; of a write none if it
        is 0."""
        order = self.orders.pop(fence)
        assert not isinstance(order, BlockFind)
        if isinstance(order, BlockWrite):
            if most:
                self._write(order)
            self.disk.finish_order(fence, min(1, most))
            return
        count, size, end = min(most, self.blocks.longest(order.keys)), self.disk.block_tokens, len(order.keys)
        slots, tail = order.host_slots[: end * size].tolist(), order.host_slots[end * size :].tolist()
        for place, slot in enumerate(slots):
            is_there = place < count * size
            self.host[slot] = self.blocks.blocks[order.keys[place // size]][place % size] if is_there else "?"
        comes = end == count < most and order.snapshot in self.snapshots.by_key
        snapshot = self.snapshots.by_key[order.snapshot] if comes else FakeSnapshot(["?"] * len(tail), ("rubbish", b""))
        for slot, kept in zip(tail, snapshot.kv, strict=True):
            self.host[slot] = kept
        self.host_states[order.host_state] = snapshot.state  # type: ignore[call-overload]
        self.disk.finish_order(fence, count + comes)

    def _write(self, order: BlockWrite) -> None:
        held = [self.host[slot] for slot in order.host_slots.tolist()]
        if not order.host_state:
            assert self.blocks.blocks.setdefault(order.key, held) == held, "one name for two contents"
            return
        snapshot = FakeSnapshot(held, self.host_states[order.host_state])
        assert self.snapshots.by_key.setdefault(order.key, snapshot) == snapshot, "one name for two contents"

    def to_disk(self) -> None:
        """Write all that is to be written."""
        self.store_all()
        self.pump_disk()
        while self.orders:
            self.end_disk(next(iter(self.orders)))
            self.pump_disk()

    def forget_all(self) -> None:
        """Nothing is left but what is on disk."""
        self.cache.evict(10**9)
        self.tier.evict(10**9)
        self.check()
        assert self.cache.total_nodes == 0

    def check(self) -> None:
        super().check()
        check_blocks(self.disk, self.tier, self.cache.tree)
