"""By what leaves are compared when one has to go: the orders of eviction that need no more than a number per node.

The names and meanings are SGLang's (`--radix-eviction-policy`).
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter

from ..node import TreeNode

Rank = Callable[[TreeNode], int]
"""The leaf with the lowest rank goes first. At least 0, and 0 for a node marked as not reusable (discarding.py).
A rank never falls by an access."""

TIME_BITS = 64
"""Bits of the last access in a rank that compares it only among equals."""

PRIORITY_OFFSET = 1 << 63
"""Makes ranks of negative priorities positive; a priority has 64 bits at most."""

PROTECTED_USES = 1
"""Uses from which a node is in the protected segment; SGLang counts the insertion too, so its value is 2."""

lru: Rank = attrgetter("last_access")
"""Least recently used first."""


def lfu(node: TreeNode) -> int:
    """Least frequently used first."""
    return _ranked(node, node.uses)


def slru(node: TreeNode) -> int:
    """Segmented LRU: what was never used again goes before what was."""
    return _ranked(node, node.uses >= PROTECTED_USES)


def fifo(node: TreeNode) -> int:
    """Evict in the order of insertion."""
    return node.last_access and node.born + 1


def priority(node: TreeNode) -> int:
    """Evict first what only requests of low priority computed or used."""
    return _ranked(node, max(0, node.priority + PRIORITY_OFFSET))


def _ranked(node: TreeNode, rank: int) -> int:
    return node.last_access and (rank << TIME_BITS) + node.last_access


RANKS: dict[str, Rank] = {"lru": lru, "lfu": lfu, "slru": slru, "fifo": fifo, "priority": priority}
