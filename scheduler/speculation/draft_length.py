"""Chooses how many tokens to draft, from the recent accept rates and the cost of a step.

A draft of k tokens, each right with probability p if those before it were, brings p + p² + … + p^k tokens more than the
step would have brought anyway, and makes it k tokens larger. The lengths of a step's drafts are chosen together, for
the most tokens per second: each draft is as long as its next token is right with at least some probability, the same
for all, and that probability is the best of a few.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .step_cost import StepCost

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


class AcceptRate:
    """Rate at which drafted tokens were right, given that all before them were. Old verifications fade."""

    __slots__ = ("_accepted", "_kept", "_tried")

    def __init__(self, kept: float) -> None:
        """kept: factor on older observations at each new one."""
        self._kept = kept
        self._accepted = self._tried = 0.0

    def note(self, accepted: int, drafted: int) -> None:
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
