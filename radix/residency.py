"""The tiers on which the KV of a node is, and its fate when the device needs the room.

    insert ──▶ on the device ──┬─ locked: it stays ───────── unlock ──┐
                               └─ unlocked: in the eviction order ◀───┘
                                          │ evict: the least recently used leaf, or the end of it
                                          ├──▶ must be copied first: it is locked till that is done
                                          ▼
                                        victim ──select_dropped──▶ dropped: it leaves the tree, its slots are free
                                          │
                                          └──▶ kept: it has a copy on the host, and stays in the tree for that

Residency is prefix-closed on each tier: a node is on the device, or has a copy on the host, only if its parent has
too. So each tier evicts leaves only: on the device a node without a child there (`TreeNode.device_children`), on the
host one without a child with a copy (`TreeNode.host_children`). A node is in the tree as long as it is on some tier.

`RadixCache` reports changes of nodes to a residency, which decides what becomes of victims; a residency changes the
copies of a node on other tiers, never its KV on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from .node import TreeNode


class Residency(Protocol):
    def node_inserted(self, node: TreeNode) -> None:
        """A new node is on the device, with computed KV."""
        ...

    def node_accessed(self, node: TreeNode) -> None:
        """A match ended here."""
        ...

    def state_put(self, node: TreeNode) -> None:
        """A node on the device carries a recurrent state there."""
        ...

    def path_demoted(self, node: TreeNode) -> None:
        """A request may continue from this node, and no lease keeps the path down to it on the device any more."""
        ...

    def promised_tokens(self, node: TreeNode) -> int:
        """Tokens of the path down to this node that have a copy on the host, or will before they leave the device."""
        ...

    def keeps(self, node: TreeNode) -> bool:
        """Must this unlocked leaf be copied before it may leave the device?"""
        ...

    def copy_leaving(self, nodes: Sequence[TreeNode]) -> Sequence[TreeNode]:
        """Begin to copy nodes that must be copied first, and lock them until that is done: then they can leave. Returns
        those for which there is no room; they may leave now."""
        ...

    @property
    def leaving_tokens(self) -> int:
        """Tokens on the device that can leave once copies under way have ended."""
        ...

    def select_dropped(self, victims: Sequence[TreeNode]) -> Sequence[TreeNode]:
        """The victims that leave the tree, in the same order; the others are kept.

        victims: unlocked nodes that have just left the device, children before parents; at least one. They are still
        in the tree and their slots hold their KV.
        """
        ...

    def drop_copies(self, nodes: Sequence[TreeNode]) -> None:
        """Drop the copies of these nodes on other tiers: they cannot be trusted, or all is reset. ``nodes`` includes
        all nodes below them."""
        ...

    def holders(self) -> Sequence[TreeNode]:
        """The nodes that copies under way lock, each as often as they do."""
        ...

    def named_states(self) -> Sequence[int]:
        """Slots of recurrent states on the device that copies under way name, each as often as they do."""
        ...

    def detach_copies(self) -> Sequence[tuple[int, np.ndarray]]:
        """The tree is dropped with all its nodes; copies under way finish, but their results are discarded. Returns the
        fence and the device slots, int32 [n], of each."""
        ...


class DeviceOnly:
    """The residency of a single tier: what leaves the device is gone."""

    def node_inserted(self, node: TreeNode) -> None:
        pass

    def node_accessed(self, node: TreeNode) -> None:
        pass

    def state_put(self, node: TreeNode) -> None:
        pass

    def path_demoted(self, node: TreeNode) -> None:
        pass

    def promised_tokens(self, node: TreeNode) -> int:
        return 0

    def keeps(self, node: TreeNode) -> bool:
        return False

    def copy_leaving(self, nodes: Sequence[TreeNode]) -> Sequence[TreeNode]:
        return nodes

    @property
    def leaving_tokens(self) -> int:
        return 0

    def select_dropped(self, victims: Sequence[TreeNode]) -> Sequence[TreeNode]:
        return victims

    def drop_copies(self, nodes: Sequence[TreeNode]) -> None:
        pass

    def holders(self) -> Sequence[TreeNode]:
        return ()

    def named_states(self) -> Sequence[int]:
        return ()

    def detach_copies(self) -> Sequence[tuple[int, np.ndarray]]:
        return ()
