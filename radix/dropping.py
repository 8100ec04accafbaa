"""Giving up KV that cannot be trusted."""

from __future__ import annotations

from .cache import RadixCache
from .node import TreeNode


def drop_path(cache: RadixCache, node: TreeNode, kept: int = 0) -> int:
    """Give up what follows the first ``kept`` tokens (whole pages) of the path to ``node``, with all that hangs on
    it, because its KV cannot be trusted: no match finds it, no other tier takes it. What nobody locks is free at
    once, the rest when it is evicted. Returns the tokens freed: none for a node that has left the tree."""
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
