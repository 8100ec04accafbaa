"""Where the KV of a node is, and what becomes of it when the device needs the room.

    insert ──▶ on the device ──┬─ locked: it stays ───────── unlock ──┐
                               └─ unlocked: in the eviction order ◀───┘
                                          │ evict: the least recently used leaf, or the end of it
                                          ▼
                                        victim ──select_dropped──▶ dropped: it leaves the tree, its slots are free

Device residency is prefix-closed: a node is on the device only if its parent is. So only leaves are evicted, and a
leaf is a node without a child on the device (`TreeNode.device_children`).

`RadixCache.evict` has phases: it chooses all victims, asks here what becomes of them, and frees slots last. Other tiers
would come in here and nowhere else: a victim that is not dropped is copied between the second phase and the third.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .node import TreeNode


class Residency(Protocol):
    """Decides what becomes of victims. It changes no node; `RadixCache.evict` does what it says."""

    def select_dropped(self, victims: Sequence[TreeNode]) -> Sequence[TreeNode]:
        """Those whose KV is given up, in the same order.

        victims: unlocked nodes that have just left the device, children before parents; at least one. They are still
        in the tree and their slots hold their KV.
        """
        ...


class DeviceOnly:
    """The residency of a single tier: what leaves the device is gone."""

    def select_dropped(self, victims: Sequence[TreeNode]) -> Sequence[TreeNode]:
        return victims
