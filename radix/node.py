"""One node of the radix tree: plain data.

tree.py changes its place and contents, cache.py lock_ref, last_access, last_end, used, uses, turn, priority and client,
lease.py lease_ref, eviction/order.py entry and, when it chooses a victim, on_device and what its parent inherits,
host_tier.py what a node has on the host, history.py past, node_states.py its recurrent state, node_windows.py
window_len, usable_ends.py has_ends.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from .past_node import PastNode

ID_BYTES = 4
"""Bytes of a token id; keys are raw int32 memory."""

NO_SLOTS = np.empty(0, dtype=np.int32)
"""The value of a node that is not on the device."""


class StateKind(IntEnum):
    """What the recurrent state of a node is good for; see node_states.py."""

    RETIRED = -1
    """Nothing: its KV is marked as not reusable, and it has not been used since."""
    PASSING = 0
    """A retracted or aborted request left it, or a turn that newer ones have followed."""
    TURN_END = 1
    """The newest turn of a conversation ends here."""
    BRANCH = 2
    """Several continue from here, or are expected to."""


class TreeNode:
    """An edge of the tree with the tokens on it. Outside radix/ it is an opaque handle.

    A handle means "the path from the root up to and including this node", and keeps that meaning when nodes are split:
    the existing object always stays the lower part.
    """

    __slots__ = (
        "block_keys",
        "born",
        "branched",
        "child_key",
        "children",
        "client",
        "demoted",
        "device_children",
        "entry",
        "has_ends",
        "hits",
        "host",
        "host_children",
        "host_state",
        "key",
        "last_access",
        "last_end",
        "lease_ref",
        "loading",
        "lock_ref",
        "note",
        "on_device",
        "parent",
        "past",
        "prefix_len",
        "priority",
        "retired_end",
        "serial",
        "state",
        "state_kind",
        "state_loading",
        "states_below",
        "storing",
        "turn",
        "used",
        "uses",
        "value",
        "window_len",
    )

    def __init__(
        self, serial: int, parent: TreeNode | None, child_key: object, key: bytes, value: np.ndarray, last_access: int
    ) -> None:
        self.serial = serial
        """Unique and growing; names the node in dumps and breaks ties of last_access."""
        self.parent = parent
        """None for the root, and for a node that was removed from the tree."""
        self.child_key = child_key
        """The key of this node in the parent's ``children``: see RadixTree."""
        self.key = key
        """Token ids of this node as int32 bytes; whole pages."""
        self.value = value
        """int32 [tokens]: slot of each token on the device; empty if it is not there."""
        self.prefix_len: int = len(self) + (parent.prefix_len if parent is not None else 0)
        """Tokens on the path from the root down to and including this node."""
        self.children: dict[object, TreeNode] = {}
        self.branched = False
        """It had two children at some time: several sessions continued from here."""
        self.device_children = 0
        """Children that are on the device; at 0 the node is a leaf there (see residency.py)."""
        self.on_device = True
        """False for a victim of eviction; it stays in the tree if it has a copy on the host."""
        self.host: np.ndarray | None = None
        """int32 [tokens]: slot of each token on the host; None if it has no copy. See host_tier.py for these six."""
        self.host_children = 0
        """Children that have a copy on the host."""
        self.storing = 0
        """Fence of the copy to the host that is under way; 0 if none is."""
        self.loading = 0
        """Fence of the copy to the device that is under way; 0 if none is."""
        self.hits = 0
        """Matches that ended here."""
        self.block_keys: list[bytes] | None = None
        """Names of the blocks that end in this node; None until they are needed (see block_tier.py)."""
        self.demoted = False
        """A lease held the path down to it, or should have: it is copied before it leaves the device."""
        self.lock_ref = 0
        """Direct locks + locked children. Above 0 the node must not be evicted."""
        self.lease_ref = 0
        """Leases that end here + leased children; counts what leases hold, protects nothing (see lease.py)."""
        self.last_access = last_access
        """Tick of the last access that ended here. A child's counts for its parents too (see eviction/order.py)."""
        self.born = self.used = last_access
        """Tick at which its KV was first put into the tree, and at which a sequence began with it last; of its children
        too, once they are gone."""
        self.uses = 0
        """Sequences that began with it, and since they have gone, with its children."""
        self.turn = 0
        """How many requests one after the other led here: 1 for KV that was computed from the start. As long as it
        never branched, also those that led to children that have gone."""
        self.priority = 0
        """The highest of the requests that computed it or began with it, or with children that have gone."""
        self.note: object = None
        """Notes of the learned order of eviction (see eviction/learned.py)."""
        self.client = ""
        """The client of the request that computed it last; "" if it is unknown."""
        self.last_end = 0
        """The last end of a sequence that held it, or children that have gone: order × `NUM_ENDS` + `SequenceEnd`."""
        self.retired_end = 0
        """Likewise, when its reuse was given up last: of this node alone, what is above it may be used on."""
        self.past: PastNode | None = None
        """Its tokens in the history, where the path down to it is part of one; None if it does not count there."""
        self.entry: tuple[int, int, TreeNode] | None = None
        """The one in the eviction order that counts: (rank, serial, this node); None while there is none."""
        self.state = 0
        """Slot of the recurrent states after its last token; 0 for none. See node_states.py for these five."""
        self.host_state = 0
        """Slot of a copy of these states on the host; 0 for none. Only a node with a copy of its KV there has one."""
        self.state_loading = 0
        """Fence of the copy of these states to the device that is under way; 0 if none is."""
        self.state_kind = StateKind.PASSING
        self.states_below = 0
        """Children with a state, or with one below them."""
        self.window_len = 0
        """So many of its last tokens have K and V in layers with a sliding window; whole pages. See node_windows.py."""
        self.has_ends = False
        """A sequence can begin at its end or further down. Known only where events are published; see
        usable_ends.py."""

    @property
    def has_state(self) -> bool:
        """True if the node has a recurrent state, on any tier."""
        return self.state > 0 or self.host_state > 0

    @property
    def has_states(self) -> bool:
        """True if the node has a recurrent state on any tier, or one below it has."""
        return self.has_state or self.states_below > 0

    def __len__(self) -> int:
        """Tokens on this node."""
        return len(self.key) // ID_BYTES

    def __repr__(self) -> str:
        ids = np.frombuffer(self.key, dtype=np.int32)
        head = " ".join(map(str, ids[:4].tolist())) + (" …" if len(ids) > 4 else "")
        return (
            f"node #{self.serial} [{head}] tokens={len(self)} lock_ref={self.lock_ref} "
            f"children={len(self.children)} last_access={self.last_access}"
            f"{'' if self.on_device else ' off the device'}{' on the host' if self.host is not None else ''}"
        )
