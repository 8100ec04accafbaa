"""Who wants to know what happens to the nodes of a cache: statistics, events for others, orders that learn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from .node import TreeNode


class CacheWatcher(Protocol):
    """Told by `RadixCache` in the middle of a change, so it may only read nodes, and must not raise. When a node is
    split nobody is told: handles stay valid, and the new upper part holds what the node held."""

    def stored(self, node: TreeNode) -> None:
        """KV of a node is on the device that was not: computed, or read from another tier."""
        ...

    def used(self, node: TreeNode, tick: int) -> None:
        """A sequence begins with the path down to here: the root, if nothing was found. ``node.used`` is still the tick
        of the time before, and is ``tick`` afterwards. Look-ups for requests that have to wait do not count."""
        ...

    def removed(self, nodes: Sequence[TreeNode]) -> None:
        """These leave the device, children before parents; ``key``, ``value``, ``prefix_len`` and the path above are
        still there."""
        ...

    def cleared(self) -> None:
        """Everything is gone, on all tiers."""
        ...


class TierWatcher(Protocol):
    """Told what `CacheWatcher` says nothing of: the host's copies, and what no match finds any more. The same rules."""

    def copied(self, node: TreeNode) -> None:
        """A node has a copy on the host that a match may find: made, or read from a tier behind it."""
        ...

    def copy_removed(self, node: TreeNode) -> None:
        """Its copy on the host goes, or what would have become one; ``host`` and the path above are still there."""
        ...

    def hidden(self, nodes: Sequence[TreeNode]) -> None:
        """No match finds these any more, children before parents. They may stay where they are while somebody holds
        them; what is put in below them later is as little to be found. Told before any of them is removed."""
        ...


class Watchers:
    """All who watch a cache; they are told in the order in which they came."""

    def __init__(self) -> None:
        self._of_device: list[CacheWatcher] = []
        self._of_tiers: list[TierWatcher] = []

    def add(self, watcher: CacheWatcher) -> None:
        self._of_device.append(watcher)

    def add_of_tiers(self, watcher: TierWatcher) -> None:
        self._of_tiers.append(watcher)

    def __iter__(self) -> Iterator[CacheWatcher]:
        return iter(self._of_device)

    def stored(self, node: TreeNode) -> None:
        for watcher in self._of_device:
            watcher.stored(node)

    def used(self, node: TreeNode, tick: int) -> None:
        for watcher in self._of_device:
            watcher.used(node, tick)

    def removed(self, nodes: Sequence[TreeNode]) -> None:
        for watcher in self._of_device:
            watcher.removed(nodes)

    def cleared(self) -> None:
        for watcher in self._of_device:
            watcher.cleared()

    def copied(self, node: TreeNode) -> None:
        for watcher in self._of_tiers:
            watcher.copied(node)

    def copy_removed(self, node: TreeNode) -> None:
        for watcher in self._of_tiers:
            watcher.copy_removed(node)

    def hidden(self, nodes: Sequence[TreeNode]) -> None:
        for watcher in self._of_tiers:
            watcher.hidden(nodes)
