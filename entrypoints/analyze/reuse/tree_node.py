"""A node of the log's tree, and the marks of recurrent states on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Node:
    """A run of units that were last used together. name: its key among its parent's children. last_use: a time of the
    tree, -1 for the root. uses: accesses that passed. ended: the owner's note of a request that ended here. states: the
    owner's marks of recurrent states at its end and below."""

    __slots__ = ("children", "ended", "key", "last_use", "name", "parent", "start", "states", "uses")

    def __init__(self, parent: Node | None, name: Any, key: bytes, start: int, last_use: int, uses: int) -> None:
        self.parent = parent
        self.name = name
        self.key = key
        self.start = start
        """Units above it."""
        self.last_use = last_use
        self.uses = uses
        self.children: dict[Any, Node] | None = None
        self.ended: Any = None
        self.states: StateMarks | None = None


class StateMarks:
    """The marks of one node. A mark is a set of sizes of a pool: bit i of an integer stands for the i-th, so that one
    walk along a path answers for all of them.

    carried: the sizes at which the state of the node's last unit is in the pool. turn, branch: of these, where it is
    the newest turn end of a conversation, and where several continue; the rest need not be kept. below, many: the sizes
    at which at least one child, or several, have states at or below them. was_turn: with a state for every place, the
    node's is a turn end that a newer turn has followed.
    """

    __slots__ = ("_counts", "below", "branch", "carried", "many", "turn", "was_turn")

    def __init__(self, below: int = 0) -> None:
        self.carried = self.turn = self.branch = self.many = 0
        self.below = below
        self.was_turn = False
        self._counts: dict[int, int] = {}
        """Bit -> children, for the sizes in ``many``."""

    @property
    def any(self) -> int:
        """The sizes at which there are states at or below the node."""
        return self.carried | self.below

    def count_child(self, sizes: int, change: int) -> None:
        """At these sizes a child has got its first state at or below it (1), or lost the last (-1)."""
        counts = self._counts
        for bit in bits(sizes):
            one = 1 << bit
            if change > 0 and not self.below & one:
                self.below |= one
            elif change > 0:
                self.many |= one
                counts[bit] = counts.get(bit, 1) + 1
            elif not self.many & one:
                self.below &= ~one
            elif counts[bit] > 2:
                counts[bit] -= 1
            else:
                self.many &= ~one
                del counts[bit]


def bits(sizes: int) -> Iterator[int]:
    """The numbers of the sizes in a set."""
    while sizes:
        lowest = sizes & -sizes
        yield lowest.bit_length() - 1
        sizes ^= lowest
