"""A tier behind the host: blocks of KV by name, written from copies on the host and read back to the host. A disk is
one, a server in the network another.

    copy on the host ──▶ wanted ──take_orders──▶ being written ──finish_order──▶ there, if the index says so

    find_blocks ──▶ begin_read ──▶ being read ──finish_order──▶ adopted: a copy on the host, which a match may load

    matched, or written ──▶ used ──take_orders──▶ the store marks it as used, and evicts the others first

A block is the KV of a fixed number of consecutive tokens. Its name stands for all tokens up to its end, so it does not
depend on nodes. The index says which blocks are there; if it is incomplete, `begin_find` asks the store. This class
decides and counts; threads carry out its orders, and `finish_order` takes their results. Blocks that could not be
written or read are computed again when needed; no request fails for it.

While an order is under way its slots on the host keep their contents: if they are freed meanwhile, they wait for its
fence.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ...memory_pool.stores.block_keys import block_keys, root_key
from ...memory_pool.stores.block_store import StoreSize
from ..cache import RadixCache
from ..node import ID_BYTES, TreeNode
from .block_orders import BlockFind, BlockOrder, BlockRead, BlockTouch, BlockWrite
from .host_tier import MAX_WANTED, HostTier

MAX_ASKED = 1024
"""Most blocks in one question to a store, or in one touch."""

TOUCH_S = 10.0
"""How often, at most, a store is told which blocks are in use, unless many are."""

MAX_ROOTS = 4096
"""Namespaces for which root keys are kept."""


class BlockIndex(Protocol):
    """Which blocks are there, and how full it is. May be out of date when the answer is used."""

    def contains(self, key: bytes) -> bool: ...

    def size(self) -> StoreSize | None: ...


@dataclass(slots=True, frozen=True)
class Reading:
    """A read that is under way, and what it is for."""

    order: BlockRead
    namespace: str
    ids: np.ndarray
    """int32: the tokens from the start of the sequence to the end of the last block."""
    wanted: bool = True
    """False once the tree has been dropped: the blocks are discarded when they come."""


@dataclass(slots=True, frozen=True)
class Found:
    """Blocks of a sequence that can be read from the store: those from number ``first`` on."""

    namespace: str
    ids: np.ndarray
    """int32: as in `Reading`."""
    first: int
    keys: tuple[bytes, ...]
    gain: int
    """Tokens that are on no other tier."""
    under_way: int = 0
    """Fence of a read that brings the first of them already; 0 if none does."""


@dataclass(slots=True)
class BlockCounts:
    """Tokens since start."""

    written: int = 0
    failed_writes: int = 0
    """Not accepted, or not written."""
    read: int = 0
    missed: int = 0
    """Asked for and not there, damaged or late."""
    adopted: int = 0
    """Read, and on the host since; the others were there by then, or had lost what comes before them."""


class BlockTier:
    """Decides what is written and read.

    host: the tier in front. name: the store's, in orders. asks: the index is incomplete, so the store must be asked.
    max_writing: most blocks that are being written at a time.
    """

    def __init__(
        self,
        cache: RadixCache,
        host: HostTier,
        index: BlockIndex,
        names: BlockNames,
        *,
        name: str = "disk",
        asks: bool = False,
        max_writing: int = 64,
    ) -> None:
        self.name = name
        self.asks = asks
        self.block_tokens = names.block_tokens
        self.counts = BlockCounts()
        self.writing: dict[int, BlockWrite] = {}
        """By fence."""
        self.readings: dict[int, Reading] = {}
        """By fence."""
        self._cache = cache
        self._host = host
        self._index = index
        self._names = names
        self._max_writing = max_writing
        self._wanted: deque[tuple[TreeNode, int]] = deque(maxlen=MAX_WANTED)
        """Nodes, and the first block of each path that has not been tried yet."""
        self._used: dict[TreeNode, None] = {}
        """Ends of paths in use that the store does not know of yet, the last used last."""
        self._writes_since_touch = 0
        self._touch_at = float("-inf")
        """When the store is told at the latest."""
        self._writing_keys: set[bytes] = set()
        self._readers = np.zeros(host.allocator.total_tokens + cache.page_size, dtype=np.int32)
        """By slot on the host: how many writes read it; blocks that begin alike share slots."""
        self._reading_keys: dict[bytes, int] = {}
        """Block -> fence of the read that brings it."""
        self.finds: set[int] = set()
        """Fences."""
        self._new_orders: list[BlockOrder] = []
        host.below.append(self)

    def size(self) -> StoreSize | None:
        """The size of the store; None where it does not know it."""
        return self._index.size()

    # -- as the tier below the host -----------------------------------------------------------------------------------

    def copy_stored(self, node: TreeNode) -> None:
        self._wanted.append((node, 0))

    def path_used(self, node: TreeNode) -> None:
        self._used.pop(node, None)
        self._used[node] = None

    def fences_reading(self, slots: np.ndarray) -> list[int]:
        if not self._readers[slots].any():
            return []
        return [fence for fence, write in self.writing.items() if np.isin(write.host_slots, slots).any()]

    def detach_orders(self) -> list[tuple[int, np.ndarray]]:
        going_on = [(write.fence, write.host_slots) for write in self.writing.values()]
        going_on += [(reading.order.fence, reading.order.host_slots) for reading in self.readings.values()]
        self.readings = {f: Reading(r.order, r.namespace, r.ids, wanted=False) for f, r in self.readings.items()}
        self._wanted.clear()
        self._used.clear()
        self._reading_keys.clear()
        return going_on

    @property
    def incoming_slots(self) -> list[np.ndarray]:
        return [reading.order.host_slots for reading in self.readings.values() if reading.wanted]

    # -- orders -------------------------------------------------------------------------------------------------------

    def take_orders(self, now: float) -> list[BlockOrder]:
        """The orders to carry out now, in this order."""
        orders, self._new_orders = self._new_orders, []
        return [*orders, *self._next_writes(), *self._next_touches(now)]

    @property
    def fences(self) -> set[int]:
        """Fences of all orders that are under way."""
        return {*self.writing, *self.readings, *self.finds}

    def owns(self, fence: int) -> bool:
        """True for an order of this tier that is under way."""
        return fence in self.writing or fence in self.readings or fence in self.finds

    def _next_writes(self) -> list[BlockWrite]:
        writes: list[BlockWrite] = []
        later: list[tuple[TreeNode, int]] = []
        while self._wanted and len(self.writing) < self._max_writing:
            node, first = self._wanted.popleft()
            if node.host is None or self._cache.tree.reachable(node) is not node:
                continue
            path = self._cache.tree.path(node, 0)
            if any(above.storing for above in path):
                later.append((node, first))  # what comes before it is not on the host yet
                continue
            keys = self._names.of_path(path)
            missing = [(number, key) for number, key in enumerate(keys) if number >= first and not self._has(key)]
            room = self._max_writing - len(self.writing)
            if len(missing) > room:
                later.append((node, missing[room][0]))  # each is tried once: a store may refuse them all
            else:
                self.path_used(node)  # not sooner: what is written last would outlive what comes before it
            if missing:
                slots = np.concatenate([above.host for above in path if above.host is not None])
                writes += [self._write(key, slots, number) for number, key in missing[:room]]
        self._wanted.extendleft(reversed(later))
        self._writes_since_touch += len(writes)
        return writes

    def _next_touches(self, now: float) -> list[BlockTouch]:
        """Mark blocks as used in the store: memory serves these uses, so the store would not see them. Each block once;
        the latest use comes last, and the end of each sequence first, as sequences are evicted from their ends."""
        if not self._used or (now < self._touch_at and len(self._used) + self._writes_since_touch < self._max_writing):
            return []
        self._touch_at, self._writes_since_touch = now + TOUCH_S, 0
        used, self._used = self._used, {}
        tree, told, touches = self._cache.tree, set[bytes](), list[BlockTouch]()
        for node in reversed(used):
            if tree.reachable(node) is not node:
                continue
            keys = [key for key in self._names.of_path(tree.path(node, 0)) if key not in told and self._has(key)]
            told.update(keys)
            starts = range(0, len(keys), MAX_ASKED)
            touches += [BlockTouch(self.name, tuple(keys[start : start + MAX_ASKED])) for start in starts]
        return touches[::-1]

    def _has(self, key: bytes) -> bool:
        """Is the block there, or on its way?"""
        return key in self._writing_keys or self._index.contains(key)

    def _write(self, key: bytes, slots: np.ndarray, number: int) -> BlockWrite:
        size = self.block_tokens
        fence = self._host.allocator.fences.open_fence()
        write = BlockWrite(self.name, fence, key, slots[number * size : (number + 1) * size].copy())
        self.writing[fence] = write
        self._readers[write.host_slots] += 1
        self._writing_keys.add(key)
        return write

    # -- look up, read ------------------------------------------------------------------------------------------------

    def find_blocks(self, namespace: str, ids: np.ndarray) -> Found | None:
        """The blocks of ``ids``, int32 [n], that the store has beyond the cached prefix, by the index; changes nothing.
        None if there are none."""
        size = self.block_tokens
        missing = self._missing(namespace, ids)
        if missing is None:
            return None
        first, covered, keys = missing
        count = next((number for number, key in enumerate(keys) if not self._index.contains(key)), len(keys))
        gain = (first + count) * size - covered
        if gain <= 0:
            return None
        under_way = self._reading_keys.get(keys[max(0, covered // size - first)], 0)
        end = first + count
        return Found(namespace, ids[: end * size].copy(), first, tuple(keys[:count]), gain, under_way)

    def _missing(self, namespace: str, ids: np.ndarray) -> tuple[int, int, list[bytes]] | None:
        """(first block that is not on the host, tokens that are cached anywhere, keys from that block on). None if not
        even one block would be gained."""
        size, tree = self.block_tokens, self._cache.tree
        whole, covered, _ = self._cache.find_prefix(namespace, ids)
        if len(ids) // size * size <= covered:
            return None
        path = tree.path(whole, 0)
        stored = next((above.prefix_len - len(above) for above in path if above.host is None or above.storing), covered)
        first = stored // size
        return first, covered, self._names.of_ids(namespace, path, ids)[first:]

    def begin_find(self, namespace: str, ids: np.ndarray, timeout: float) -> int | None:
        """Order the store to say which blocks of ``ids`` it has; returns the fence. None if there is nothing to ask, or
        the index knows all blocks."""
        missing = self._missing(namespace, ids) if self.asks else None
        if missing is None:
            return None
        fence = self._host.allocator.fences.open_fence()
        self.finds.add(fence)
        self._new_orders.append(BlockFind(self.name, fence, tuple(missing[2][:MAX_ASKED]), timeout))
        return fence

    def begin_read(self, found: Found, timeout: float) -> int | None:
        """Order a read of as many leading blocks as the host can hold; its fence. None if it has no room, or others
        fill it just now."""
        size, host, count = self.block_tokens, self._host, len(found.keys)
        coming = sum(len(slots) for tier in host.below for slots in tier.incoming_slots)
        if coming and coming + count * size > host.allocator.total_tokens // 4:
            return None  # what comes for one must not push out what has come for another
        whole, _, last = self._cache.find_prefix(found.namespace, found.ids)
        for node in (whole, last):
            self._cache.touch(node)  # the blocks need their prefix when they arrive, and now:
        while last.host is None and last.parent is not None:
            last = last.parent
        room = host.make_room(count * size, kept=last)
        left_out = count - room // size
        if found.gain <= left_out * size:
            return None
        keys, slots = found.keys[: count - left_out], host.allocate((count - left_out) * size)
        assert slots is not None, "room has been made"
        fence = host.allocator.fences.open_fence()
        order = BlockRead(self.name, fence, keys, slots, timeout)
        self.readings[fence] = Reading(order, found.namespace, found.ids[: len(found.ids) - left_out * size])
        self._reading_keys |= dict.fromkeys(keys, fence)
        self._new_orders.append(order)
        return fence

    # -- the end of an order ------------------------------------------------------------------------------------------

    def finish_order(self, fence: int, blocks: int) -> int:
        """An order has been carried out. blocks: how many leading blocks of a read are on the host now; of a write, 1,
        or 0 if it failed. Returns the tokens that are on the host since."""
        self._host.allocator.fences.close_fence(fence)
        adopted = 0
        if fence in self.finds:
            self.finds.remove(fence)
        elif (write := self.writing.pop(fence, None)) is not None:
            self._writing_keys.remove(write.key)
            self._readers[write.host_slots] -= 1
            self.counts.written += self.block_tokens if blocks else 0
            self.counts.failed_writes += 0 if blocks else self.block_tokens
        else:
            adopted = self._take_in(self.readings.pop(fence), blocks)
        self._host.allocator.release_quarantine()
        return adopted

    def _take_in(self, reading: Reading, blocks: int) -> int:
        order, size = reading.order, self.block_tokens
        self.counts.read += blocks * size
        self.counts.missed += (len(order.keys) - blocks) * size
        if not reading.wanted:
            return 0  # the slots have been in quarantine since the tree was given up
        for key in order.keys:
            if self._reading_keys.get(key) == order.fence:
                del self._reading_keys[key]
        end = len(reading.ids) - (len(order.keys) - blocks) * size
        start = len(reading.ids) - len(order.host_slots)
        slots, rest = order.host_slots[: end - start], order.host_slots[end - start :]
        taken = self._adopt(reading.namespace, reading.ids[:end], start, slots) if blocks else np.zeros(0, dtype=bool)
        self._host.allocator.free(np.concatenate([slots[~taken], rest]))
        adopted = int(taken.sum())
        self.counts.adopted += adopted
        return adopted

    def _adopt(self, namespace: str, ids: np.ndarray, start: int, slots: np.ndarray) -> np.ndarray:
        """Give the path of ``ids`` copies on the host, from position ``start`` on, where it has none. slots: int32
        [len(ids) - start]. Returns bool [len(slots)]: which are taken."""
        tree, host = self._cache.tree, self._host
        taken = np.zeros(len(slots), dtype=bool)
        last = tree.match(tree.root, namespace, ids.tobytes())
        if last.prefix_len > start:
            tree.cut_path(last, start)
        for node in tree.path(last, min(start, last.prefix_len)):
            if node.host is None and not (node.parent is tree.root or _has_copy(node.parent)):
                return taken  # what comes before it has left the host
            if node.host is None:
                part = slice(node.prefix_len - len(node) - start, node.prefix_len - start)
                node.host, taken[part] = slots[part].copy(), True
                assert node.parent is not None
                node.parent.host_children += 1
                host.took_copy(node)
        above = last.prefix_len
        if above < len(ids) and above >= start and (last is tree.root or _has_copy(last)):
            part = slots[above - start :]
            leaf = tree.add_host_leaf(last, namespace, ids[above:].tobytes(), part.copy(), last.last_access)
            taken[above - start :] = True
            host.took_copy(leaf)
            last = leaf
        self._cache.touch(last)
        return taken


def _has_copy(node: TreeNode | None) -> bool:
    return node is not None and node.host is not None


class BlockNames:
    """Blocks of ``block_tokens`` tokens, a multiple of the page size. fingerprint: see `block_keys.model_digest`."""

    def __init__(self, cache: RadixCache, fingerprint: bytes, block_tokens: int) -> None:
        if block_tokens < 1 or block_tokens % cache.page_size:
            raise ValueError(f"a block of {block_tokens} tokens is no multiple of the page size {cache.page_size}")
        self.block_tokens = block_tokens
        self._cache = cache
        self._fingerprint = fingerprint
        self._roots: OrderedDict[str, bytes] = OrderedDict()

    def of_path(self, path: list[TreeNode]) -> list[bytes]:
        """The names of the whole blocks on a path that begins with a child of the root."""
        if not path:
            return []
        keys = list[bytes]()
        open_ids = b""
        """Ids of the tokens behind the last whole block, int32 bytes."""
        for node in path:
            if node.block_keys is None:
                previous = keys[-1] if keys else self._root(self._cache.tree.namespace_of(node))
                ids = np.frombuffer(open_ids + node.key, dtype=np.int32)
                node.block_keys = block_keys(previous, ids, self.block_tokens)
            keys += node.block_keys
            rest = (node.prefix_len - len(keys) * self.block_tokens) * ID_BYTES
            open_ids = (open_ids + node.key)[len(open_ids) + len(node.key) - rest :]
        return keys

    def of_ids(self, namespace: str, path: list[TreeNode], ids: np.ndarray) -> list[bytes]:
        """The names of the whole blocks of ``ids``, int32 [n], which begin with what is on the path."""
        keys = self.of_path(path)
        previous = keys[-1] if keys else self._root(namespace)
        return keys + block_keys(previous, ids[len(keys) * self.block_tokens :], self.block_tokens)

    def _root(self, namespace: str) -> bytes:
        key = self._roots.get(namespace)
        if key is None:
            key = self._roots[namespace] = root_key(self._fingerprint, namespace)
            if len(self._roots) > MAX_ROOTS:
                self._roots.popitem(last=False)
        return key
