"""The recurrent states that nodes of the tree carry, and the order in which they are given up.

A node carries the state of its last token or none. So a split leaves it where it belongs: the existing node stays the
lower part. Only where a node has a state can a model with such layers continue; the K and V below the last one on a
path are of no use to it.

States are evicted apart from K and V. States of KV that is marked as not reusable go first. The newest turn end of a
conversation, and the ends of what several continue, go only when no other state is left; on the device, those with a
copy on the host before those without.

Within such a class the order is by what computing a state anew would cost: the tokens from the nearest state above.
That is GreedyDual (Young 1994; Cao and Irani 1997) with states of equal size: a state's rank is that cost plus the
*floor* of its class, the rank of the last victim there, so that what is not used sinks. Each class has its own floor:
if victims of all classes raised one, many that need not be kept would make the time of the last use outweigh the costs
of those that are. A cost rises when the state above is evicted, so it is looked at once more before a state goes.

With a host tier a node may have a copy of its state there, or only that copy. The host gives copies up by the same
rules, with floors of its own. A copy between the tiers that is under way names the slots that it reads and writes, so
that nothing else writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from ..memory_pool.state_slots import StateSlots
from .lazy_heap import LazyHeap
from .node import StateKind, TreeNode

TURNS_KEPT = 1
"""Turn ends of a conversation that are kept before other states."""

Rank = tuple[int, float]
"""(class, rank within it); the lowest goes first."""

RETIRED, PASSING, STORED, KEPT = range(4)
"""Classes: states of KV that is not to be reused; those that need not be kept; those that are kept, and have a copy on
the host; those without one."""


@dataclass(slots=True)
class Standing:
    """The place of a state in the order of one tier."""

    group: int
    """Its class."""
    cost: int
    """Tokens that computing it anew takes, when that was looked at last."""
    rank: float
    """``cost`` plus the floor of its class when it was used last."""


class TierStates:
    """The states of nodes on one tier, and the order in which it gives them up. Each is one name of its slot."""

    def __init__(self, slots: StateSlots, class_of: Callable[[TreeNode], int]) -> None:
        self.slots = slots
        self._class_of = class_of
        self._floors = [0.0] * (KEPT + 1)
        """By class: the highest rank of its victims so far."""
        self._standings: dict[int, Standing] = {}
        """By slot."""
        self.nodes: dict[int, TreeNode] = {}
        """The node of each slot that one carries."""
        self._named = np.zeros(slots.total + 1, dtype=bool)
        """By slot: a node carries it."""
        self._order = LazyHeap(self._rank_if_listed)

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
        self._standings.pop(slot, None)
        self._named[slot] = False
        self.slots.drop(slot)

    def rank_of(self, slot: int) -> Rank:
        """The rank of the state in this slot."""
        standing = self._standings[slot]
        return standing.group, standing.rank

    def note_use(self, slot: int) -> None:
        """The state in this slot is used; 0 for none."""
        if slot:
            node = self.nodes[slot]
            group, cost = self._class_of(node), cost_of(node)
            self._standings[slot] = Standing(group, cost, self._floors[group] + cost)
            self._push(slot)

    def update_class(self, slot: int) -> None:
        """The class of the state in this slot may be another now; it stays as far above the floor. 0 for none."""
        if slot not in self._standings:
            self.note_use(slot)  # its place was lost in an exception, or is not given yet
            return
        standing, group = self._standings[slot], self._class_of(self.nodes[slot])
        standing.rank += self._floors[group] - self._floors[standing.group]
        standing.group = group
        self._push(slot)

    def choose_victim(self, *, kept_too: bool) -> TreeNode | None:
        """The cheapest node with a slot that no other holder names; None if there is none. See `NodeStates.evict`. It
        has no entry any more."""
        passed: list[int] = []
        victim = None
        while victim is None and (first := self._order.pop()) is not None:
            slot = first[1]
            if first[0][0] == KEPT and not kept_too:
                passed.append(slot)
                break
            if self.slots.is_shared(slot):
                passed.append(slot)
            elif not self._has_risen(slot):
                victim = self.nodes[slot]
        for slot in passed:
            self._push(slot)
        return victim

    def _has_risen(self, slot: int) -> bool:
        """True if computing a state anew takes more by now, as that above it was evicted: it then has another rank.
        Else the floor of its class rises to its rank, as it is the next victim."""
        standing = self._standings[slot]
        rise = cost_of(self.nodes[slot]) - standing.cost
        if rise > 0:
            standing.cost, standing.rank = standing.cost + rise, standing.rank + rise
            self._push(slot)
            return True
        self._floors[standing.group] = max(self._floors[standing.group], standing.rank)
        return False

    def forget_nodes(self) -> None:
        self.nodes.clear()
        self._standings.clear()
        self._named[:] = False
        self._order = LazyHeap(self._rank_if_listed)

    def _push(self, slot: int) -> None:
        self._order.push_entry(self.rank_of(slot), slot)

    def _rank_if_listed(self, slot: int) -> Rank | None:
        return self.rank_of(slot) if slot in self._standings else None


class NodeStates:
    """Owns the states of nodes, on the device and on the host."""

    def __init__(self, slots: StateSlots, align: int) -> None:
        """align: the tree takes states at multiples of so many tokens; whole pages."""
        self.slots = slots
        self.align = align
        self.evicted_total = 0
        """States evicted from the device since start."""
        self.on_device = TierStates(slots, _class_on_device)
        self.on_host: TierStates | None = None
        """See `keep_on_host`."""
        self.changed: set[TreeNode] | None = None
        """Collects nodes whose ``has_states`` may have changed, for usable_ends.py; None if nothing takes them."""

    def __len__(self) -> int:
        """Nodes with a state on the device."""
        return len(self.on_device.nodes)

    def nodes(self) -> Iterator[TreeNode]:
        """The nodes that carry a state on the device."""
        return iter(self.on_device.nodes.values())

    @property
    def num_kept(self) -> int:
        """States on the device that go after all others."""
        return sum(node.state_kind > StateKind.PASSING for node in self.nodes())

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
        return deepest(node)

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
        node.state_kind = max(node.state_kind, StateKind.PASSING)
        self.on_device.note_use(node.state)
        if self.on_host is not None:
            self.on_host.note_use(node.host_state)

    def retire(self, node: TreeNode) -> None:
        """The KV of this node is marked as not reusable. If it has a state, that goes before all others on each tier,
        until it is used again."""
        if node.has_state:
            node.state_kind = StateKind.RETIRED
            self._update_class(node)

    def remove(self, node: TreeNode) -> None:
        """The node carries no state on the device any more, if it had one."""
        if node.state:
            slot, node.state = node.state, 0
            self.on_device.drop(slot)
            self._end(node)

    def evict(self, count: int, *, kept_too: bool) -> list[TreeNode]:
        """Take the states of up to ``count`` nodes off the device, which no other holder names, the cheapest first.
        kept_too: also those that go after all others. Returns the nodes."""
        victims: list[TreeNode] = []
        while len(victims) < count and (node := self.on_device.choose_victim(kept_too=kept_too)) is not None:
            self.remove(node)
            victims.append(node)
        self.evicted_total += len(victims)
        return victims

    # -- on the host --------------------------------------------------------------------------------------------------

    def keep_on_host(self, slots: StateSlots) -> None:
        """Have a host tier with these slots, before it has any state."""
        self.on_host = TierStates(slots, _class_on_host)

    def put_on_host(self, node: TreeNode, slot: int) -> None:
        """Have a node, which has none, carry a copy of its state in this slot of the host."""
        assert self.on_host is not None and not node.host_state
        self.on_host.slots.share(slot)
        self._begin(node)
        node.host_state = slot
        self.on_host.note(node, slot)
        self._update_class(node)

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
            self._update_class(node)

    def evict_from_host(self) -> TreeNode | None:
        """Give up the cheapest copy on the host that only a node names. Returns the node; None if there is none."""
        assert self.on_host is not None
        victim = self.on_host.choose_victim(kept_too=True)
        if victim is not None:
            self.remove_from_host(victim)
        return victim

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
            self._update_class(node)

    def _begin(self, node: TreeNode) -> None:
        """The node is about to get a state on one tier."""
        if not node.has_state:
            node.state_kind = StateKind.PASSING
            self._note_change(node)  # a state below that counts already may go before anything looks
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
                self._update_class(parent)
            if had if change > 0 else parent.has_states:
                return
            self._note_change(parent)
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
                    self._update_class(above)
            above = above.parent

    def _update_class(self, node: TreeNode) -> None:
        self.on_device.update_class(node.state)
        if self.on_host is not None:
            self.on_host.update_class(node.host_state)


def deepest(node: TreeNode) -> TreeNode:
    """See `NodeStates.deepest`."""
    while not node.has_state and node.parent is not None:
        node = node.parent
    return node


def cost_of(node: TreeNode) -> int:
    """Tokens that computing the state of a node anew takes: those from the nearest state above."""
    assert node.parent is not None
    return node.prefix_len - deepest(node.parent).prefix_len


def _class_on_device(node: TreeNode) -> int:
    return STORED if node.host_state and node.state_kind > StateKind.PASSING else _class_on_host(node)


def _class_on_host(node: TreeNode) -> int:
    if node.state_kind > StateKind.PASSING:
        return KEPT
    return PASSING if node.state_kind is StateKind.PASSING else RETIRED
