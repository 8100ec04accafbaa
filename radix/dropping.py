"""Drops KV that cannot be trusted."""

from __future__ import annotations

from .cache import RadixCache
from .node import TreeNode


def drop_path(cache: RadixCache, node: TreeNode, kept: int = 0) -> int:
    """Drop all KV after the first ``kept`` tokens (whole pages) of the path to ``node``, and every node below it,
    because it cannot be trusted: no match finds it, no other tier takes it. Unlocked nodes are freed at once, the
    others when they are evicted. Returns the tokens freed: none for a node that has left the tree."""
    if node.parent is None or node.prefix_len <= kept:
        return 0
    above, top = cache.tree.hide(node, kept)
    nodes = list(cache.tree.nodes(top))[::-1]
    cache.watchers.hidden(nodes)
    cache.residency.forget(nodes)
    unlocked = [found for found in nodes if not found.lock_ref]
    freed = cache.free_nodes(unlocked)
    cache.tree.remove_leaves(unlocked)
    cache.order.forget_removed()
    if above.on_device:
        cache.order.lost_child(above)
    return freed
