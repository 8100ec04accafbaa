"""What a few durations say about the next one: a normal-inverse-gamma model of their logarithms.

The log of a duration is normal with an unknown mean and variance; what is known about these two is a
normal-inverse-gamma distribution, which more samples keep in its form. The next duration's log then follows a Student t
distribution: wide after two samples, close to the fitted normal after many.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

SHORTEST_S = 1e-3
"""Shorter durations count as this one: the log of 0 is none, and a millisecond more or less decides nothing."""

LARGEST_LOG = 40.0
"""Of a duration in seconds, 7 billion years: keeps far quantiles of little data finite."""

START_MEDIAN_S, START_VARIANCE, START_WEIGHT = 1.0, math.log(4.0) ** 2, 4.0
"""What is assumed before any tool was seen: a median of a second, give or take a factor of four. It counts as so many
observations."""

T_POINTS = 1 << 11


def logs_of(seconds: np.ndarray) -> np.ndarray:
    return np.log(np.maximum(seconds, SHORTEST_S))


@dataclass(frozen=True)
class LogNormal:
    """A normal-inverse-gamma distribution: variance ~ InvGamma(shape, rate), mean ~ N(mean, variance / weight)."""

    mean: float
    weight: float
    shape: float
    rate: float

    @staticmethod
    def prior(seconds: np.ndarray) -> LogNormal:
        """What to expect of a tool, from the durations of all tools, float64 [n]. Half of their variance is taken for
        the tools' own and half for what sets tools apart. So the prior is worth one observation, and for a tool never
        seen it predicts the mean and the variance of all."""
        start, logs = math.log(START_MEDIAN_S), logs_of(seconds)
        count = len(logs) + START_WEIGHT
        mean = (start * START_WEIGHT + float(logs.sum())) / count
        spread = START_WEIGHT * (START_VARIANCE + (start - mean) ** 2) + float(((logs - mean) ** 2).sum())
        return LogNormal(mean, 1.0, 2.0, spread / count / 2.0)

    def after(self, seconds: np.ndarray) -> LogNormal:
        """The posterior, given these durations, float64 [n]."""
        count = len(seconds)
        if not count:
            return self
        logs = logs_of(seconds)
        average = float(logs.mean())
        weight = self.weight + count
        moved = self.weight * count * (average - self.mean) ** 2 / weight
        rate = self.rate + (float(((logs - average) ** 2).sum()) + moved) / 2.0
        return LogNormal((self.weight * self.mean + count * average) / weight, weight, self.shape + count / 2.0, rate)

    def quantiles(self, probabilities: np.ndarray) -> np.ndarray:
        """Durations that the next one does not exceed with these probabilities, seconds, float64 of the same shape."""
        scale = math.sqrt(self.rate * (self.weight + 1.0) / (self.shape * self.weight))
        logs = self.mean + scale * student_t_quantiles(probabilities, 2.0 * self.shape)
        return np.exp(np.clip(logs, -LARGEST_LOG, LARGEST_LOG))

    def quantile(self, probability: float) -> float:
        return float(self.quantiles(np.array([probability]))[0])

    def draw_median(self, rng: np.random.Generator) -> float:
        """Thompson sampling: the median duration of a tool drawn from what is known about it, in seconds."""
        variance = self.rate / rng.standard_gamma(self.shape)
        log = rng.normal(self.mean, math.sqrt(variance / self.weight))
        return math.exp(min(max(log, -LARGEST_LOG), LARGEST_LOG))


def student_t_quantiles(probabilities: np.ndarray, freedom: float) -> np.ndarray:
    """Of Student's t distribution. probabilities: float64, inside (0, 1). freedom: at least 1. Good to four digits for
    probabilities from 0.0005 to 0.9995."""
    mass, angles = _t_table(freedom)
    return math.sqrt(freedom) * np.tan(np.interp(probabilities, mass, angles))


@lru_cache(maxsize=64)
def _t_table(freedom: float) -> tuple[np.ndarray, np.ndarray]:
    """The distribution function, and the angles at which it was taken. With t = sqrt(freedom) · tan(angle) the density
    of the angle is cos(angle) ^ (freedom - 1), which is bounded and ends at ±π/2. The angles stop at 12 standard
    deviations, so that the points lie where the mass is."""
    end = min(math.pi / 2.0, 12.0 / math.sqrt(freedom))
    angles = np.linspace(-end, end, T_POINTS + 1)
    density = np.cos(angles) ** (freedom - 1.0)
    density[[0, -1]] = 0.0 if freedom > 1.0 else 1.0
    mass = np.concatenate(([0.0], np.cumsum(density[1:] + density[:-1])))
    return mass / mass[-1], angles
