"""Ghosts of evicted nodes. Without them the learned order would see only cached nodes, and would never learn that it
evicted one too early."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from ..node import TreeNode
from .habit import Habit, habit_of, head_of

MOST_GHOSTS = 16_384


class Ghost(NamedTuple):
    number: int
    """The number of its class, when it was evicted."""
    used: int
    """Tick of its last use."""
    tokens: int
    habit: Habit


class Ghosts:
    """The latest evicted nodes, as many as the device could hold; the oldest one is forgotten first."""

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
