"""An order of eviction that learns from what happens to the cache, how soon whose KV is asked for again.

What only one session has, its tail, is classed by its turn: how many requests it has had so far says best whether there
is another one to come. What several have in common is classed by how often it is asked for: the mean of its own last
gaps. Each class has a lane, in which the longest idle leaf comes first; of those the one that is worth least goes
(reuse.py). So a document that nobody asks for goes before a system prompt that everybody does, however recent; lru
does not know the difference, and orders that count uses do not know that a live session's tail is always new.

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
"""That of shared nodes of which no use has been seen: the longest."""

PRIVATE, SHARED = 0, 1
KIND_SPELLS = [64.0, 4.0]
"""Sessions differ little by turn, so a class of them has to say a lot before it counts; gaps differ by magnitudes."""

NEVER = float("inf")

LEAST_VALID = 8
"""Ticks for which a value is good enough, at least."""


class LearnedLanes:
    """Retired nodes go first, as in every order. Hears of all that is used, stored and removed as a `CacheWatcher`, and
    keeps what it has learned of a node in its ``note``."""

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
        """Of each lane what its first leaf is worth; NEVER if it is empty."""
        self._valid_until = [0.0] * (TURNS + GAPS)
        """Tick at which that leaf will have been idle so much longer that this is worth looking at again."""
        self._due = 0.0
        """The earliest of them, or earlier."""
        self._touched: set[int] = set(range(TURNS + GAPS))
        """Lanes whose first leaf may be another one now, or worth something else."""

    # -- whose turn it is ---------------------------------------------------------------------------------------------

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
            self._ended(_class_of(node), gap, reused=True)
            node.note = used_again(habit_of(node), gap)

    def stored(self, node: TreeNode) -> None:
        parent = node.parent
        assert parent is not None
        got_child(parent, node)
        if (ghost := self._ghosts.take(node)) is not None:
            gap = max(self._now - ghost.used, 0)
            self._ended(ghost.number, gap, reused=True)
            node.note = used_again(ghost.habit, gap)

    def removed(self, nodes: Sequence[TreeNode]) -> None:
        for node in nodes:
            parent = node.parent
            assert parent is not None
            if parent.parent is not None and not parent.branched:
                lost_child(parent, node)  # its spell goes on as the parent's
            elif node.last_access and node.host is None:
                self._ghosts.add(node, _class_of(node))
        for ghost in self._ghosts.forget():
            self._ended(ghost.number, max(self._now - ghost.used, 0), reused=False)

    def cleared(self) -> None:
        self._ghosts.clear()

    def _ended(self, number: int, idle: int, *, reused: bool) -> None:
        if self._reuse.ended(number, idle, reused=reused):
            self._touched.add(number)


def _class_of(node: TreeNode) -> int:
    habit = habit_of(node)
    if node.branched or habit.shared:
        gap = UNKNOWN_GAP if habit.gap is None else int(habit.gap)
        return TURNS + min(gap // 2, GAPS - 1)
    turn = node.turn
    return max(turn, 1) - 1 if turn < 5 else min(turn.bit_length() + 1, TURNS - 1)
