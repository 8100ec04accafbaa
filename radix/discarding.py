"""Gives cached KV up before its turn: KV marked as not reusable is evicted first, KV that cannot be trusted is dropped.

A study on traces found that most of what an optimal order gains over LRU is to know which sessions are over. An order
cannot learn that from accesses, so clients say it: with the last step of a job, or in a request (`no_reuse_from`).
"""

from __future__ import annotations

from .cache import RadixCache
from .kv_sequence import SequenceEnd
from .node import TreeNode


def retire(
    cache: RadixCache,
    node: TreeNode,
    kept: int = 0,
    *,
    leased: bool = False,
    how: SequenceEnd = SequenceEnd.RELEASED,
) -> int:
    """Have the path to ``node`` evicted before all else: the tokens after its first ``kept``, up to a locked node, or
    to one that ever branched, as other sessions may use it again. A later access to it counts again. Returns the number
    of tokens retired.

    leased: ignore the locks of leases; what they keep is evicted first once they have ended. how: the reason, for the
    history of the cache.
    """
    tokens, below, page = 0, None, cache.page_size
    while node.parent is not None and node.prefix_len > kept:
        if node.branched or any(child is not below for child in node.children.values()):
            break
        if node.lock_ref > (node.lease_ref if leased else 0):
            break
        if (before := kept - node.parent.prefix_len) > 0:
            count = -(-before // page) * page
            if count >= len(node):
                break
            cache.tree.split(node, count)  # the object stays the lower part
        node.last_access = 0
        cache.mark_retired(node, how)
        tokens += len(node)
        is_leaf = not (node.device_children or node.lock_ref)
        if node.on_device and (is_leaf or node.entry is not None):
            cache.order.push_leaf(node)
        below, node = node, node.parent
    return tokens


def drop_path(cache: RadixCache, node: TreeNode, kept: int = 0) -> int:
    """Drop all KV after the first ``kept`` tokens (whole pages) of the path to ``node``, and every node below it,
    because it cannot be trusted: no match finds it, no other tier takes it. Unlocked nodes are freed at once, the
    others when they are evicted. Returns the tokens freed: none for a node that has left the tree."""
    if node.parent is None or node.prefix_len <= kept:
        return 0
    above, top = cache.tree.hide(node, kept)
    nodes = list(cache.tree.nodes(top))[::-1]
    for hidden in nodes:  # children before parents
        if hidden.parent is not None and hidden.last_end > hidden.parent.last_end:
            hidden.parent.last_end = hidden.last_end
        cache.remove_state(hidden)
    cache.watchers.nodes_hidden(nodes)
    cache.residency.drop_copies(nodes)
    unlocked = [found for found in nodes if not found.lock_ref]
    freed = cache.free_nodes(unlocked)
    cache.tree.remove_leaves(unlocked)
    cache.order.forget_removed()
    if above.on_device:
        cache.order.lost_child(above)
    return freed
