"""What nobody will come back for goes first.

A study on traces found that most of what an optimal order gains over LRU is to know which sessions are over; that is
nothing an order can learn from accesses, so it is said: by the last step of a job, or by a request (`no_reuse_from`).
"""

from __future__ import annotations

from .cache import RadixCache
from .node import TreeNode


def retire(cache: RadixCache, node: TreeNode, kept: int = 0, *, leased: bool = False) -> int:
    """Have the path to ``node`` evicted before all else: what follows its first ``kept`` tokens, up to where somebody
    holds it, or where it ever branched, as others may come that way again. A later access to it counts again. Returns
    the tokens this concerns.

    leased: leases hold nothing up; what they keep goes first once they have ended.
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
            cache.order.add(node)
        below, node = node, node.parent
    return tokens
