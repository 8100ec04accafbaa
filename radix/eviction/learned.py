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
from .lanes import Lane
from .ranks import lru
from .reuse import Reuse, bucket_of

TURNS = 8
"""Classes of tails: 1, 2, 3, 4, 5–7, 8–15, 16–31 turns, and more."""

GAPS = 16
"""Classes of what is shared: one for each power of two of the gap, the last one for longer ones."""

UNKNOWN_GAP = 2 * GAPS
"""That of shared nodes of which no use has been seen: the longest."""

PRIVATE, SHARED = 0, 1
KIND_SPELLS = [32.0, 4.0]
"""Sessions differ little by turn, so a class of them has to say a lot before it counts; gaps differ by magnitudes."""

NEVER = float("inf")


class LearnedLanes:
    """Retired nodes go first, as in every order. Hears of all that is used, stored and removed as a `CacheWatcher`, and
    keeps in a node's ``note`` its gap, in buckets, and how many uses that is from."""

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
        self._valid_until = [0] * (TURNS + GAPS)
        """Tick at which that leaf will have been idle so much longer that this is worth looking at again."""

    # -- whose turn it is ---------------------------------------------------------------------------------------------

    def lane_of(self, node: TreeNode) -> Lane:
        return self._lanes[_class_of(node)] if node.last_access else self._retired

    def next(self) -> Lane | None:
        if self._retired:
            return self._retired
        now, valid_until, values = self._now, self._valid_until, self._values
        for number, lane in enumerate(self._lanes):
            if lane.changed or now >= valid_until[number]:
                self._value_first(number, lane)
        lowest = min(values)
        return self._lanes[values.index(lowest)] if lowest < NEVER else None

    def _value_first(self, number: int, lane: Lane) -> None:
        lane.changed = False
        if not lane:
            self._values[number], self._valid_until[number] = NEVER, self._now + 1
            return
        idle = max(self._now - lane.first()[0], 0)
        self._values[number] = self._reuse.value(number, idle)
        self._valid_until[number] = self._now + 1 + idle // 16

    # -- what happens to the cache ------------------------------------------------------------------------------------

    def used(self, node: TreeNode, tick: int) -> None:
        self._now = tick
        if node.parent is not None:
            gap = tick - node.used
            self._ended(_class_of(node), gap, reused=True)
            node.note = _after(node.note, gap)

    def stored(self, node: TreeNode) -> None:
        if (ghost := self._ghosts.take(node)) is not None:
            gap = max(self._now - ghost.used, 0)
            self._ended(ghost.number, gap, reused=True)
            node.note = _after(ghost.habit, gap)

    def removed(self, nodes: Sequence[TreeNode]) -> None:
        for node in nodes:
            parent = node.parent
            assert parent is not None
            lives_on = parent.parent is not None and not parent.branched  # as its parent, which inherits its last use
            if node.last_access and node.host is None and not lives_on:
                self._ghosts.add(node, _class_of(node))
        for ghost in self._ghosts.forget():
            self._ended(ghost.number, max(self._now - ghost.used, 0), reused=False)

    def cleared(self) -> None:
        self._ghosts.clear()

    def _ended(self, number: int, idle: int, *, reused: bool) -> None:
        if self._reuse.ended(number, idle, reused=reused):
            self._lanes[number].changed = True


def _class_of(node: TreeNode) -> int:
    note = node.note
    if node.branched or (note is not None and note[1] > 1):
        return TURNS + min(int(UNKNOWN_GAP if note is None else note[0]) // 2, GAPS - 1)
    turn = node.turn
    return max(turn, 1) - 1 if turn < 5 else min(turn.bit_length() + 1, TURNS - 1)


def _after(note: tuple[float, int] | None, gap: int) -> tuple[float, int]:
    """The note of a node after another use."""
    bucket = bucket_of(gap)
    return (bucket, 1) if note is None else ((note[0] + bucket) / 2, note[1] + 1)
