"""Chooses how many tokens to draft, from the recent accept rates and the measured cost of a step.

A draft of k tokens, each right with probability p if those before it were, brings p + p² + … + p^k tokens more than the
step would have brought anyway, and makes it k tokens larger. The lengths of a step's drafts are chosen together, for
the most tokens per second: each draft is as long as its next token is right with at least some probability, the same
for all, and that probability is the best of a few.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

KEPT = 0.8
"""Decay of one sequence's observations at each of its verifications; KEPT_OF_ALL is that of all sequences."""

KEPT_OF_ALL = 0.98

WEIGHT_OF_ALL, WEIGHT_OF_GUESS = 2.0, 4.0
"""Weights in tokens: of the rate over all sequences as the prior of one, and of the guess as the prior of all."""

LEAST = np.array([2.0, 0.9, 0.75, 0.6, 0.45, 0.3, 0.2, 0.1, 0.05])[:, None]
"""The least probabilities to try; 2 means no drafts."""

MAX_RATE = 0.98

LEAST_GAIN = 1.15
"""Drafts with a smaller expected gain are not worth the look-up and the uncertainty of the estimate."""

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


class AcceptRate:
    """Rate at which drafted tokens were right, given that all before them were. Old verifications fade."""

    __slots__ = ("_accepted", "_kept", "_tried")

    def __init__(self, kept: float) -> None:
        """kept: factor on older observations at each new one."""
        self._kept = kept
        self._accepted = self._tried = 0.0

    def record_draft(self, accepted: int, drafted: int) -> None:
        """Record a draft: its first ``accepted`` tokens were right; the next one, if there was one, was wrong."""
        tried = accepted + (accepted < drafted)
        self._accepted = self._kept * self._accepted + accepted
        self._tried = self._kept * self._tried + tried

    def estimate(self, prior: float, weight: float) -> float:
        """The rate, with a ``prior`` that counts for ``weight`` tokens."""
        return (self._accepted + weight * prior) / (self._tried + weight)


def best_lengths(rates: Sequence[float], longest: Sequence[int], rows: int, room: int, cost: StepCost) -> list[int]:
    """Choose the draft lengths for some of the ``rows`` of a step, one token each, for the most tokens per second.

    rates: how likely a drafted token is right. longest: length of each draft found. room: most tokens in all.
    """
    rate = np.minimum(np.array(rates), MAX_RATE)
    lengths = np.clip(np.floor(np.log(LEAST) / np.log(rate)), 0, np.array(longest))
    gained = (rate * (1.0 - rate**lengths) / (1.0 - rate)).sum(axis=1)
    added = lengths.sum(axis=1)
    speed = (rows + gained) / cost.estimate(rows + added)
    speed[added > room] = 0.0
    speed[0] *= LEAST_GAIN  # there are none at all
    return lengths[int(speed.argmax())].astype(int).tolist()


class StepCost:
    """Owns the means, one for each place of `_place`."""

    def __init__(self) -> None:
        self._counts = np.zeros(_place(MAX_TOKENS) + 1, dtype=np.int64)
        self._touched = self._counts.copy()
        self._tokens = np.zeros(len(self._counts))
        self._seconds = self._tokens.copy()
        self._noted = 0

    def record_step(self, tokens: int, seconds: float) -> None:
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
