"""A tier behind the host: blocks of KV by name, written from copies on the host and read back to the host. A disk is
one, a server in the network another.

    copy on the host ──▶ wanted ──take_orders──▶ being written ──finish_order──▶ there, if the index says so

    find_blocks ──▶ begin_read ──▶ being read ──finish_order──▶ adopted: a copy on the host, which a match may load

    matched, or written ──▶ used ──take_orders──▶ the store marks it as used, and evicts the others first

A block is the KV of a fixed number of consecutive tokens. Its name stands for all tokens up to its end, so it does not
depend on nodes. The index says which blocks are there; if it is incomplete, `begin_find` asks the store. This class
decides and counts; threads carry out its orders, and `finish_order` takes their results. Blocks that could not be
written or read are computed again when needed; no request fails for it.

For models with recurrent states the KV of a prefix is of use only where a state lies behind it, and a state is of
exactly so many tokens, which seldom fill whole blocks. So a node's state is stored with the KV of the tokens between
the last whole block and its end: a *snapshot*, named by these tokens and the block before. It has all that the blocks
lack.

    block | block | block | tail            one read brings the blocks that are missing, and then the snapshot;
    ────── keys ──────────│ snapshot        if one of them does not come, nothing is adopted

While an order is under way its slots on the host keep their contents: if they are freed meanwhile, they wait for its
fence.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from ...memory_pool.stores.block_keys import SnapshotPlaces, block_keys, root_key, tail_keys
from ...memory_pool.stores.block_store import StoreSize
from ..cache import RadixCache
from ..node import ID_BYTES, StateKind, TreeNode
from .block_orders import BlockFind, BlockOrder, BlockRead, BlockTouch, BlockWrite
from .host_tier import MAX_WANTED, HostTier

MAX_ASKED = 1024
"""Most blocks in one question to a store, or in one touch."""

TOUCH_S = 10.0
"""How often, at most, a store is told which blocks are in use, unless many are."""

MAX_ROOTS = 4096
"""Namespaces for which root keys are kept."""


class BlockIndex(Protocol):
    """Which blocks are there, or which snapshots, and how full it is. May be out of date when the answer is used."""

    def contains(self, key: bytes) -> bool: ...

    def size(self) -> StoreSize | None: ...


@dataclass(slots=True, frozen=True)
class Reading:
    """A read that is under way, and what it is for."""

    order: BlockRead
    namespace: str
    ids: np.ndarray
    """int32: the tokens from the start of the sequence to the end of what is read."""
    gain: int
    """Tokens that are on no other tier; where the model has states, that need not be computed."""
    wanted: bool = True
    """False once the tree has been dropped: the blocks are discarded when they come."""


@dataclass(slots=True, frozen=True)
class Found:
    """Blocks of a sequence that can be read from the store: those from number ``first`` on; and where the model has
    states, the snapshot behind them."""

    namespace: str
    ids: np.ndarray
    """int32: the tokens from the start of the sequence to the end of the last block, or of the snapshot."""
    first: int
    keys: tuple[bytes, ...]
    gain: int
    """As in `Reading`."""
    under_way: int = 0
    """Fence of a read that brings the first of them already; 0 if none does."""
    snapshot: bytes = b""
    """Key of the snapshot; empty for none."""


@dataclass(slots=True)
class BlockCounts:
    """Tokens, and states, since start."""

    written: int = 0
    failed_writes: int = 0
    """Not accepted, or not written."""
    read: int = 0
    missed: int = 0
    """Asked for and not there, damaged or late."""
    adopted: int = 0
    """Read, and on the host since; the others were there by then, or had lost what comes before them."""
    stored_states: int = 0
    failed_states: int = 0
    """Not accepted, or not written."""
    loaded_states: int = 0
    """Read with all blocks before them."""


class BlockTier:
    """Decides what is written and read.

    host: the tier in front. name: the store's, in orders. asks: the index is incomplete, so the store must be asked.
    max_writing: most blocks that are being written at a time. snapshots: the index of those; None for models without
    recurrent states.
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
        snapshots: BlockIndex | None = None,
    ) -> None:
        if (snapshots is None) != (host.states_on_host is None):
            raise ValueError("a store has snapshots if, and only if, the host keeps recurrent states")
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
        self._snapshots = snapshots
        self._wanted_states: deque[TreeNode] = deque(maxlen=MAX_WANTED)
        """Nodes whose state may have to be written, and those above them: several may continue there by now."""
        self._named: dict[int, int] = {}
        """Fence of an order -> the slot of a state on the host that it names."""
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
        """Block, or snapshot -> fence of the read that brings it."""
        self.finds: set[int] = set()
        """Fences."""
        self._new_orders: list[BlockOrder] = []
        host.below.append(self)

    def size(self) -> StoreSize | None:
        """The size of the store; None where it does not know it."""
        return self._index.size()

    def states_size(self) -> StoreSize | None:
        """The size of the store of snapshots; None where it does not know it, or there is none."""
        return self._snapshots.size() if self._snapshots is not None else None

    # -- as the tier below the host -----------------------------------------------------------------------------------

    def copy_stored(self, node: TreeNode) -> None:
        self._wanted.append((node, 0))
        if node.host_state:
            self._wanted_states.append(node)

    def state_kept(self, node: TreeNode) -> None:
        self._wanted_states.append(node)

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
        self.readings = {fence: replace(reading, wanted=False) for fence, reading in self.readings.items()}
        self._named.clear()
        self._wanted.clear()
        self._wanted_states.clear()
        self._used.clear()
        self._reading_keys.clear()
        return going_on

    @property
    def incoming_slots(self) -> list[np.ndarray]:
        return [reading.order.host_slots for reading in self.readings.values() if reading.wanted]

    @property
    def named_states(self) -> list[int]:
        return list(self._named.values())

    # -- orders -------------------------------------------------------------------------------------------------------

    def take_orders(self, now: float) -> list[BlockOrder]:
        """The orders to carry out now, in this order."""
        orders, self._new_orders = self._new_orders, []
        return [*orders, *self._next_writes(), *self._next_snapshots(), *self._next_touches(now)]

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

    def _next_snapshots(self) -> list[BlockWrite]:
        """The states to be written now, of those that are to be kept: later than the blocks before them. They keep
        their slots on the host meanwhile, so only a part of all are under way at a time."""
        writes: list[BlockWrite] = []
        later: list[TreeNode] = []
        states = self._host.states_on_host
        most = max(1, states.slots.total // 4) if states is not None else 0
        while self._wanted_states and len(self._named) < most and len(self.writing) < self._max_writing:
            node = self._wanted_states.popleft()
            if self._cache.tree.reachable(node) is not node:
                continue
            path = self._cache.tree.path(node, 0)
            if any(above.storing for above in path):
                later.append(node)
                continue
            for number, above in enumerate(path, 1):
                if above.state_kind <= StateKind.PASSING or not self._host.has_whole_state(above):
                    continue  # where its copy is being made, `copy_stored` will name it once more
                if self._has_snapshot(key := self._names.of_snapshot(path[:number])):
                    continue
                if len(self._named) >= most:
                    later.append(node)
                    break
                writes.append(self._write_snapshot(key, above, path[:number]))
        self._wanted_states.extendleft(reversed(later))
        return writes

    def _write_snapshot(self, key: bytes, node: TreeNode, path: list[TreeNode]) -> BlockWrite:
        states, tail = self._host.states_on_host, node.prefix_len % self.block_tokens
        assert states is not None
        slots = np.concatenate([above.host for above in path if above.host is not None])[node.prefix_len - tail :]
        states.slots.share(node.host_state)
        write = self._begin_write(key, slots, node.host_state)
        self._named[write.fence] = write.host_state
        return write

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
            path = tree.path(node, 0)
            keys = [key for key in self._names.of_path(path) if key not in told and self._has(key)]
            told.update(keys)
            if node.has_state and self._has_snapshot(key := self._names.of_snapshot(path)):
                touches.append(BlockTouch(self.name, (), (key,)))
            starts = range(0, len(keys), MAX_ASKED)
            touches += [BlockTouch(self.name, tuple(keys[start : start + MAX_ASKED])) for start in starts]
        return touches[::-1]

    def _has(self, key: bytes) -> bool:
        """Is the block there, or on its way?"""
        return key in self._writing_keys or self._index.contains(key)

    def _has_snapshot(self, key: bytes) -> bool:
        """Likewise, for a snapshot."""
        return self._snapshots is not None and (key in self._writing_keys or self._snapshots.contains(key))

    def _write(self, key: bytes, slots: np.ndarray, number: int) -> BlockWrite:
        size = self.block_tokens
        return self._begin_write(key, slots[number * size : (number + 1) * size])

    def _begin_write(self, key: bytes, slots: np.ndarray, state: int = 0) -> BlockWrite:
        fence = self._host.allocator.fences.open_fence()
        write = BlockWrite(self.name, fence, key, slots.copy(), state)
        self.writing[fence] = write
        self._readers[write.host_slots] += 1
        self._writing_keys.add(key)
        return write

    # -- look up, read ------------------------------------------------------------------------------------------------

    def find_blocks(self, namespace: str, ids: np.ndarray) -> Found | None:
        """The blocks of ``ids``, int32 [n], that the store has beyond the cached prefix, by the index; changes nothing.
        None if there are none, or where the model has states, no snapshot lies behind them."""
        size = self.block_tokens
        missing = self._missing(namespace, ids)
        if missing is None:
            return None
        if self._snapshots is not None:
            return self._find_snapshot(namespace, missing)
        first, covered = missing.first, missing.covered
        keys, count = missing.keys[first:], self._count_there(missing)
        gain = (first + count) * size - covered
        if gain <= 0:
            return None
        under_way = self._reading_keys.get(keys[max(0, covered // size - first)], 0)
        end = first + count
        return Found(namespace, ids[: end * size].copy(), first, tuple(keys[:count]), gain, under_way)

    def _find_snapshot(self, namespace: str, missing: _Missing) -> Found | None:
        assert self._snapshots is not None and missing.places is not None
        for length, snapshot in missing.places.within(missing.first + self._count_there(missing)):
            if self._snapshots.contains(snapshot):
                end = length // self.block_tokens
                first = min(missing.first, end)
                keys = tuple(missing.keys[first:end])
                under_way = self._reading_keys.get(keys[0] if keys else snapshot, 0)
                gain = length - missing.covered
                return Found(namespace, missing.places.ids[:length].copy(), first, keys, gain, under_way, snapshot)
        return None

    def _count_there(self, missing: _Missing) -> int:
        """How many consecutive blocks the store has from the first missing one on, by the index."""
        absent = (number for number, key in enumerate(missing.keys[missing.first :]) if not self._index.contains(key))
        return next(absent, len(missing.keys) - missing.first)

    def _missing(self, namespace: str, ids: np.ndarray) -> _Missing | None:
        """None if not even one block would be gained; where the model has states, not even one page."""
        size, tree = self.block_tokens, self._cache.tree
        whole, cached, last = self._cache.find_prefix(namespace, ids)
        covered = cached if self._cache.states is None else self._cache.states.deepest(whole).prefix_len
        least = size if self._snapshots is None else self._cache.page_size
        if len(ids) // least * least <= covered:
            return None
        absent = (node.prefix_len - len(node) for node in tree.path(last, 0) if node.host is None or node.storing)
        stored = next(absent, cached)
        keys = self._names.of_ids(namespace, tree.path(whole, 0), ids)
        places = self._names.snapshot_places(namespace, keys, ids, covered) if self._snapshots is not None else None
        return _Missing(stored // size, covered, keys, places)

    def begin_find(self, namespace: str, ids: np.ndarray, timeout: float) -> int | None:
        """Order the store to say which blocks of ``ids`` it has, and which snapshots; returns the fence. None if there
        is nothing to ask, or the index knows all blocks."""
        missing = self._missing(namespace, ids) if self.asks else None
        if missing is None:
            return None
        fence, first = self._host.allocator.fences.open_fence(), missing.first
        self.finds.add(fence)
        keys, places = tuple(missing.keys[first : first + MAX_ASKED]), missing.places
        if places is not None:  # for the store's thread: these ids are in the request's own memory
            places = replace(places, ids=places.ids.copy())
        self._new_orders.append(BlockFind(self.name, fence, keys, timeout, first, places))
        return fence

    def begin_read(self, found: Found, timeout: float) -> int | None:
        """Order a read of as many leading blocks as the host can hold, or of all with the snapshot behind them; its
        fence. None if it has no room, or others fill it just now."""
        size, host, count = self.block_tokens, self._host, len(found.keys)
        needed = len(found.ids) - found.first * size
        coming = sum(len(slots) for tier in host.below for slots in tier.incoming_slots)
        if coming and coming + needed > host.allocator.total_tokens // 4:
            return None  # what comes for one must not push out what has come for another
        whole, _, last = self._cache.find_prefix(found.namespace, found.ids)
        for node in (whole, last):
            self._cache.touch(node)  # the blocks need their prefix when they arrive, and now:
        while last.host is None and last.parent is not None:
            last = last.parent
        room, state = host.make_room(needed, kept=last), 0
        left_out = count - room // size if not found.snapshot else 0
        if found.gain <= left_out * size:
            return None
        if found.snapshot and (room < needed or not (state := host.take_state())):
            return None
        keys, slots = found.keys[: count - left_out], host.allocate(needed - left_out * size)
        assert slots is not None, "room has been made"
        fence = host.allocator.fences.open_fence()
        order = BlockRead(self.name, fence, keys, slots, timeout, found.snapshot, state)
        ids = found.ids[: len(found.ids) - left_out * size]
        self.readings[fence] = Reading(order, found.namespace, ids, found.gain - left_out * size)
        self._reading_keys |= dict.fromkeys((*keys, found.snapshot) if state else keys, fence)
        if state:
            self._named[fence] = state
        self._new_orders.append(order)
        return fence

    # -- the end of an order ------------------------------------------------------------------------------------------

    def finish_order(self, fence: int, blocks: int) -> int:
        """An order has been carried out. blocks: how many leading blocks of a read are on the host now, a snapshot
        included; of a write, 1, or 0 if it failed. Returns the tokens that are on the host since."""
        self._host.allocator.fences.close_fence(fence)
        adopted, state = 0, self._named.pop(fence, 0)
        if fence in self.finds:
            self.finds.remove(fence)
        elif (write := self.writing.pop(fence, None)) is not None:
            self._writing_keys.remove(write.key)
            self._readers[write.host_slots] -= 1
            self._count_write(write, bool(blocks))
        else:
            adopted = self._take_in(self.readings.pop(fence), blocks)
        if state:
            assert self._host.states_on_host is not None
            self._host.states_on_host.slots.drop(state)
        self._host.release_quarantine()
        return adopted

    def gained_tokens(self, fence: int, blocks: int) -> int | None:
        """How many tokens a read or write has moved, for its rate; None for an order that says nothing of that, as a
        snapshot's size does not depend on its tokens. Of a read with a snapshot, what need not be computed. Asked
        before `finish_order`; blocks: as there."""
        if (write := self.writing.get(fence)) is not None:
            return None if write.host_state else blocks * self.block_tokens
        if (reading := self.readings.get(fence)) is None:
            return None
        if not reading.order.host_state:
            return blocks * self.block_tokens
        return reading.gain if blocks > len(reading.order.keys) else 0

    def _count_write(self, write: BlockWrite, ok: bool) -> None:
        counts = self.counts
        if write.host_state:
            counts.stored_states, counts.failed_states = counts.stored_states + ok, counts.failed_states + (not ok)
        else:
            counts.written += self.block_tokens if ok else 0
            counts.failed_writes += 0 if ok else self.block_tokens

    def _take_in(self, reading: Reading, blocks: int) -> int:
        order, size, total = reading.order, self.block_tokens, len(reading.order.host_slots)
        is_whole = order.host_state > 0 and blocks > len(order.keys)
        arrived = total if is_whole else min(blocks, len(order.keys)) * size
        self.counts.read += arrived
        self.counts.missed += total - arrived
        self.counts.loaded_states += is_whole
        if not reading.wanted:
            return 0  # the slots have been in quarantine since the tree was given up
        for key in (*order.keys, order.snapshot):
            if self._reading_keys.get(key) == order.fence:
                del self._reading_keys[key]
        usable = 0 if order.host_state and not is_whole else arrived
        start = len(reading.ids) - total
        slots, rest = order.host_slots[:usable], order.host_slots[usable:]
        ids, taken = reading.ids[: start + usable], np.zeros(usable, dtype=bool)
        if usable or is_whole:
            taken = self._adopt(reading.namespace, ids, start, slots)
        if is_whole:
            self._adopt_state(reading.namespace, ids, order.host_state)
        if len(unused := np.concatenate([slots[~taken], rest])):
            self._host.allocator.free(unused)
        adopted = int(taken.sum())
        self.counts.adopted += adopted
        return adopted

    def _adopt_state(self, namespace: str, ids: np.ndarray, slot: int) -> None:
        """Give the node at which the path of ``ids`` ends this state on the host, if it has the KV there and none."""
        node, _, _ = self._cache.find_prefix(namespace, ids)
        if node.prefix_len == len(ids) and node.host is not None and not node.host_state:
            self._host.took_state(node, slot)

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


@dataclass(slots=True, frozen=True)
class _Missing:
    """What a sequence lacks on the host."""

    first: int
    """The first block that is not there."""
    covered: int
    """Tokens that are cached anywhere; where the model has states, up to the last state."""
    keys: list[bytes]
    """Of all whole blocks."""
    places: SnapshotPlaces | None
    """None where the model has no states."""


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

    def of_snapshot(self, path: list[TreeNode]) -> bytes:
        """The name of the snapshot at the end of a path that begins with a child of the root."""
        keys = self.of_path(path)
        previous = keys[-1] if keys else self._root(self._cache.tree.namespace_of(path[0]))
        tail = path[-1].prefix_len % self.block_tokens
        if not tail:
            return tail_keys(previous, np.zeros(0, dtype=np.int32), 1)[0]
        ids, node = b"", len(path)
        while len(ids) < tail * ID_BYTES:
            node -= 1
            ids = path[node].key[-tail * ID_BYTES :] + ids
        return tail_keys(previous, np.frombuffer(ids, dtype=np.int32)[-tail:], tail)[-1]

    def snapshot_places(self, namespace: str, keys: list[bytes], ids: np.ndarray, above: int) -> SnapshotPlaces:
        """Where the snapshots of more than ``above`` tokens of ``ids``, int32 [n], may be. keys: of their whole
        blocks."""
        previous = [self._root(namespace), *keys]
        return SnapshotPlaces(previous, ids, self.block_tokens, self._cache.page_size, above)

    def _root(self, namespace: str) -> bytes:
        key = self._roots.get(namespace)
        if key is None:
            key = self._roots[namespace] = root_key(self._fingerprint, namespace)
            if len(self._roots) > MAX_ROOTS:
                self._roots.popitem(last=False)
        return key
