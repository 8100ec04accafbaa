"""Duration of a decode step in seconds, by its number of tokens, measured while serving.

On a GPU some more tokens cost next to nothing, on a CPU a small model may take half as long again for each. Nor is it a
straight line: kernels change with the number of rows. So there is a mean for each number of tokens, and lines between.
"""

from __future__ import annotations

import math

import numpy as np

GUESSED_SLOPE = 0.05
"""Assumed cost of one more token, as a share of a step, for sizes that were not measured yet: low, so that they get
tried."""

FINE = 16
"""Up to this many tokens, each size has its own mean; beyond, there are eight means for each doubling."""

WEIGHT = 0.1
"""Weight of a new measurement in the mean."""

MAX_SURPRISE = 2.0
"""A step longer than this multiple of the mean counts as that multiple: something else held it up."""

MEMORY = 2000
"""Measurements after which a mean that none of them touched is forgotten."""

MAX_TOKENS = 4096
"""Larger steps are not measured."""


class StepCost:
    """Owns the means, one for each place of `_place`."""

    def __init__(self) -> None:
        self._counts = np.zeros(_place(MAX_TOKENS) + 1, dtype=np.int64)
        self._touched = self._counts.copy()
        self._tokens = np.zeros(len(self._counts))
        self._seconds = self._tokens.copy()
        self._noted = 0

    def note(self, tokens: int, seconds: float) -> None:
        """Record that a step of ``tokens`` tokens took ``seconds``."""
        if seconds <= 0.0 or not 0 < tokens <= MAX_TOKENS:
            return
        place = _place(tokens)
        self._noted += 1
        self._counts[place] += 1
        self._touched[place] = self._noted
        if self._counts[place] > 3:
            seconds = min(seconds, MAX_SURPRISE * float(self._seconds[place]))
        weight = max(WEIGHT, 1.0 / float(self._counts[place]))
        self._tokens[place] += weight * (tokens - self._tokens[place])
        self._seconds[place] += weight * (seconds - self._seconds[place])
        if not self._noted % MEMORY:
            self._counts[self._touched <= self._noted - MEMORY] = 0

    def estimate(self, tokens: np.ndarray) -> np.ndarray:
        """Cost of a step, float [n], for int [n] tokens: seconds, or relative until there is a measurement."""
        known = np.flatnonzero(self._counts)
        if not len(known):
            return 1.0 + GUESSED_SLOPE * (tokens - 1)
        sizes, costs = self._tokens[known], self._seconds[known]
        # More tokens never take less time: where they seem to, a measurement is old or was held up.
        costs = np.minimum.accumulate(costs[::-1])[::-1]
        beyond = np.maximum(0.0, tokens - sizes[-1]) - np.maximum(0.0, sizes[0] - tokens)
        slope = GUESSED_SLOPE * costs[0] / (1.0 + GUESSED_SLOPE * (sizes[0] - 1.0))
        return np.interp(tokens, sizes, costs) + slope * beyond


def _place(tokens: int) -> int:
    return tokens if tokens <= FINE else FINE + int(8 * math.log2(tokens / FINE))
