"""How long to keep the KV of a job while its tool runs: rules over a distribution of durations T.

Keeping it for τ seconds costs memory for E[min(T, τ)] seconds, since a lease ends with the return, and pays off if
T ≤ τ. With a benefit worth B seconds of occupancy the best τ maximises P(T ≤ τ) · B - E[min(T, τ)].

DESIGN §5 states the same as a rate. G(age) = max over τ of P(T - age ≤ τ | T > age) ÷ E[min(T - age, τ) | T > age] is
the most that waiting on can earn per second, and a lease ends at the first age at which G falls to 1 / B. The two
agree: G(age) > 1 / B says that some longer τ has a larger gain than τ = age. So from any age before the best τ it pays
to go on, at the best τ it does not any more, and the first crossing is the smallest maximiser, found in one pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

FIXED_S = 2.0
"""The threshold of the fixed rule, and how long to wait for a tool of which nothing is known."""

SHORTEST_S = 1e-9
"""Occupancy that counts as none: keeps a rate finite."""


@dataclass(frozen=True, eq=False)
class Durations:
    """A discrete distribution of durations, ready for the rules below."""

    seconds: np.ndarray
    """float64 [n], ascending; ties are fine."""
    longer: np.ndarray
    """float64 [n]: P(T > seconds)."""
    occupied: np.ndarray
    """float64 [n]: E[min(T, seconds)]."""

    @staticmethod
    def of(seconds: np.ndarray, weights: np.ndarray | None = None) -> Durations:
        """seconds: float64 [n], in any order, finite and not negative. weights: float64 [n], positive; None: all the
        same. n may be 0: then nothing ever returns."""
        if weights is None:
            weights = np.ones(len(seconds))
        order = np.argsort(seconds, kind="stable")
        seconds, weights = seconds[order], weights[order]
        total = weights.sum()
        after = total - np.cumsum(weights)  # the weight of what comes later in the list
        if len(after):
            after[-1] = 0.0
        alive = np.concatenate(([total], after[:-1]))  # while the age goes from the sample before to this one
        occupied = np.cumsum(alive * np.diff(seconds, prepend=0.0))
        # Of equal samples all but the last have some of their equals after them: those do not last longer.
        last = np.searchsorted(seconds, seconds, side="right") - 1
        return Durations(seconds, after[last] / max(total, SHORTEST_S), occupied / max(total, SHORTEST_S))

    def __len__(self) -> int:
        return len(self.seconds)

    def quantile(self, q: float) -> float:
        """The smallest duration that is not exceeded with probability q. There must be one."""
        return float(self.seconds[min(np.count_nonzero(1.0 - self.longer < q), len(self) - 1)])

    def at_age(self, age: float) -> tuple[float, float]:
        """(P(T > age), E[min(T, age)])"""
        index = int(np.searchsorted(self.seconds, age, side="right"))
        if index == 0:
            return 1.0, age
        longer = float(self.longer[index - 1])
        return longer, float(self.occupied[index - 1] + (age - self.seconds[index - 1]) * longer)


def fixed_ttl(mean_s: float | None, threshold_s: float = FIXED_S) -> float:
    """The rule of Continuum's public implementation: the threshold for tools that take no longer than it on average,
    and for those never seen (None); nothing for the others."""
    return threshold_s if mean_s is None or mean_s <= threshold_s else 0.0


def best_ttl(durations: Durations, benefit_s: float, price: float = 1.0) -> float:
    """The τ among 0 and the samples that maximises P(T ≤ τ) · benefit_s - price · E[min(T, τ)], the smallest of
    several. benefit_s: seconds that a return in time saves. price: what a second of occupancy costs."""
    gains = (1.0 - durations.longer) * benefit_s - price * durations.occupied
    if not len(gains):
        return 0.0
    best = int(np.argmax(gains))
    return float(durations.seconds[best]) if gains[best] > 0.0 else 0.0


def gittins_ttl(durations: Durations, t_fill: float) -> float:
    """The first age at which G falls to 1 / t_fill, in seconds. Durations that end in a cap (a tool's time-out) let G
    rise again towards it; the first crossing counts, as G already looks ahead to the cap."""
    return best_ttl(durations, t_fill)


def gittins_rate(durations: Durations, age: float, ahead_s: float = 0.0) -> float:
    """G at this age, per second; 0 beyond the largest sample. ahead_s: looks ahead at least so far, since with samples
    the rate over shorter and shorter times grows without bound just before each of them."""
    longer, occupied = durations.at_age(age)
    if longer <= 0.0:
        return 0.0
    first = int(np.searchsorted(durations.seconds, age + ahead_s, side="right"))
    left, used = durations.longer[first:], durations.occupied[first:]
    if ahead_s > 0.0:
        nearest = durations.at_age(age + ahead_s)
        left, used = np.append(left, nearest[0]), np.append(used, nearest[1])
    return float(np.max((longer - left) / np.maximum(used - occupied, SHORTEST_S)))
