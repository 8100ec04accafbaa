"""An order of eviction that learns from the cache's events how soon each kind of KV is used again.

A session's tail, which it shares with no other session, is classed by its turn: the number of requests so far is the
best predictor of another one. A shared prefix is classed by how often it is used: the mean of its own last gaps. Each
class has a lane, in which the longest idle leaf comes first; of these leaves the one with the lowest value is evicted
(reuse.py). So an unused document is evicted before a system prompt that all sessions use, however recent it is; lru
cannot tell them apart, and orders that count uses do not know that a live session's tail is always new.

The idea of ranking by hit density is that of LHD (Beckmann, Chen, Cidon, 2018); the index is Gittins'.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..node import TreeNode
from ..watching import CacheWatcher
from .ghosts import Ghosts
from .habit import got_child, habit_of, lost_child, used_again
from .lanes import Lane
from .ranks import lru
from .reuse import Reuse

TURNS = 8
"""Classes of tails: 1, 2, 3, 4, 5–7, 8–15, 16–31 turns, and more."""

GAPS = 16
"""Classes of what is shared: one for each power of two of the gap, the last one for longer ones."""

UNKNOWN_GAP = 2 * GAPS
"""The gap of shared nodes without an observed reuse: the longest."""

PRIVATE, SHARED = 0, 1
KIND_SPELLS = [64.0, 4.0]
"""Sessions differ little by turn, so a class of them has to say a lot before it counts; gaps differ by magnitudes."""

NEVER = float("inf")

LEAST_VALID = 8
"""Ticks for which a value is good enough, at least."""


class LearnedLanes:
    """Retired nodes go first, as in every order. It receives the cache's events as a `CacheWatcher`, and keeps what it
    has learned of a node in the node's ``note``."""

    def __init__(self, pool_tokens: int) -> None:
        self.rank = lru
        self._retired = Lane()
        self._lanes = [Lane() for _ in range(TURNS + GAPS)]
        self.all: Sequence[Lane] = (self._retired, *self._lanes)
        self.watcher: CacheWatcher | None = self
        self._reuse = Reuse([PRIVATE] * TURNS + [SHARED] * GAPS, KIND_SPELLS)
        self._ghosts = Ghosts(pool_tokens)
        self._now = 0
        """Tick of the last use."""
        self._values = [NEVER] * (TURNS + GAPS)
        """The value of each lane's first leaf; NEVER if the lane is empty."""
        self._valid_until = [0.0] * (TURNS + GAPS)
        """Tick at which that leaf will have been idle so much longer that this is worth looking at again."""
        self._due = 0.0
        """The earliest of them, or earlier."""
        self._touched: set[int] = set(range(TURNS + GAPS))
        """Lanes in which the first leaf, or its value, may have changed."""

    # -- the next lane ------------------------------------------------------------------------------------------------

    def lane_of(self, node: TreeNode) -> Lane:
        if not node.last_access:
            return self._retired
        number = _class_of(node)
        self._touched.add(number)
        return self._lanes[number]

    def next(self) -> Lane | None:
        if self._retired:
            return self._retired
        now, values = self._now, self._values
        if now >= self._due:
            self._touched.update(number for number, until in enumerate(self._valid_until) if now >= until)
            self._due = NEVER
        for number in self._touched:
            self._value_first(number, self._lanes[number])
        self._touched.clear()
        if self._due == NEVER:
            self._due = min(self._valid_until)
        while (lowest := min(values)) != NEVER:
            number = values.index(lowest)
            lane = self._lanes[number]
            if lane:
                self._touched.add(number)
                return lane
            values[number] = NEVER  # it has been cleared
        return None

    def _value_first(self, number: int, lane: Lane) -> None:
        if not lane:
            self._values[number] = self._valid_until[number] = NEVER
            return
        idle = max(self._now - lane.first()[0], 0)
        self._values[number] = self._reuse.value(number, idle)
        self._valid_until[number] = until = self._now + LEAST_VALID + idle // 16
        if until < self._due < NEVER:
            self._due = until

    # -- what happens to the cache ------------------------------------------------------------------------------------

    def used(self, node: TreeNode, tick: int) -> None:
        self._now = tick
        if node.parent is not None:
            gap = tick - node.used
            self._end_spell(_class_of(node), gap, reused=True)
            node.note = used_again(habit_of(node), gap)

    def stored(self, node: TreeNode) -> None:
        parent = node.parent
        assert parent is not None
        got_child(parent, node)
        if (ghost := self._ghosts.take_ghost(node)) is not None:
            gap = max(self._now - ghost.used, 0)
            self._end_spell(ghost.number, gap, reused=True)
            node.note = used_again(ghost.habit, gap)

    def removed(self, nodes: Sequence[TreeNode]) -> None:
        for node in nodes:
            parent = node.parent
            assert parent is not None
            if parent.parent is not None and not parent.branched:
                lost_child(parent, node)  # its spell continues as the parent's
            elif node.last_access and node.host is None:
                self._ghosts.add_ghost(node, _class_of(node))
        for ghost in self._ghosts.forget_oldest():
            self._end_spell(ghost.number, max(self._now - ghost.used, 0), reused=False)

    def cleared(self) -> None:
        self._ghosts.clear()

    def _end_spell(self, number: int, idle: int, *, reused: bool) -> None:
        if self._reuse.end_spell(number, idle, reused=reused):
            self._touched.add(number)


def _class_of(node: TreeNode) -> int:
    habit = habit_of(node)
    if node.branched or habit.shared:
        gap = UNKNOWN_GAP if habit.gap is None else int(habit.gap)
        return TURNS + min(gap // 2, GAPS - 1)
    turn = node.turn
    return max(turn, 1) - 1 if turn < 5 else min(turn.bit_length() + 1, TURNS - 1)
