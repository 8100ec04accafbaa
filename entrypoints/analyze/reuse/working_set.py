"""The working set: units used within a window, over the time of the log."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from .reuse_tree import Mark, ReuseTree

MARKS = 128
"""Marks in each window: its real length exceeds the nominal one by at most 1/MARKS."""

POINTS = 256
"""Limit of points; at more, every other one is dropped."""


@dataclass(frozen=True, slots=True)
class Point:
    """at: seconds since the log began, or requests in a log without times. units: units used in each window up to then,
    None for a window that is longer than the log so far. asked, found: prompt tokens so far, and the ones among them
    that an infinite cache has."""

    at: float
    units: tuple[int | None, ...]
    asked: int
    found: int


@dataclass(slots=True)
class _Window:
    length: float
    marks: deque[tuple[float, Mark]] = field(default_factory=deque)


class WorkingSet:
    """Follows a tree. windows: their lengths, in seconds or requests."""

    def __init__(self, tree: ReuseTree, windows: tuple[float, ...]) -> None:
        self.lengths = windows
        self.points: list[Point] = []
        self._tree = tree
        self._windows = [_Window(length) for length in windows]
        self._interval = min(windows) / 4
        self._next: float = self._interval

    def before_access(self, at: float) -> None:
        """Call it before each access. at: not less than the last time."""
        for window in self._windows:
            marks = window.marks
            if not marks or at - marks[-1][0] >= window.length / MARKS:
                marks.append((at, self._tree.mark()))
            while len(marks) > 1 and marks[1][0] <= at - window.length:
                self._tree.forget_mark(marks.popleft()[1])

    def after_access(self, at: float, asked: int, found: int, *, last: bool = False) -> None:
        """Call it after each access. last: take a point in any case."""
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
