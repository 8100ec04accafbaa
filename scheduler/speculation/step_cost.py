"""What a decode step takes, by its number of tokens: measured while serving, in seconds.

On a GPU some more tokens cost next to nothing, on a CPU a small model may take half as long again for each. Nor is it a
straight line: kernels change with the number of rows. So there is a mean for each number of tokens, and lines between.
"""

from __future__ import annotations

import math

import numpy as np

GUESSED_SLOPE = 0.05
"""What one more token costs, by the cost of a step, where nothing of that size was measured yet: low, so that it will
be."""

FINE = 16
"""Up to so many tokens each number has its own mean; beyond, eight means for each doubling."""

WEIGHT = 0.1
"""Of a new measurement in the mean."""

MAX_SURPRISE = 2.0
"""A step that took longer than this times the mean counts as that: something else held it up."""

MEMORY = 2000
"""Measurements after which a mean that none of them touched is forgotten."""


class _Mean:
    __slots__ = ("count", "seconds", "tokens", "touched")

    def __init__(self) -> None:
        self.count, self.touched = 0, 0
        self.tokens = self.seconds = 0.0

    def note(self, tokens: int, seconds: float, touched: int) -> None:
        if self.count >= 3:
            seconds = min(seconds, MAX_SURPRISE * self.seconds)
        self.count, self.touched = self.count + 1, touched
        weight = max(WEIGHT, 1.0 / self.count)
        self.tokens += weight * (tokens - self.tokens)
        self.seconds += weight * (seconds - self.seconds)


class StepCost:
    """Owns the means."""

    def __init__(self) -> None:
        self._means: dict[int, _Mean] = {}
        self._noted = 0

    def note(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        if seconds <= 0.0:
            return
        self._noted += 1
        self._means.setdefault(_place(tokens), _Mean()).note(tokens, seconds, self._noted)
        if not self._noted % MEMORY:
            self._means = {p: mean for p, mean in self._means.items() if self._noted - mean.touched < MEMORY}

    def estimate(self, tokens: np.ndarray) -> np.ndarray:
        """float [n], for int [n] tokens: what a step costs. In no unit until something was measured."""
        means = [self._means[place] for place in sorted(self._means)]
        if not means:
            return 1.0 + GUESSED_SLOPE * (tokens - 1)
        sizes = np.array([mean.tokens for mean in means])
        # More tokens never take less time: where they seem to, a measurement is old or was held up.
        costs = np.minimum.accumulate(np.array([mean.seconds for mean in means])[::-1])[::-1]
        beyond = np.maximum(0.0, tokens - sizes[-1]) - np.maximum(0.0, sizes[0] - tokens)
        slope = GUESSED_SLOPE * costs[0] / (1.0 + GUESSED_SLOPE * (sizes[0] - 1.0))
        return np.interp(tokens, sizes, costs) + slope * beyond


def _place(tokens: int) -> int:
    return tokens if tokens <= FINE else FINE + int(8 * math.log2(tokens / FINE))
