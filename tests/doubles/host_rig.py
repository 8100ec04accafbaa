"""A host tier, and a disk tier behind it, over a memory that remembers what was computed where."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from baton.memory_pool.allocator import Allocator
from baton.radix.invariants import check_blocks, check_host, check_tree, conservation
from baton.radix.tiers.block_orders import BlockFind, BlockRead, BlockTouch, BlockWrite
from baton.radix.tiers.block_tier import BlockNames, BlockTier
from baton.radix.tiers.host_tier import HostPolicy, HostTier, TierCopy
from tests.doubles.cache_rig import CacheRig, int32


def tokens(count: int, first: int = 1) -> np.ndarray:
    return np.arange(first, first + count, dtype=np.int32)


class TierRig(CacheRig):
    """`pump` starts the copies that are due, `end` ends one; between the two the slots must stay as they are."""

    def __init__(self, host_tokens: int = 512, policy: HostPolicy | None = None, **options: Any) -> None:
        super().__init__(**options)
        page = self.cache.page_size
        fences = self.allocator.fences
        self.host_allocator = Allocator(host_tokens, page, fences=fences, check=True)
        self.tier = HostTier(self.cache, self.host_allocator, policy)
        self.cache.residency = self.tier
        self.host: list[object] = [None] * (host_tokens + page)
        self.copies: dict[int, TierCopy] = {}

    def pump(self) -> None:
        for copy in self.tier.next_stores():
            self.copies[copy.fence] = copy

    def end(self, fence: int, ok: bool = True) -> np.ndarray | None:
        """The copy is made only now: whoever changed its slots meanwhile would have spoilt it."""
        copy = self.copies.pop(fence)
        source, target = (self.kv, self.host) if copy.to_host else (self.host, self.kv)
        froms, tos = copy.device_slots, copy.host_slots
        if not copy.to_host:
            froms, tos = tos, froms
        for number, (a, b) in enumerate(zip(froms.tolist(), tos.tolist(), strict=True)):
            target[b] = source[a] if ok or number % 2 else "rubbish"
        failed = self.tier.finish_copy(fence, ok)
        return None if failed is None else failed.device_slots

    def end_all(self, ok: bool = True) -> None:
        while self.copies:
            self.end(next(iter(self.copies)), ok)

    def store_all(self) -> None:
        self.pump()
        while self.copies:
            self.end_all()
            self.pump()

    def load(self, ids: np.ndarray, namespace: str = "") -> int | None:
        """Begin to bring back what is cached of ``ids``; the fence, or None if there is nothing or no room."""
        match = self.cache.match_prefix(namespace, ids)
        if not match.host_len:
            return None
        self.cache.lock(match.handle)
        if (short := match.host_len - self.allocator.free_tokens) > 0:
            self.cache.evict(short)
        self.cache.unlock(match.handle)
        old = int32(match.device_len)
        slots = self.allocator.alloc_extend(old, old + int32(match.host_len), old)
        if slots is None:
            return None
        copy = self.tier.load_match(match, slots)
        self.copies[copy.fence] = copy
        return copy.fence

    def check(self) -> None:
        sequences = [running.kv for running in self.running]
        check_tree(self.cache, sequences, self.tier.holders())
        conservation(self.cache, self.allocator, sequences).check()
        check_host(self.tier, self.cache.tree.nodes())
        self.check_contents()

    def check_contents(self) -> None:
        """What the tree names holds what its path says, on both tiers."""
        tree = self.cache.tree
        todo = [(child, key[0], b"") for key, child in tree.root.children.items() if isinstance(key, tuple)]
        while todo:
            node, namespace, above = todo.pop()
            if tree.is_hidden(node):
                continue
            ids = above + node.key
            places = ((node.value, self.kv, not node.loading), (node.host, self.host, not node.storing))
            for slots, memory, ready in places:
                if slots is not None and len(slots) and ready:
                    for place, slot in enumerate(slots.tolist(), len(above) // 4):
                        assert memory[slot] == (namespace, ids[: 4 * place + 4]), node
            todo += [(child, namespace, ids) for child in node.children.values()]


class FakeDisk:
    """Blocks by name: what the slots of each held."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, list[object]] = {}

    def size(self) -> None:
        """It does not know."""

    def contains(self, key: bytes) -> bool:
        return key in self.blocks

    def longest(self, keys: Sequence[bytes]) -> int:
        return next((number for number, key in enumerate(keys) if key not in self.blocks), len(keys))


def names(rig: DiskRig, ids: np.ndarray) -> tuple[bytes, ...]:
    """Names of the whole blocks of ``ids``."""
    return tuple(rig.disk._names.of_ids("", [], ids))


class DiskRig(TierRig):
    """`pump_disk` starts reads and writes, `end_disk` ends one."""

    def __init__(self, block_tokens: int, host_tokens: int = 512, **options: Any) -> None:
        super().__init__(host_tokens, **options)
        self.blocks = FakeDisk()
        names = BlockNames(self.cache, b"a model", block_tokens)
        self.disk = BlockTier(self.cache, self.tier, self.blocks, names, max_writing=8)
        self.orders: dict[int, BlockFind | BlockRead | BlockWrite] = {}
        self.touches: list[tuple[bytes, ...]] = []
        self.now = 0.0

    def pump_disk(self) -> None:
        for order in self.disk.take_orders(self.now):
            if isinstance(order, BlockTouch):
                self.touches.append(order.keys + order.snapshots)
            else:
                self.orders[order.fence] = order

    def end_disk(self, fence: int, most: int = 1 << 30) -> None:
        """It is carried out only now. most: of a read so many blocks come, of a write none if it is 0."""
        order = self.orders.pop(fence)
        assert not isinstance(order, BlockFind)
        if isinstance(order, BlockWrite):
            if most:
                held = [self.host[slot] for slot in order.host_slots.tolist()]
                assert self.blocks.blocks.setdefault(order.key, held) == held, "one name for two contents"
            self.disk.finish_order(fence, min(1, most))
            return
        slots = order.host_slots.tolist()
        count, size = min(most, self.blocks.longest(order.keys)), self.disk.block_tokens
        for place, slot in enumerate(slots):
            self.host[slot] = (
                self.blocks.blocks[order.keys[place // size]][place % size] if place < count * size else "?"
            )
        self.disk.finish_order(fence, count)

    def to_disk(self) -> None:
        """Write all that is to be written."""
        self.store_all()
        self.pump_disk()
        while self.orders:
            self.end_disk(next(iter(self.orders)))
            self.pump_disk()

    def check(self) -> None:
        super().check()
        check_blocks(self.disk, self.tier, self.cache.tree)
