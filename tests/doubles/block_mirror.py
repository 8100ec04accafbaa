"""What a follower of KV cache events knows: which blocks are on which tier, by what it was told alone."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable

from baton.radix.block_events import (
    DEVICE,
    HOST,
    AllCleared,
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


def slow_hash(namespace: str, ids: bytes, block_tokens: int) -> int:
    """Hash of the last block of ``ids``, computed from the first block on."""
    previous, size = root_hash(namespace), 4 * block_tokens
    for start in range(0, len(ids), size):
        data = previous.to_bytes(8, "little") + ids[start : start + size]
        previous = int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") % 2**63 or 1
    return previous


def blocks_in_tree(cache: RadixCache, block_tokens: int) -> dict[str, set[int]]:
    """By tier, the hashes of the blocks that a match would find there; copies under way on the host are none yet."""
    size, found = 4 * block_tokens, {DEVICE: set[int](), HOST: set[int]()}

    def walk(node: TreeNode, namespace: str, above: bytes) -> None:
        if cache.tree.is_hidden(node):
            return
        ids = above + node.key
        for end in range(size, len(ids) + 1, size):
            if end > len(above):
                name = slow_hash(namespace, ids[:end], block_tokens)
                if node.on_device:
                    found[DEVICE].add(name)
                if node.host is not None and not node.storing:
                    found[HOST].add(name)
        for child in node.children.values():
            walk(child, namespace, ids)

    for key, child in cache.tree.root.children.items():
        assert isinstance(key, tuple)
        walk(child, key[0], b"")
    return found
