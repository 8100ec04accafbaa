"""Invariants of the host tier between any two operations; `invariants.check_tree` checks the tree itself.

free + quarantined + tokens of the nodes that have a copy + being read from disk == total   (of the host, in tokens)
"""

from __future__ import annotations

import numpy as np

from ..invariants import InvariantError
from ..tree import RadixTree
from .block_tier import BlockTier
from .host_order import HostOrder
from .host_tier import HostTier


def check_host(tier: HostTier, tree: RadixTree) -> None:
    """Raises InvariantError."""
    nodes = [node for node in tree.nodes() if node.host is not None]
    held = sum(map(len, nodes))
    allocator, page = tier.allocator, tier.allocator.page_size
    if held != tier.tokens:
        raise InvariantError(f"{held} tokens have a copy on the host, {tier.tokens} are counted")
    coming = [slots for below in tier.below for slots in below.coming]
    read = sum(map(len, coming))
    if allocator.free_tokens + allocator.quarantined_tokens + held + read != allocator.total_tokens:
        raise InvariantError(
            f"host: {allocator.free_tokens} free + {allocator.quarantined_tokens} quarantined + {held} held + {read} "
            f"being read are not {allocator.total_tokens}"
        )
    copies = [node.host for node in nodes if node.host is not None]
    in_use = np.concatenate([np.empty(0, dtype=np.int32), *copies, *coming])[::page] // page  # whole pages each
    pages = np.concatenate([allocator.free_pages(), allocator.quarantined_pages(), in_use])
    if len(np.unique(pages)) != len(pages):
        raise InvariantError("a page of the host has two owners")
    for node in nodes:
        if HostOrder.is_leaf(node) and not tier.order.has(node):
            raise InvariantError(f"{node} could be evicted from the host, but has no entry")
        if node.storing or node.loading:
            for fence in (node.storing, node.loading):
                if fence and fence not in tier.under_way:
                    raise InvariantError(f"{node} waits for copy {fence}, which is not under way")


def check_blocks(disk: BlockTier, host: HostTier, tree: RadixTree) -> None:
    """Raises InvariantError."""
    for fence in (*disk.writing, *disk.readings, *disk.finds):
        if not host.allocator.fences.is_open(fence):
            raise InvariantError(f"order {fence} is under way, but its fence is closed")
    for node in tree.nodes():
        if node.block_keys is not None:
            first = (node.prefix_len - len(node)) // disk.block_tokens
            if len(node.block_keys) != node.prefix_len // disk.block_tokens - first:
                raise InvariantError(f"{node} has {len(node.block_keys)} block keys")
