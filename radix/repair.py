"""Restores tree and locks after an exception that left an operation half done.

The structure of the tree, and the sequences that are open, are the truth; everything that counts them is counted anew:
locks, leases, children, evictable and protected tokens, the eviction order. So the locks of a lost sequence are
released. A structure that is itself broken raises, and then only `RadixCache.discard_all` helps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from .cache import RadixCache
from .invariants import InvariantError, check_tree
from .kv_sequence import KVSequence
from .node import NO_SLOTS, TreeNode


def is_sound(cache: RadixCache, sequence: KVSequence) -> bool:
    """True if a sequence holds what it says: its row names the slots of the path that it locks."""
    node, row = sequence.node, sequence.row
    if node is None or not 0 <= row < cache.req_to_token.num_rows:
        return False
    if not 0 <= sequence.tree_len <= sequence.length or sequence.tree_len != node.prefix_len:
        return False
    if cache.windows is not None:
        page, start = cache.page_size, sequence.window_start
        held = cache.req_to_token.rows[row, start : sequence.length : page] // page
        if cache.windows.pages.first_needed(sequence.length) < start or not cache.windows.pages.has(held).all():
            return False
    values: list[np.ndarray] = []
    above: TreeNode = node
    while above.parent is not None:
        if not above.on_device or above.parent.children.get(above.child_key) is not above:
            return False
        values.append(above.value)
        above = above.parent
    path = np.concatenate([NO_SLOTS, *reversed(values)])
    return above is cache.tree.root and np.array_equal(path, cache.req_to_token.rows[row, : sequence.tree_len])


def restore_tree(cache: RadixCache, sequences: Iterable[KVSequence]) -> None:
    """Count anew everything that follows from the structure and from ``sequences``, all of them sound and all that are
    open. ``lease_ref`` becomes 0 everywhere. Raises InvariantError if the structure is broken."""
    root = cache.tree.root
    _drop_homeless(cache)
    nodes = list(cache.tree.nodes())
    if len({id(node) for node in nodes}) != len(nodes):
        raise InvariantError("a node has two parents")
    holders = cache.residency.holders()
    direct = Counter([id(sequence.node) for sequence in sequences] + [id(node) for node in holders])
    direct[id(root)] += 1  # its permanent lock
    cache.order.clear()
    cache.protected_tokens = cache.evictable_tokens = 0
    cache.tree.total_nodes = len(nodes)
    for node in (*reversed(nodes), root):
        children = node.children.values()
        node.device_children = sum(child.on_device for child in children)
        node.host_children = sum(child.host is not None for child in children)
        node.lock_ref = direct[id(node)] + sum(child.lock_ref > 0 for child in children)
        node.lease_ref, node.entry = 0, None
        if node.lock_ref:
            cache.protected_tokens += len(node.value)
        else:
            cache.evictable_tokens += len(node.value)
    if cache.states is not None:
        cache.states.restore([root, *nodes])
    if cache.windows is not None:
        cache.windows.restore(nodes)
    for node in nodes:
        if node.on_device and not node.device_children and not node.lock_ref:
            cache.order.push_leaf(node)
    check_tree(cache, sequences, holders)


def _drop_homeless(cache: RadixCache) -> None:
    """Remove the nodes that an eviction has taken off the device and not dropped yet."""
    for node in reversed(list(cache.tree.nodes())):
        if node.on_device:
            continue
        node.state = 0
        if len(node.value):
            cache.watchers.nodes_removed([node])
            node.value = NO_SLOTS
        if node.host is None:
            if node.children:
                raise InvariantError(f"{node} is on no tier, and its children are")
            _unlink(node)


def _unlink(leaf: TreeNode) -> None:
    assert leaf.parent is not None
    del leaf.parent.children[leaf.child_key]
    leaf.parent = None


def slots_of_tree(cache: RadixCache) -> Sequence[np.ndarray]:
    """int32 [n] each: the slots of every node on the device."""
    return [node.value for node in cache.tree.nodes()]
