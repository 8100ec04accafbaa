"""Log-normal belief about a tool's duration while little is known of it; both parameters are unknown.

Normal-inverse-gamma, the conjugate prior of a normal distribution with unknown mean and variance, on the logarithm of
the duration. Its predictive distribution is a Student t (Murphy 2007, "Conjugate Bayesian analysis of the Gaussian
distribution").
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

LEAST_S = 1e-3
"""Shorter durations count as this: 0 has no logarithm, and such differences do not matter."""

MOST_LOG = 50.0
"""Upper bound of a duration's logarithm: keeps the far tail finite where there is little data."""


@dataclass(frozen=True, slots=True)
class LogNormalBelief:
    """mean, weight: the expected mean of the log durations, and the number of durations which that belief is worth.
    shape, scale: inverse-gamma parameters of their variance. The default knows next to nothing: a second, give or take
    a factor of ten."""

    mean: float = 0.0
    weight: float = 1.0
    shape: float = 2.0
    scale: float = 5.0

    def after(self, durations: np.ndarray) -> LogNormalBelief:
        """The belief updated with these durations in seconds, float64 [n]."""
        count = len(durations)
        if not count:
            return self
        logs = np.log(np.maximum(durations, LEAST_S))
        seen, spread = float(logs.mean()), float(((logs - logs.mean()) ** 2).sum())
        weight = self.weight + count
        between = self.weight * count * (seen - self.mean) ** 2 / (2 * weight)
        return LogNormalBelief(
            (self.weight * self.mean + count * seen) / weight,
            weight,
            self.shape + count / 2,
            self.scale + spread / 2 + between,
        )

    def as_prior(self, worth: float) -> LogNormalBelief:
        """The same belief, but worth at most ``worth`` durations: turns the belief about all tools into a prior for
        one."""
        shape = min(self.shape, 2.0 + worth / 2)
        return LogNormalBelief(
            self.mean, min(self.weight, worth), shape, self.scale * max(shape - 1, 1) / max(self.shape - 1, 1)
        )

    def quantile(self, share: float) -> float:
        """Seconds within which ``share`` of the tool's calls is expected to return."""
        return float(self.quantiles(np.array([NormalDist().inv_cdf(share)]))[0])

    def quantiles(self, normal: np.ndarray) -> np.ndarray:
        """As `quantile` for several shares, given as quantiles of the normal distribution, float64 [n]: computing those
        takes longest, and the caller can keep them."""
        spread = math.sqrt(self.scale * (self.weight + 1) / (self.shape * self.weight))
        return np.exp(np.minimum(self.mean + spread * _student_t(normal, 2 * self.shape), MOST_LOG))

    def draw(self, rng: np.random.Generator) -> float:
        """A duration in seconds, under parameters drawn from the belief (Thompson 1933)."""
        variance = self.scale / rng.gamma(self.shape)
        mean = rng.normal(self.mean, math.sqrt(variance / self.weight))
        return _exp(rng.normal(mean, math.sqrt(variance)))


def student_t_quantile(share: float, freedom: float) -> float:
    """Quantile of Student's t distribution with ``freedom`` degrees of freedom, at least 3. The relative error is at
    most 1 % up to a share of 0.99 with 4 degrees (Abramowitz and Stegun, 26.7.5)."""
    return float(_student_t(np.array([NormalDist().inv_cdf(share)]), freedom)[0])


def _student_t(z: np.ndarray, freedom: float) -> np.ndarray:
    """z: quantiles of the normal distribution, float64 [n]. Returns the quantiles of Student's t at the same shares."""
    z2 = z * z
    terms = (
        (z2 + 1) * z / 4,
        ((5 * z2 + 16) * z2 + 3) * z / 96,
        (((3 * z2 + 19) * z2 + 17) * z2 - 15) * z / 384,
        ((((79 * z2 + 776) * z2 + 1482) * z2 - 1920) * z2 - 945) * z / 92160,
    )
    return z + sum((term / freedom**power for power, term in enumerate(terms, 1)), np.zeros_like(z))


def _exp(log: float) -> float:
    return math.exp(min(log, MOST_LOG))
