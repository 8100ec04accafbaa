"""How many turns find the recurrent state of their prefix, by the number of states that the server keeps.

A hybrid model continues only where a state was left, and the server evicts states apart from K and V, by what computing
them anew would cost (GreedyDual). That order makes no stack: a larger pool need not hold what a smaller one does. So
pools of several sizes are followed side by side, by the rules of the server (radix/node_states.py,
scheduler/memory/state_memory.py) for one request at a time:

- A request begins from the deepest state on its path. It needs a slot, besides ``size`` others: a free one, that of a
  state which need not be kept, that of the very state from which it begins, or the cheapest of all.
- On its way it leaves states where its prompt parts from what is cached, and before the prompt's last token, or at the
  points that its client named, as far as there are slots that cost no state which is to be kept.
- At its end its own slot stays behind, as the newest turn end of the conversation; the one before need not be kept any
  more.

K and V are taken to be there: their sizes are those of the `Curve`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from ....radix.node_states import TURNS_KEPT
from ....runtime.runner.memory_plan import MOST_STATES
from .reuse_tree import Access, ReuseTree
from .state_marks import count_above, holders, marks_of
from .tree_node import Node, bits
from .turns import end_of

_PASSING, _KEPT = 0, 1
"""Classes: states that need not be kept, and those that are."""


def state_sizes() -> list[int]:
    """Numbers of states, up to the most that a server plans for: two per doubling."""
    return sorted({int(2 ** (half / 2)) for half in range(4, 2 * MOST_STATES.bit_length() - 1)})


class _Entry(NamedTuple):
    """A state's place in the order of one pool. The lowest class goes first, then the lowest rank, then the one that
    was noted first."""

    kind: int
    """Its class."""
    rank: int
    """``cost`` plus the floor of its class when it was used last."""
    number: int
    """No other entry of the pool has it."""
    node: Node
    cost: int
    """Units that computing it anew takes, when that was looked at last."""


class _Pool:
    """The states of the ``bit``-th size, and the order in which they go, as TierStates. Nodes have the marks."""

    __slots__ = ("_bit", "_entries", "_floors", "_heap", "_limit", "_next", "_unit_bytes", "count", "size")

    def __init__(self, bit: int, size: int, unit_bytes: int) -> None:
        self.size = size
        self.count = 0
        self._bit = bit
        self._unit_bytes = unit_bytes
        self._floors = [0, 0]
        """By class: the highest rank of its victims so far."""
        self._entries: dict[Node, _Entry] = {}
        self._heap: list[_Entry] = []
        """Also has entries that are no more in ``_entries``."""
        self._limit = 64
        self._next = 0

    def has_room(self, more: int) -> bool:
        """True if a request that leaves so many states makes none give way."""
        return self.count + more < self.size

    def copy_to(self, larger: _Pool) -> None:
        """A larger pool has the same states so far, as none had to give way."""
        larger.count = self.count
        larger._entries, larger._heap = dict(self._entries), list(self._heap)
        larger._limit, larger._next = self._limit, self._next

    def note_use(self, node: Node, cost: int, kind: int) -> None:
        """A state was used or left; computing it anew would take ``cost`` units."""
        self._push(node, kind, self._floors[kind] + cost, cost)

    def change_kind(self, node: Node, kind: int) -> None:
        """The class of a state is another now; it stays as far above the floor."""
        old = self._entries[node]
        self._push(node, kind, old.rank + self._floors[kind] - self._floors[old.kind], old.cost)

    def remove(self, node: Node) -> None:
        del self._entries[node]
        self.count -= 1

    def take_cheapest(self, *, kept_too: bool, spared: Collection[Node | None]) -> Node | None:
        """Remove the state that goes first, and return its node. None if there is none that may."""
        passed, victim = [], None
        while victim is None and self._heap:
            entry = self._heap[0]
            if entry.kind == _KEPT and not kept_too:
                break
            heappop(self._heap)
            if self._entries.get(entry.node) is not entry:
                continue
            if entry.node in spared:
                passed.append(entry)
            elif (rise := self._cost(entry) - entry.cost) > 0:  # the state above was evicted
                self._push(entry.node, entry.kind, entry.rank + rise, entry.cost + rise)
            else:
                victim = entry.node
                self._floors[entry.kind] = max(self._floors[entry.kind], entry.rank)
                self.remove(victim)
        for entry in passed:
            heappush(self._heap, entry)
        return victim

    def _cost(self, entry: _Entry) -> int:
        node = entry.node
        if node.parent is None:  # the tree has forgotten it
            return 0
        _, above = next(holders(node.parent, 1 << self._bit))
        return end_of(node, self._unit_bytes) - (0 if above is None else end_of(above, self._unit_bytes))

    def _push(self, node: Node, kind: int, rank: int, cost: int) -> None:
        entry = self._entries[node] = _Entry(kind, rank, self._next, node, cost)
        self._next += 1
        heappush(self._heap, entry)
        if len(self._heap) > self._limit:
            self._heap = list(self._entries.values())
            heapify(self._heap)
            self._limit = 2 * len(self._heap) + 64


class StatePools:
    """Pools of all ``sizes`` over one tree, and one that keeps every state, which is the last of each list."""

    def __init__(self, tree: ReuseTree, sizes: Sequence[int] | None = None) -> None:
        self.sizes = list(sizes or state_sizes())
        self.turns = 0
        """Requests that continue an earlier one."""
        self.found_turns = [0] * (len(self.sizes) + 1)
        """Of these, those that found a state at the end of that request or behind it."""
        self.found_units = [0] * (len(self.sizes) + 1)
        """Units of all prompts before the state that was found."""
        self.older_turns = 0
        """Requests that went back to an earlier turn than the newest of their conversation."""
        self.left = 0
        """Places where a state was left."""
        self._tree = tree
        self._pools = [_Pool(bit, size, tree.unit_bytes) for bit, size in enumerate(self.sizes)]
        self._endless = len(self.sizes)
        self._followed = 1
        """Pools that are followed: all that are full, and the next. Larger ones have the same states as that one, and
        the marks of nodes say so already."""
        self._all = (1 << self._endless + 1) - 1

    def add_request(
        self,
        access: Access,
        limit: int,
        *,
        inherited: int = 0,
        points: Collection[int] = (),
        continues: bool = False,
        ends: Sequence[Node] = (),
        turns_kept: int = TURNS_KEPT,
        is_aborted: bool = False,
    ) -> None:
        """Count a request, and leave its states. limit: units of the prompt that may be found. inherited: units of the
        request that it continues; 0 for none. points: units after which its client has it leave states. continues: it
        named its parent. ends: where its outputs ended; the sequence of ``access`` is the first of them."""
        self.turns += inherited > 0
        self._follow_larger(len(points) + len(ends) + 2)
        width = self._tree.unit_bytes
        start = next((node for node in reversed(access.path) if end_of(node, width) <= limit), None)
        found = [(sizes, node, 0 if node is None else end_of(node, width)) for sizes, node in holders(start, self._all)]
        known, parting = min(access.known, limit), 0
        for sizes, node, begun in found:
            self._begin(sizes, node, begun, begun >= inherited > 0)
            if begun < known:
                parting |= sizes
        parts = [(known, parting, True)] if parting else []
        parts += [(point, self._all, True) for point in set(points) if 0 < point <= limit]
        if not points and not continues and limit:
            parts.append((limit, self._all & ~parting if known == limit else self._all, False))
        placed: list[Node] = []
        for units, sizes, is_kept in sorted(parts):
            place = self._tree.cut_path(access.last, units)
            for began_at, node, begun in found:
                if begun == units:
                    self._put(place, sizes & began_at & marks_of(place).carried, is_branch=is_kept)
                elif begun < units and (free := self._free(sizes & began_at, [*placed, node])):
                    self._put(place, free, is_branch=is_kept)
            placed.append(place)
        for end in ends:
            self._put(end, self._all, is_turn=not is_aborted, turns_kept=turns_kept)

    def _follow_larger(self, more: int) -> None:
        """Follow one more pool wherever the last may have to evict for a request that leaves so many states."""
        while self._followed < self._endless and not self._pools[self._followed - 1].has_room(more):
            self._pools[self._followed - 1].copy_to(self._pools[self._followed])
            self._followed += 1

    @property
    def _sized(self) -> int:
        """The sizes of the pools that are followed."""
        return (1 << self._followed) - 1

    def _begin(self, sizes: int, node: Node | None, begun: int, finds_turn: bool) -> None:
        """A request begins from the state of this node at these sizes, and has a slot for its own."""
        for bit in bits(sizes):
            self.found_units[bit] += begun
            self.found_turns[bit] += finds_turn
        if node is not None:
            marks = marks_of(node)
            if sizes >> self._endless and marks.was_turn and not (marks.turn | marks.branch) >> self._endless:
                self.older_turns += 1
            self._rank(node, sizes)
        for bit in bits(sizes & self._sized):
            pool = self._pools[bit]
            while pool.count > pool.size:
                self._take_slot(bit, pool, node)

    def _take_slot(self, bit: int, pool: _Pool, node: Node | None) -> None:
        """Evict a state for a request that begins from that of ``node``, or that state."""
        victim = pool.take_cheapest(kept_too=False, spared=(node,))
        if victim is None and node is not None and marks_of(node).carried >> bit & 1:
            pool.remove(victim := node)
        if victim is None:
            victim = pool.take_cheapest(kept_too=True, spared=())
        assert victim is not None
        self._drop(victim, 1 << bit)

    def _free(self, sizes: int, spared: Collection[Node | None]) -> int:
        """At which of these sizes there is a slot for a state that the next requests may need."""
        free = sizes & ~self._sized
        for bit in bits(sizes & self._sized):
            pool = self._pools[bit]
            if pool.count < pool.size:
                free |= 1 << bit
            elif (victim := pool.take_cheapest(kept_too=False, spared=spared)) is not None:
                self._drop(victim, 1 << bit)
                free |= 1 << bit
        return free

    def _drop(self, node: Node, size: int) -> None:
        """The state of a node is no more in the pool of one size."""
        marks = node.states
        if marks is None:  # the tree has forgotten the node
            return
        marks.carried &= ~size
        marks.turn &= ~size
        marks.branch &= ~size
        if not marks.any & size:
            for _ in count_above(node, size, -1):
                pass

    def _put(
        self, node: Node, sizes: int, *, is_branch: bool = False, is_turn: bool = False, turns_kept: int = TURNS_KEPT
    ) -> None:
        """Have a node carry its state at these sizes. As NodeStates.put."""
        marks = marks_of(node)
        new = sizes & ~marks.carried
        for above, grown in count_above(node, new & ~marks.below, 1):
            above_marks = marks_of(above)
            above_marks.turn &= ~grown
            above_marks.branch |= grown
            self._change_kind(above, grown, _KEPT)
        marks.carried |= new
        self.left += new >> self._endless
        for bit in bits(new & self._sized):
            self._pools[bit].count += 1
        marks.branch |= sizes if is_branch else sizes & marks.many
        turns = sizes & ~marks.many if is_turn else 0
        marks.turn = (marks.turn | turns) & ~marks.branch
        self._rank(node, sizes)
        if turns:
            self._demote_above(node, turns, turns_kept)

    def _rank(self, node: Node, sizes: int) -> None:
        """The state of a node was used, or has just been left. As NodeStates.note_use."""
        end, marks = end_of(node, self._tree.unit_bytes), marks_of(node)
        kept = marks.turn | marks.branch
        for others, above in holders(node.parent, sizes):
            cost = end - (end_of(above, self._tree.unit_bytes) if above is not None else 0)
            for bit in bits(others & self._sized):
                self._pools[bit].note_use(node, cost, _KEPT if kept >> bit & 1 else _PASSING)

    def _demote_above(self, node: Node, sizes: int, turns_kept: int) -> None:
        """Of the turn ends above one, up to where several continue, only the newest are kept."""
        found: dict[int, int] = {}
        above = node.parent
        while sizes and above is not None and above.parent is not None:
            marks = above.states
            if marks is not None:
                sizes &= ~marks.many
                for bit in bits(marks.turn & sizes):
                    found[bit] = found.get(bit, 1) + 1
                    if found[bit] > turns_kept:
                        marks.turn &= ~(1 << bit)
                        marks.was_turn |= bit == self._endless
                        self._change_kind(above, 1 << bit, _PASSING)
            above = above.parent

    def _change_kind(self, node: Node, sizes: int, kind: int) -> None:
        for bit in bits(sizes & self._sized):
            self._pools[bit].change_kind(node, kind)
