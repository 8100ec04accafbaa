"""An order of eviction that learns from the cache's events how soon each kind of KV is used again.

A session's tail, which it shares with no other session, is classed by its turn: the number of requests so far is the
best predictor of another one. A shared prefix is classed by how often it is used: the mean of its own last gaps. Each
class has a lane, in which the longest idle leaf comes first; of these leaves the one with the lowest value is evicted
(reuse.py). So an unused document is evicted before a system prompt that all sessions use, however recent it is; lru
cannot tell them apart, and orders that count uses do not know that a live session's tail is always new.

The idea of ranking by hit density is that of LHD (Beckmann, Chen, Cidon, 2018); the index is Gittins'.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ..node import ID_BYTES, TreeNode
from ..watchers import CacheWatcher
from .order import Lane
from .ranks import lru
from .reuse import Reuse, bucket_of

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

    def path_used(self, node: TreeNode, tick: int) -> None:
        self._now = tick
        if node.parent is not None:
            gap = tick - node.used
            self._end_spell(_class_of(node), gap, reused=True)
            node.note = used_again(habit_of(node), gap)

    def node_stored(self, node: TreeNode) -> None:
        parent = node.parent
        assert parent is not None
        got_child(parent, node)
        if (ghost := self._ghosts.take_ghost(node)) is not None:
            gap = max(self._now - ghost.used, 0)
            self._end_spell(ghost.number, gap, reused=True)
            node.note = used_again(ghost.habit, gap)

    def nodes_removed(self, nodes: Sequence[TreeNode]) -> None:
        for node in nodes:
            parent = node.parent
            assert parent is not None
            if parent.parent is not None and not parent.branched:
                lost_child(parent, node)  # its spell continues as the parent's
            elif node.last_access and node.host is None:
                self._ghosts.add_ghost(node, _class_of(node))
        for ghost in self._ghosts.forget_oldest():
            self._end_spell(ghost.number, max(self._now - ghost.used, 0), reused=False)

    def cache_cleared(self) -> None:
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


# -- what is known of a node -------------------------------------------------------------------------------------------

HEAD_TOKENS = 16
"""A node is recognised by its parent and by this many first tokens, more than most texts share by chance."""


class Habit(NamedTuple):
    """The order's record of a node: how often it is used, and whether several sessions share it.

    Never changed, only replaced: when a node is split, both parts have it.
    """

    gap: float | None = None
    """The mean of its last gaps, in buckets of idle time (reuse.py), the last one counting half; None before the first
    reuse."""
    shared: bool = False
    """Several sessions continued from it, though never two at the same time: the tree itself would show that."""
    child: bytes | None = None
    """The head of the child that it had last."""


UNKNOWN = Habit()


def habit_of(node: TreeNode) -> Habit:
    note = node.note
    return note if isinstance(note, Habit) else UNKNOWN


def head_of(node: TreeNode) -> bytes:
    return node.key[: HEAD_TOKENS * ID_BYTES]


def used_again(habit: Habit, gap: int) -> Habit:
    """After a reuse, ``gap`` ticks after the one before."""
    bucket = bucket_of(gap)
    return Habit(bucket if habit.gap is None else (habit.gap + bucket) / 2, habit.shared, habit.child)


def lost_child(parent: TreeNode, child: TreeNode) -> None:
    """Note that a node has lost its only child."""
    gap, shared, _ = habit_of(parent)
    parent.note = Habit(gap, shared, head_of(child))


def got_child(parent: TreeNode, child: TreeNode) -> None:
    """Note a new only child. If it differs from the last one, several sessions share the parent. If it is the same, or
    a beginning of it (nodes are evicted from their ends), one session has come back."""
    gap, shared, last = habit_of(parent)
    if not shared and last is not None:
        head = head_of(child)
        if not (head.startswith(last) or last.startswith(head)):
            parent.note = Habit(gap, True, last)


# -- evicted nodes -----------------------------------------------------------------------------------------------------

MOST_GHOSTS = 16_384


class Ghost(NamedTuple):
    number: int
    """The number of its class, when it was evicted."""
    used: int
    """Tick of its last use."""
    tokens: int
    habit: Habit


class Ghosts:
    """The latest evicted nodes, as many as the device could hold; the oldest one is forgotten first.

    Without them the order would see only cached nodes, and would never learn that it evicted one too early.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._by_place: OrderedDict[tuple[int, bytes], Ghost] = OrderedDict()
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._by_place)

    def add_ghost(self, node: TreeNode, number: int) -> None:
        place, tokens = _place(node), len(node)
        before = self._by_place.pop(place, None)
        self._by_place[place] = Ghost(number, node.used, tokens, habit_of(node))
        self.tokens += tokens if before is None else tokens - before.tokens

    def take_ghost(self, node: TreeNode) -> Ghost | None:
        """Remove and return the ghost of a node that is back in the cache; None if there is none."""
        ghost = self._by_place.pop(_place(node), None)
        if ghost is not None:
            self.tokens -= ghost.tokens
        return ghost

    def forget_oldest(self) -> Iterator[Ghost]:
        """Remove and yield the oldest ghosts beyond the bounds."""
        while self.tokens > self._most_tokens or len(self._by_place) > MOST_GHOSTS:
            _, ghost = self._by_place.popitem(last=False)
            self.tokens -= ghost.tokens
            yield ghost

    def clear(self) -> None:
        self._by_place.clear()
        self.tokens = 0


def _place(node: TreeNode) -> tuple[int, bytes]:
    assert node.parent is not None
    return node.parent.serial, head_of(node)
