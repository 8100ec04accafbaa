"""What a follower of KV cache events knows: which blocks are on which tier, by what it was told alone."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable

import numpy as np

from baton.radix.block_events import (
    DEVICE,
    HOST,
    AllCleared,
    BlockAnnouncer,
    BlockEvent,
    BlocksRemoved,
    BlocksStored,
    root_hash,
)
from baton.radix.cache import RadixCache
from baton.radix.node import TreeNode

Place = tuple[str, str, bytes]
"""Tier, namespace, ids from the start of the sequence to the end of the block."""


class BlockMirror:
    """Refuses what no server may say: blocks twice, blocks without what comes before them, removals of the unknown."""

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.parents: dict[int, int | None] = {}
        self.ids: dict[int, bytes] = {}
        self.children: Counter[int | None] = Counter()
        self.on: dict[str, set[int]] = {}
        self.cleared = 0

    def apply(self, events: Iterable[BlockEvent]) -> None:
        for event in events:
            match event:
                case BlocksStored():
                    self.stored(event)
                case BlocksRemoved():
                    self.removed(event)
                case AllCleared():
                    self.parents, self.ids, self.on, self.children = {}, {}, {}, Counter()
                    self.cleared += 1

    def stored(self, event: BlocksStored) -> None:
        size = 4 * self.block_tokens
        assert len(event.ids) == size * len(event.hashes) > 0
        assert bool(event.scope) <= (event.parent is None)
        parent = event.parent
        for number, name in enumerate(event.hashes):
            assert 0 < name < 1 << 63
            ids = event.ids[number * size : (number + 1) * size]
            assert parent is None or any(parent in held for held in self.on.values()), "the block before is nowhere"
            assert name not in self.on.setdefault(event.tier, set()), "it was there"
            self.children[parent] += name not in self.parents
            assert self.parents.setdefault(name, parent) == parent and self.ids.setdefault(name, ids) == ids
            self.on[event.tier].add(name)
            parent = name

    def removed(self, event: BlocksRemoved) -> None:
        assert event.hashes
        for name in event.hashes:
            self.on[event.tier].remove(name)
            if not any(name in held for held in self.on.values()):
                assert not self.children[name], "what comes after it is left"
                self.children[self.parents[name]] -= 1
                del self.parents[name], self.ids[name]


class TreeFollower:
    """Follows the events of a cache, and compares what it knows with the tree."""

    def __init__(self, cache: RadixCache, block_tokens: int, host_tokens: int = 0) -> None:
        self.cache = cache
        self.announcer = BlockAnnouncer(cache, block_tokens, host_tokens)
        self.mirror = BlockMirror(block_tokens)
        self.of_no_use = 0
        """Comparisons at which the tree had nodes that no prompt can use."""

    def compare(self) -> None:
        self.mirror.apply(self.announcer.take_events())
        expected = blocks_in_tree(self.cache, self.mirror.block_tokens)
        assert {tier: self.mirror.on.get(tier, set()) for tier in expected} == expected
        self.of_no_use += any(not node.has_ends for node in self.cache.tree.nodes())


def slow_hash(namespace: str, ids: bytes, block_tokens: int) -> int:
    """Hash of the last block of ``ids``, computed from the first block on."""
    previous, size = root_hash(namespace), 4 * block_tokens
    for start in range(0, len(ids), size):
        data = previous.to_bytes(8, "little") + ids[start : start + size]
        previous = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") % 2**63 or 1
    return previous


def blocks_in_tree(cache: RadixCache, block_tokens: int) -> dict[str, set[int]]:
    """By tier, the hashes of the blocks there that a prompt can use; copies under way on the host are none yet."""
    size, found = 4 * block_tokens, {DEVICE: set[int](), HOST: set[int]()}

    def walk(node: TreeNode, namespace: str, above: bytes, slots: list[int]) -> bool:
        """True if a prompt can use what lies in this node."""
        if cache.tree.is_hidden(node):
            return False
        ids, slots = above + node.key, slots + node.value.tolist()
        below = [walk(child, namespace, ids, slots) for child in node.children.values()]
        last = node.prefix_len if any(below) else _last_end(cache, node, slots)
        for end in range(size, 4 * last + 1, size):
            if end > len(above):
                name = slow_hash(namespace, ids[:end], block_tokens)
                if node.on_device:
                    found[DEVICE].add(name)
                if node.host is not None and not node.storing:
                    found[HOST].add(name)
        return last > 0

    for key, child in cache.tree.root.children.items():
        assert isinstance(key, tuple)
        walk(child, key[0], b"", [])
    return found


def _last_end(cache: RadixCache, node: TreeNode, slots: list[int]) -> int:
    """The last place in a node where a sequence can begin; 0 for none. slots: on the device, from the path's start."""
    if cache.states is not None:
        return node.prefix_len if node.state or node.host_state else 0
    if cache.windows is None:
        return node.prefix_len
    pages = cache.windows.pages
    there = pages.slots_of(np.array(slots, dtype=np.int32)) >= pages.page_size
    ends = range(node.prefix_len, node.prefix_len - len(node), -pages.page_size)
    return next((end for end in ends if there[max(0, end - pages.window + 1) : end].all()), 0)
