"""The recurrent states that nodes of the tree carry, and the order in which they are given up.

A node carries the state of its last token or none. So a split leaves it where it belongs: the existing node stays the
lower part. Only where a node has a state can a model with such layers continue; the K and V below the last one on a
path are of no use to it.

States are evicted apart from K and V, by what computing them anew would cost: the tokens from the nearest state above.
That is GreedyDual (Young 1994; Cao and Irani 1997) with states of equal size: a state's rank is that cost plus the rank
of the last victim, so that what is not used sinks. The newest turn end of a conversation, and the ends of what several
continue, go only when no other state is left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from ..memory_pool.state_slots import StateSlots
from .lazy_heap import LazyHeap
from .node import StateKind, TreeNode

TURNS_KEPT = 1
"""Turn ends of a conversation that are kept before other states."""


class NodeStates:
    """Owns the states of nodes; each is one name of its slot."""

    def __init__(self, slots: StateSlots, align: int) -> None:
        """align: the tree takes states at multiples of so many tokens; whole pages."""
        self.slots = slots
        self.align = align
        self.evicted_total = 0
        """States evicted since start."""
        self._nodes: dict[int, TreeNode] = {}
        """The node of each slot that one carries."""
        self._named = np.zeros(slots.total + 1, dtype=bool)
        """By slot: a node carries it."""
        self._order = LazyHeap(self._rank_of)
        self._floor = 0.0
        """The rank of the last victim."""

    def __len__(self) -> int:
        """Nodes with a state."""
        return len(self._nodes)

    def nodes(self) -> Iterator[TreeNode]:
        """The nodes that carry a state."""
        return iter(self._nodes.values())

    @property
    def num_kept(self) -> int:
        """States that go after all others."""
        return sum(node.state_kind is not StateKind.PASSING for node in self._nodes.values())

    @property
    def evictable(self) -> int:
        """States that only a node names."""
        return int(np.count_nonzero(self._named & (self.slots.refs == 1)))

    def carries(self, slot: int) -> bool:
        """True if a node names this slot."""
        return bool(self._named[slot])

    def node_of(self, slot: int) -> TreeNode:
        """The node that carries the state in this slot."""
        return self._nodes[slot]

    def lists(self, node: TreeNode) -> bool:
        """True if a node is known to carry its state; for invariants."""
        return self.carries(node.state) and self._nodes.get(node.state) is node

    def unranked(self) -> set[int]:
        """Slots of nodes that have no entry in the order of eviction; for invariants."""
        return self._nodes.keys() - self._order.serials()

    def deepest(self, node: TreeNode) -> TreeNode:
        """The last node with a state on the path down to this one; the root, which needs none, if there is no other."""
        while not node.state and node.parent is not None:
            node = node.parent
        return node

    def put(self, node: TreeNode, slot: int, kind: StateKind, turns_kept: int = TURNS_KEPT) -> None:
        """Have a node carry this state, unless it has one: that is the same. turns_kept: how many turn ends of a
        conversation are kept before other states, the newest first."""
        if not node.state:
            self.slots.share(slot)
            if not node.has_states:
                self._count_branch(node, 1)
            node.state, node.state_kind = slot, StateKind.PASSING
            self._nodes[slot], self._named[slot] = node, True
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
        """The node carries no state any more, if it had one."""
        slot = node.state
        if not slot:
            return
        node.state = 0
        del self._nodes[slot]
        self._named[slot] = False
        self.slots.drop(slot)
        if not node.has_states:
            self._count_branch(node, -1)

    def evict(self, count: int, *, kept_too: bool) -> list[TreeNode]:
        """Take the states of up to ``count`` nodes, which no other holder names, the cheapest first. kept_too: also
        those that go after all others. Returns the nodes."""
        victims: list[TreeNode] = []
        passed: list[TreeNode] = []
        while len(victims) < count and (first := self._order.pop()) is not None:
            node = self._nodes[first[1]]
            if node.state_kind is not StateKind.PASSING and not kept_too:
                passed.append(node)
                break
            if self.slots.is_shared(node.state):
                passed.append(node)
                continue
            self._floor = max(self._floor, node.state_rank)
            victims.append(node)
            self.remove(node)
        for node in passed:
            self._push(node)
        self.evicted_total += len(victims)
        return victims

    def clear(self) -> None:
        """The tree is dropped with all its nodes, and the slots are reset."""
        self._nodes.clear()
        self._named[:] = False
        self._order = LazyHeap(self._rank_of)

    def restore(self, nodes: Iterable[TreeNode]) -> None:
        """Count anew what follows from the nodes' states, after an exception. nodes: all of the tree with the root,
        parents before children."""
        self.clear()
        for node in reversed(list(nodes)):
            node.states_below = sum(child.has_states for child in node.children.values())
            if node.state:
                self._nodes[node.state], self._named[node.state] = node, True
                self._push(node)

    def _count_branch(self, node: TreeNode, change: int) -> None:
        """The subtree of a node has got its first state, or lost its last: tell the nodes above."""
        parent = node.parent
        while parent is not None:
            had = parent.has_states
            parent.states_below += change
            if parent.state and parent.states_below > 1 and parent.state_kind is not StateKind.BRANCH:
                parent.state_kind = StateKind.BRANCH
                self._push(parent)
            if had if change > 0 else parent.has_states:
                return
            parent = parent.parent

    def _demote_turns_above(self, node: TreeNode, turns_kept: int) -> None:
        """Of the turn ends above one, up to where several continue, only the newest are kept before other states."""
        above, found = node.parent, 1
        while above is not None and above.states_below < 2:
            if above.state and above.state_kind is StateKind.TURN_END:
                found += 1
                if found > turns_kept:
                    above.state_kind = StateKind.PASSING
                    self._push(above)
            above = above.parent

    def _push(self, node: TreeNode) -> None:
        self._order.push_entry(_rank(node), node.state)

    def _rank_of(self, slot: int) -> tuple[float, ...] | None:
        node = self._nodes.get(slot)
        return None if node is None else _rank(node)


def _rank(node: TreeNode) -> tuple[float, ...]:
    return float(node.state_kind is not StateKind.PASSING), node.state_rank
