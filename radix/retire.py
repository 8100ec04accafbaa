"""Evict KV marked as not reusable first.

A study on traces found that most of what an optimal order gains over LRU is to know which sessions are over. An order
cannot learn that from accesses, so clients say it: with the last step of a job, or in a request (`no_reuse_from`).
"""

from __future__ import annotations

from .cache import RadixCache
from .node import TreeNode


def retire(cache: RadixCache, node: TreeNode, kept: int = 0, *, leased: bool = False) -> int:
    """Have the path to ``node`` evicted before all else: the tokens after its first ``kept``, up to a locked node, or
    to one that ever branched, as other sessions may use it again. A later access to it counts again. Returns the number
    of tokens retired.

    leased: ignore the locks of leases; what they keep is evicted first once they have ended.
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
        tokens += len(node)
        is_leaf = not (node.device_children or node.lock_ref)
        if node.on_device and (is_leaf or node.entry is not None):
            cache.order.push_leaf(node)
        below, node = node, node.parent
    return tokens
