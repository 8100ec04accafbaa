"""What is believed of a tool's time before much is known of it: log-normal, its two parameters unknown.

Normal-inverse-gamma, the conjugate prior of a normal distribution with unknown mean and variance, on the logarithm of
the time; what it predicts is a Student t distribution (Murphy 2007, "Conjugate Bayesian analysis of the Gaussian
distribution").
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

LEAST_S = 1e-3
"""Shorter times count as this: they have no logarithm, and nobody can tell them apart."""

MOST_LOG = 50.0
"""Of a duration: what little data says about the far end stays finite."""


@dataclass(frozen=True, slots=True)
class LogNormalBelief:
    """mean and weight: of the logarithm's mean, and how many durations that belief is worth. shape, scale: of its
    variance, inverse gamma. The default knows next to nothing: a second, give or take a factor of ten."""

    mean: float = 0.0
    weight: float = 1.0
    shape: float = 2.0
    scale: float = 5.0

    def after(self, durations: np.ndarray) -> LogNormalBelief:
        """What is believed after these durations in seconds, float64 [n]."""
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
        """The same, but worth no more than so many durations: what is known of all tools, for one of them."""
        shape = min(self.shape, 2.0 + worth / 2)
        return LogNormalBelief(
            self.mean, min(self.weight, worth), shape, self.scale * max(shape - 1, 1) / max(self.shape - 1, 1)
        )

    def quantile(self, share: float) -> float:
        """Seconds within which that share of the tool's calls is expected to be back."""
        return float(self.quantiles(np.array([NormalDist().inv_cdf(share)]))[0])

    def quantiles(self, normal: np.ndarray) -> np.ndarray:
        """As `quantile`, of several shares, which are given as quantiles of the normal distribution, float64 [n]: these
        can be kept, and take longer than all else."""
        spread = math.sqrt(self.scale * (self.weight + 1) / (self.shape * self.weight))
        return np.exp(np.minimum(self.mean + spread * _student_t(normal, 2 * self.shape), MOST_LOG))

    def draw(self, rng: np.random.Generator) -> float:
        """A duration in seconds, of a world drawn from what is believed (Thompson 1933)."""
        variance = self.scale / rng.gamma(self.shape)
        mean = rng.normal(self.mean, math.sqrt(variance / self.weight))
        return _exp(rng.normal(mean, math.sqrt(variance)))


def student_t_quantile(share: float, freedom: float) -> float:
    """Of Student's t distribution with ``freedom`` degrees of freedom, at least 3; to 1 % of itself up to a share of
    0.99 with 4 degrees (Abramowitz and Stegun, 26.7.5)."""
    return float(_student_t(np.array([NormalDist().inv_cdf(share)]), freedom)[0])


def _student_t(z: np.ndarray, freedom: float) -> np.ndarray:
    """z: quantiles of the normal distribution, float64 [n]. Returns those of Student's t of the same shares."""
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
