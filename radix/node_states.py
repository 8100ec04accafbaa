"""The recurrent states that nodes of the tree carry, and the order in which they are given up.

A node carries the state of its last token or none. So a split leaves it where it belongs: the existing node stays the
lower part. Only where a node has a state can a model with such layers continue; the K and V below the last one on a
path are of no use to it.

States are evicted apart from K and V, by what computing them anew would cost: the tokens from the nearest state above.
That is GreedyDual (Young 1994; Cao and Irani 1997) with states of equal size: a state's rank is that cost plus the rank
of the last victim, so that what is not used sinks. The newest turn end of a conversation, and the ends of what several
continue, go only when no other state is left; on the device, those with a copy on the host before those without.

With a host tier a node may have a copy of its state there, or only that copy. The host gives copies up in the same
order. A copy between the tiers that is under way names the slots that it reads and writes, so that nothing else writes
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from ..memory_pool.state_slots import StateSlots
from .lazy_heap import LazyHeap
from .node import StateKind, TreeNode

TURNS_KEPT = 1
"""Turn ends of a conversation that are kept before other states."""

Rank = tuple[float, ...]
"""(class, rank within it); the lowest goes first."""

PASSING, STORED, KEPT = 0.0, 1.0, 2.0
"""Classes: states that need not be kept; those that are kept, and have a copy on the host; those without one."""


class TierStates:
    """The states of nodes on one tier, and the order in which it gives them up. Each is one name of its slot."""

    def __init__(self, slots: StateSlots, rank: Callable[[TreeNode], Rank]) -> None:
        self.slots = slots
        self._rank = rank
        self.nodes: dict[int, TreeNode] = {}
        """The node of each slot that one carries."""
        self._named = np.zeros(slots.total + 1, dtype=bool)
        """By slot: a node carries it."""
        self._order = LazyHeap(self._rank_of)

    @property
    def evictable(self) -> int:
        """States that only a node names."""
        return int(np.count_nonzero(self._named & (self.slots.refs == 1)))

    def carries(self, slot: int) -> bool:
        """True if a node names this slot."""
        return bool(self._named[slot])

    def lists(self, node: TreeNode, slot: int) -> bool:
        """True if this node is known to carry the state in this slot; for invariants."""
        return self.carries(slot) and self.nodes.get(slot) is node

    def unranked(self) -> set[int]:
        """Slots of nodes that have no entry in the order of eviction; for invariants."""
        return self.nodes.keys() - self._order.serials()

    def note(self, node: TreeNode, slot: int) -> None:
        """A node carries the state in this slot; the name is counted already."""
        self.nodes[slot], self._named[slot] = node, True

    def drop(self, slot: int) -> None:
        """No node carries this slot any more."""
        del self.nodes[slot]
        self._named[slot] = False
        self.slots.drop(slot)

    def push(self, slot: int) -> None:
        """The rank of the node with this slot is another now; 0 for none."""
        if slot:
            self._order.push_entry(self._rank(self.nodes[slot]), slot)

    def choose_victims(self, count: int, *, kept_too: bool) -> list[TreeNode]:
        """Up to ``count`` nodes whose slots no other holder names, the cheapest first; see `NodeStates.evict`. They
        have no entry any more."""
        victims: dict[int, TreeNode] = {}
        """By slot: one that is pushed again with an equal rank has two entries."""
        passed: list[int] = []
        while len(victims) < count and (first := self._order.pop()) is not None:
            slot = first[1]
            if self._rank(self.nodes[slot])[0] == KEPT and not kept_too:
                passed.append(slot)
                break
            if self.slots.is_shared(slot):
                passed.append(slot)
            else:
                victims[slot] = self.nodes[slot]
        for slot in passed:
            self.push(slot)
        return list(victims.values())

    def forget_nodes(self) -> None:
        self.nodes.clear()
        self._named[:] = False
        self._order = LazyHeap(self._rank_of)

    def _rank_of(self, slot: int) -> Rank | None:
        node = self.nodes.get(slot)
        return None if node is None else self._rank(node)


class NodeStates:
    """Owns the states of nodes, on the device and on the host."""

    def __init__(self, slots: StateSlots, align: int) -> None:
        """align: the tree takes states at multiples of so many tokens; whole pages."""
        self.slots = slots
        self.align = align
        self.evicted_total = 0
        """States evicted from the device since start."""
        self.on_device = TierStates(slots, _device_rank)
        self.on_host: TierStates | None = None
        """See `keep_on_host`."""
        self.changed: set[TreeNode] | None = None
        """Collects nodes whose ``has_states`` has changed, for usable_ends.py; None if nothing takes them."""
        self._floor = 0.0
        """The rank of the last victim."""

    def __len__(self) -> int:
        """Nodes with a state on the device."""
        return len(self.on_device.nodes)

    def nodes(self) -> Iterator[TreeNode]:
        """The nodes that carry a state on the device."""
        return iter(self.on_device.nodes.values())

    @property
    def num_kept(self) -> int:
        """States on the device that go after all others."""
        return sum(node.state_kind is not StateKind.PASSING for node in self.nodes())

    @property
    def evictable(self) -> int:
        """States on the device that only a node names."""
        return self.on_device.evictable

    def carries(self, slot: int) -> bool:
        """True if a node names this slot of the device."""
        return self.on_device.carries(slot)

    def node_of(self, slot: int) -> TreeNode:
        """The node that carries the state in this slot of the device."""
        return self.on_device.nodes[slot]

    def deepest(self, node: TreeNode) -> TreeNode:
        """The last node with a state on any tier, on the path down to this one; the root, which needs none, if there is
        no other."""
        while not node.has_state and node.parent is not None:
            node = node.parent
        return node

    def deepest_on_device(self, node: TreeNode) -> TreeNode:
        """Likewise, the last with a state on the device."""
        while not node.state and node.parent is not None:
            node = node.parent
        return node

    def put(self, node: TreeNode, slot: int, kind: StateKind, turns_kept: int = TURNS_KEPT) -> None:
        """Have a node carry this state, unless it has one on the device: that is the same. turns_kept: how many turn
        ends of a conversation are kept before other states, the newest first."""
        if not node.state:
            self.slots.share(slot)
            self._begin(node)
            node.state = slot
            self.on_device.note(node, slot)
        if node.states_below > 1:
            kind = StateKind.BRANCH
        node.state_kind = max(node.state_kind, kind)
        self.note_use(node)
        if kind is StateKind.TURN_END:
            self._demote_turns_above(node, turns_kept)

    def note_use(self, node: TreeNode) -> None:
        """A sequence begins from the state of this node, or has just left it."""
        assert node.parent is not None
        node.state_rank = self._floor + node.prefix_len - self.deepest(node.parent).prefix_len
        self._push(node)

    def remove(self, node: TreeNode) -> None:
        """The node carries no state on the device any more, if it had one."""
        if node.state:
            slot, node.state = node.state, 0
            self.on_device.drop(slot)
            self._end(node)

    def evict(self, count: int, *, kept_too: bool) -> list[TreeNode]:
        """Take the states of up to ``count`` nodes off the device, which no other holder names, the cheapest first.
        kept_too: also those that go after all others. Returns the nodes."""
        victims = self.on_device.choose_victims(count, kept_too=kept_too)
        for node in victims:
            self._floor = max(self._floor, node.state_rank)
            self.remove(node)
        self.evicted_total += len(victims)
        return victims

    # -- on the host --------------------------------------------------------------------------------------------------

    def keep_on_host(self, slots: StateSlots) -> None:
        """Have a host tier with these slots, before it has any state."""
        self.on_host = TierStates(slots, _host_rank)

    def put_on_host(self, node: TreeNode, slot: int) -> None:
        """Have a node, which has none, carry a copy of its state in this slot of the host."""
        assert self.on_host is not None and not node.host_state
        self.on_host.slots.share(slot)
        self._begin(node)
        node.host_state = slot
        self.on_host.note(node, slot)
        self._push(node)

    def adopt_on_host(self, node: TreeNode, slot: int) -> None:
        """Have a node, which has no state on the host, carry there one that was stored since it was to be kept."""
        self.put_on_host(node, slot)
        kind = StateKind.BRANCH if node.states_below > 1 else StateKind.TURN_END
        node.state_kind = max(node.state_kind, kind)
        self.note_use(node)

    def remove_from_host(self, node: TreeNode) -> None:
        """The node has no copy of its state on the host any more, if it had one."""
        if node.host_state:
            assert self.on_host is not None
            slot, node.host_state = node.host_state, 0
            self.on_host.drop(slot)
            self._end(node)
            self._push(node)

    def evict_from_host(self) -> TreeNode | None:
        """Give up the cheapest copy on the host that only a node names. Returns the node; None if there is none."""
        assert self.on_host is not None
        victims = self.on_host.choose_victims(1, kept_too=True)
        for node in victims:
            self.remove_from_host(node)
        return victims[0] if victims else None

    # -- all at once --------------------------------------------------------------------------------------------------

    def forget_nodes(self) -> None:
        """The tree is dropped with all its nodes, and the slots are reset."""
        self.on_device.forget_nodes()
        if self.on_host is not None:
            self.on_host.forget_nodes()

    def restore(self, nodes: Iterable[TreeNode]) -> None:
        """Count anew what follows from the nodes' states, after an exception. nodes: all of the tree with the root,
        parents before children."""
        self.forget_nodes()
        for node in reversed(list(nodes)):
            node.states_below = sum(child.has_states for child in node.children.values())
            self._note_change(node)
            if node.state:
                self.on_device.note(node, node.state)
            if node.host_state:
                assert self.on_host is not None
                self.on_host.note(node, node.host_state)
            self._push(node)

    def _begin(self, node: TreeNode) -> None:
        """The node is about to get a state on one tier."""
        if not node.has_state:
            node.state_kind = StateKind.PASSING
        if not node.has_states:
            self._count_branch(node, 1)

    def _end(self, node: TreeNode) -> None:
        """The node has lost its state on one tier."""
        if not node.has_states:
            self._count_branch(node, -1)

    def _count_branch(self, node: TreeNode, change: int) -> None:
        """The subtree of a node has got its first state, or lost its last: tell the nodes above."""
        self._note_change(node)
        parent = node.parent
        while parent is not None:
            had = parent.has_states
            parent.states_below += change
            if parent.has_state and parent.states_below > 1 and parent.state_kind is not StateKind.BRANCH:
                parent.state_kind = StateKind.BRANCH
                self._push(parent)
            if had if change > 0 else parent.has_states:
                return
            parent = parent.parent

    def _note_change(self, node: TreeNode) -> None:
        if self.changed is not None:
            self.changed.add(node)

    def _demote_turns_above(self, node: TreeNode, turns_kept: int) -> None:
        """Of the turn ends above one, up to where several continue, only the newest are kept before other states."""
        above, found = node.parent, 1
        while above is not None and above.states_below < 2:
            if above.has_state and above.state_kind is StateKind.TURN_END:
                found += 1
                if found > turns_kept:
                    above.state_kind = StateKind.PASSING
                    self._push(above)
            above = above.parent

    def _push(self, node: TreeNode) -> None:
        self.on_device.push(node.state)
        if self.on_host is not None:
            self.on_host.push(node.host_state)


def _device_rank(node: TreeNode) -> Rank:
    if node.state_kind is StateKind.PASSING:
        return PASSING, node.state_rank
    return STORED if node.host_state else KEPT, node.state_rank


def _host_rank(node: TreeNode) -> Rank:
    return PASSING if node.state_kind is StateKind.PASSING else KEPT, node.state_rank
