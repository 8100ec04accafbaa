"""What must hold of the host tier between any two operations; with `invariants.check_tree` for the tree itself.

free + quarantined + tokens of the nodes that have a copy == total   (of the host pool, in tokens)
"""

from __future__ import annotations

import numpy as np

from .host_order import HostOrder
from .host_tier import HostTier
from .invariants import InvariantError
from .node import TreeNode
from .tree import RadixTree


def check_host(tier: HostTier, tree: RadixTree) -> None:
    """Raises InvariantError."""
    nodes = [node for node in tree.nodes() if node.host is not None]
    held = sum(map(len, nodes))
    allocator, page = tier.allocator, tier.allocator.page_size
    if held != tier.tokens:
        raise InvariantError(f"{held} tokens have a copy on the host, {tier.tokens} are counted")
    if allocator.free_tokens + allocator.quarantined_tokens + held != allocator.total_tokens:
        raise InvariantError(
            f"host: {allocator.free_tokens} free + {allocator.quarantined_tokens} quarantined + {held} held are not "
            f"{allocator.total_tokens}"
        )
    pages = np.concatenate(
        [allocator.free_pages(), allocator.quarantined_pages(), *(_pages(node, page) for node in nodes)]
    )
    if len(np.unique(pages)) != len(pages):
        raise InvariantError("a page of the host has two owners")
    for node in nodes:
        if HostOrder.is_leaf(node) and not tier.order.has(node):
            raise InvariantError(f"{node} could be evicted from the host, but has no entry")
        for fence in (node.storing, node.loading):
            if fence and fence not in tier.under_way:
                raise InvariantError(f"{node} waits for copy {fence}, which is not under way")


def _pages(node: TreeNode, page: int) -> np.ndarray:
    assert node.host is not None
    return node.host[::page] // page
