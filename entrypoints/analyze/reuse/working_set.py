"""How much was used in the last minutes, over the time of the log."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .tree import Mark, ReuseTree

MARKS = 128
"""In each window: it is longer than it says by at most one part in so many."""

POINTS = 256
"""Kept over the log; when there are more, every other one goes."""


@dataclass(frozen=True, slots=True)
class Point:
    """at: seconds since the log began, or requests where it has no times. units: used in each window before that, None
    for a window that is longer than the log so far. asked, found: units asked for so far, and those of them that an
    endless cache had."""

    at: float
    units: tuple[int | None, ...]
    asked: int
    found: int


@dataclass(slots=True)
class _Window:
    length: float
    marks: deque[tuple[float, Mark]] = field(default_factory=deque)


class WorkingSet:
    """Follows a tree. windows: their lengths, in seconds, or requests."""

    def __init__(self, tree: ReuseTree, windows: tuple[float, ...]) -> None:
        self.lengths = windows
        self.points: list[Point] = []
        self._tree = tree
        self._windows = [_Window(length) for length in windows]
        self._interval = min(windows) / 4
        self._next: float = self._interval

    def before_access(self, at: float) -> None:
        """Something is about to be used. at: never less than the last time."""
        for window in self._windows:
            marks = window.marks
            if not marks or at - marks[-1][0] >= window.length / MARKS:
                marks.append((at, self._tree.mark()))
            while len(marks) > 1 and marks[1][0] <= at - window.length:
                self._tree.forget_mark(marks.popleft()[1])

    def after_access(self, at: float, asked: int, found: int, *, last: bool = False) -> None:
        """It has been used. last: take a point in any case."""
        if at < self._next and not last:
            return
        units = tuple(
            self._tree.used_since(window.marks[0][1]) if window.marks[0][0] <= at - window.length else None
            for window in self._windows
        )
        self.points.append(Point(at, units, asked, found))
        if len(self.points) > POINTS:
            del self.points[::2]
            self._interval *= 2
        self._next = at + self._interval
