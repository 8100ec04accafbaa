"""Where the KV of a node is, and what becomes of it when the device needs the room.

    insert ──▶ on the device ──┬─ locked: stays ────────────── unlock ──┐
                   ▲           └─ unlocked: in the eviction order ◀─────┘
                   │                      │ evict: the least recently used leaf
                   │                      ▼
                   │                    victim ──Residency.fates──▶ drop: the node leaves the tree, its slots are free
                   └── computed again, if anybody asks

Device residency is prefix-closed: a node is on the device only if its parent is. So only leaves are evicted, and a
leaf is a node without a child on the device (`TreeNode.device_children`).

`RadixCache.evict` works in phases: all victims are chosen, their fates are asked for, and only then slots are freed.
Other tiers come in here and nowhere else: as further fates, whose copies are made between the second phase and the
third.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from .node import TreeNode

Fate = Literal["drop"]
"""What becomes of a victim. "drop": its KV is given up; it leaves the tree and its slots are free."""


class Residency(Protocol):
    """Decides about victims. It changes no node; `RadixCache.evict` does what it says."""

    def fates(self, victims: Sequence[TreeNode]) -> list[Fate]:
        """One for each victim. They are unlocked and come children before parents; none of them has a child that
        stays on the device."""
        ...


class DeviceOnly:
    """The residency of a single tier: what leaves the device is gone."""

    def fates(self, victims: Sequence[TreeNode]) -> list[Fate]:
        return ["drop"] * len(victims)
