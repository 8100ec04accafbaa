"""What nobody will come back for goes first."""

from __future__ import annotations

from .cache import RadixCache
from .node import NO_ENTRY, TreeNode


def retire(cache: RadixCache, node: TreeNode, kept: int = 0) -> int:
    """Have the path to ``node`` evicted before all else: what follows its first ``kept`` tokens, up to where it
    branches, or where somebody holds it. A later access to it counts again. Returns the tokens this concerns."""
    tokens, below = 0, None
    while node.parent is not None and not node.lock_ref and node.prefix_len - len(node) >= kept:
        if any(child is not below for child in node.children.values()):
            break
        node.last_access = 0
        tokens += len(node)
        if node.on_device and (not node.device_children or node.entry_time != NO_ENTRY):
            cache.order.add(node)
        below, node = node, node.parent
    return tokens
