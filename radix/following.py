"""Finds the tokens that followed a sequence when it was cached, as a draft of its continuation. It only reads the tree:
it splits no node and counts as no access."""

from __future__ import annotations

import numpy as np

from .node import ID_BYTES, TreeNode
from .tree import RadixTree

MAX_CHILDREN = 32
"""Children that are examined, at most, to find those that begin with part of a page."""

MAX_NODES = 8
"""Nodes that one look-up follows, at most."""


def find_next_tokens(tree: RadixTree, node: TreeNode, namespace: str, ids: np.ndarray, most: int) -> np.ndarray | None:
    """Up to ``most`` tokens, int32, that follow ``ids`` (int32 [n]) below a node in the tree, on any tier; the path
    that was used last, where there are several. None if the tree has no such path."""
    data = ids.tobytes()
    node, offset, partial, _ = tree.find_match(node, namespace, data)
    if partial is not None and not partial.key.startswith(data[offset:]):
        return None
    found: list[bytes] = []
    missing = most * ID_BYTES
    for _ in range(MAX_NODES):
        tail = data[offset:]
        child = partial if partial is not None else _last_used(node, tail)
        if child is None:
            return None if tail else _joined(found)  # tail: only in the first round
        found.append(child.key[len(tail) : len(tail) + missing])
        missing -= len(found[-1])
        if missing <= 0:
            break
        node, partial, offset = child, None, len(data)
    return _joined(found)


def _joined(parts: list[bytes]) -> np.ndarray:
    return np.frombuffer(b"".join(parts), dtype=np.int32)


def _last_used(node: TreeNode, start: bytes) -> TreeNode | None:
    """The most recently used child that begins with ``start``. Never a child of the root, nor a hidden one: their keys
    are not plain bytes, because they belong to several namespaces."""
    best: TreeNode | None = None
    for _, (key, child) in zip(range(MAX_CHILDREN), node.children.items()):
        if isinstance(key, bytes) and child.key.startswith(start) and (best is None or _use(child) > _use(best)):
            best = child
    return best


def _use(node: TreeNode) -> tuple[int, int]:
    return node.last_access, node.serial
