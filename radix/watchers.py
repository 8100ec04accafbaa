"""Protocols for watchers of a cache's nodes: statistics, published events, orders that learn."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from .node import TreeNode


class CacheWatcher(Protocol):
    """Called by `RadixCache` in the middle of a change, so it may only read nodes, and must not raise. A split is not
    reported: handles stay valid, and the new upper part holds what the node held."""

    def node_stored(self, node: TreeNode) -> None:
        """KV of a node is on the device that was not: computed, or read from another tier."""
        ...

    def path_used(self, node: TreeNode, tick: int) -> None:
        """A sequence begins with the path down to here: the root, if nothing was found. ``node.used`` is still the tick
        of the time before, and is ``tick`` afterwards. Look-ups for requests that have to wait do not count."""
        ...

    def nodes_removed(self, nodes: Sequence[TreeNode]) -> None:
        """These leave the device, children before parents; ``key``, ``value``, ``prefix_len`` and the path above are
        still there."""
        ...

    def cache_cleared(self) -> None:
        """Everything is gone, on all tiers."""
        ...


class TierWatcher(Protocol):
    """Receives the events that `CacheWatcher` does not cover: copies on the host, and hidden nodes. The same rules
    hold."""

    def copy_made(self, node: TreeNode) -> None:
        """A node has a copy on the host that a match may find: made, or read from a tier behind it."""
        ...

    def copy_removed(self, node: TreeNode) -> None:
        """Its copy on the host goes, or what would have become one; ``host`` and the path above are still there."""
        ...

    def nodes_hidden(self, nodes: Sequence[TreeNode]) -> None:
        """No match finds these nodes any more, children before parents. They may stay in the tree while they are
        locked; nodes inserted below them later are hidden too. Called before any of them is removed."""
        ...


class SequenceWatcher(Protocol):
    """Receives what the nodes do not show of sequences. The same rules hold."""

    def tail_computed(self, node: TreeNode, namespace: str, ids: bytes, client: str) -> None:
        """A sequence of this client has computed KV of ``ids`` (int32) after the path down to ``node``, which stays its
        own because it does not fill a page. It may be reported more than once."""
        ...


class Watchers:
    """All watchers of a cache, called in the order in which they were added."""

    def __init__(self) -> None:
        self._of_device: list[CacheWatcher] = []
        self._of_tiers: list[TierWatcher] = []
        self._of_sequences: list[SequenceWatcher] = []

    def add_watcher(self, watcher: CacheWatcher) -> None:
        self._of_device.append(watcher)

    def add_tier_watcher(self, watcher: TierWatcher) -> None:
        self._of_tiers.append(watcher)

    def add_sequence_watcher(self, watcher: SequenceWatcher) -> None:
        self._of_sequences.append(watcher)

    def __iter__(self) -> Iterator[CacheWatcher]:
        return iter(self._of_device)

    def node_stored(self, node: TreeNode) -> None:
        for watcher in self._of_device:
            watcher.node_stored(node)

    def path_used(self, node: TreeNode, tick: int) -> None:
        for watcher in self._of_device:
            watcher.path_used(node, tick)

    def nodes_removed(self, nodes: Sequence[TreeNode]) -> None:
        for watcher in self._of_device:
            watcher.nodes_removed(nodes)

    def cache_cleared(self) -> None:
        for watcher in self._of_device:
            watcher.cache_cleared()

    def copy_made(self, node: TreeNode) -> None:
        for watcher in self._of_tiers:
            watcher.copy_made(node)

    def copy_removed(self, node: TreeNode) -> None:
        for watcher in self._of_tiers:
            watcher.copy_removed(node)

    def nodes_hidden(self, nodes: Sequence[TreeNode]) -> None:
        for watcher in self._of_tiers:
            watcher.nodes_hidden(nodes)

    def tail_computed(self, node: TreeNode, namespace: str, ids: bytes, client: str) -> None:
        for watcher in self._of_sequences:
            watcher.tail_computed(node, namespace, ids, client)
