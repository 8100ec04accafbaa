"""The TTL rules against slow twins that follow their definitions word by word."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from baton.scheduler.jobs.ttl import Durations, best_ttl, fixed_ttl, gittins_rate, gittins_ttl


def slow_rate(samples: list[float], age: float, ahead: float = 0.0) -> float:
    left = [x - age for x in samples if x > age]
    horizons = [tau for tau in left if tau > ahead] + ([ahead] if ahead else [])
    return max((sum(x <= tau for x in left) / sum(min(x, tau) for x in left) for tau in horizons if left), default=0.0)


def slow_gittins_ttl(samples: list[float], t_fill: float) -> float:
    """G only falls where a sample is passed."""
    return next(age for age in (0.0, *sorted(samples)) if slow_rate(samples, age) <= 1.0 / t_fill)


def slow_gain(samples: list[float], ttl: float, benefit: float, price: float) -> float:
    caught = sum(x <= ttl for x in samples) / len(samples)
    return caught * benefit - price * sum(min(x, ttl) for x in samples) / len(samples)


def sample_sets(seed: int, count: int) -> list[list[float]]:
    """Ties, zeros, a single sample, all equal, heavy tails and caps among them."""
    rng = np.random.default_rng(seed)
    found = [[0.0], [3.0], [5.0] * 7, [0.0, 0.0, 4.0]]
    for _ in range(count):
        size = int(rng.integers(1, 30))
        found += [
            rng.integers(0, 6, size).astype(float).tolist(),
            rng.uniform(0.0, 10.0, size).tolist(),
            (0.1 * (rng.pareto(0.8, size) + 1.0)).tolist(),
            np.minimum(np.exp(rng.normal(0.0, 2.0, size)), 8.0).tolist(),
        ]
    return found


@pytest.mark.parametrize("seed", range(3))
def test_gittins_ttl_is_the_first_crossing(seed: int) -> None:
    rng = np.random.default_rng(100 + seed)
    seen = set()
    for samples in sample_sets(seed, 40):
        t_fill = float(np.exp(rng.normal(1.0, 1.5)))
        expected = slow_gittins_ttl(samples, t_fill)
        assert gittins_ttl(Durations.of(np.array(samples)), t_fill) == pytest.approx(expected, abs=1e-12), samples
        seen.add("none" if expected == 0.0 else "all" if expected == max(samples) else "some")
    assert seen == {"none", "some", "all"}


def test_before_the_ttl_waiting_on_pays_at_every_age() -> None:
    for samples in sample_sets(5, 10):
        ttl = gittins_ttl(Durations.of(np.array(samples)), 3.0)
        for age in np.linspace(0.0, 0.99 * ttl, 50 if ttl else 0):
            assert slow_rate(samples, float(age)) > 1.0 / 3.0


@pytest.mark.parametrize("seed", range(3))
def test_best_ttl_has_the_largest_gain(seed: int) -> None:
    rng = np.random.default_rng(200 + seed)
    for samples in sample_sets(seed, 20):
        benefit, price = rng.uniform(0.1, 20.0), rng.uniform(0.1, 3.0)
        ttl = best_ttl(Durations.of(np.array(samples)), benefit, price)
        gains = {tau: slow_gain(samples, tau, benefit, price) for tau in (0.0, *samples)}
        assert slow_gain(samples, ttl, benefit, price) == pytest.approx(max(gains.values()), abs=1e-9)


def test_of_equal_gains_the_shortest_ttl_is_taken() -> None:
    durations = Durations.of(np.array([1.0, 3.0]))
    # Up to 1 s: 2 / 2 - 1. Up to 3 s: 2 - (1 + 3) / 2. Both are 0, as is not to wait at all.
    assert best_ttl(durations, 2.0) == 0.0
    assert best_ttl(durations, 2.0 + 1e-9) == 3.0


def test_a_cap_does_not_draw_the_lease_to_itself() -> None:
    durations = Durations.of(np.array([0.1] * 50 + [60.0] * 50))
    assert gittins_ttl(durations, 9.0) == 0.1
    assert gittins_rate(durations, 59.9) > 1.0 / 9.0  # it rises again, after the first crossing
    assert gittins_ttl(durations, 61.0) == 60.0


@pytest.mark.parametrize("ahead", [0.0, 0.5, 3.0])
def test_rate_at_any_age(ahead: float) -> None:
    rng = np.random.default_rng(7)
    for samples in sample_sets(8, 15):
        for age in (0.0, *rng.uniform(0.0, 12.0, 5), samples[0], max(samples) + 1.0):
            rate = gittins_rate(Durations.of(np.array(samples)), float(age), ahead)
            assert rate == pytest.approx(slow_rate(samples, float(age), ahead), rel=1e-6, abs=1e-9)


def test_rate_just_before_a_sample_is_finite() -> None:
    age = float(np.nextafter(5.0, 0.0))
    assert np.isfinite(gittins_rate(Durations.of(np.array([5.0, 1e9])), age))


def test_nothing_known() -> None:
    nothing = Durations.of(np.empty(0))
    assert best_ttl(nothing, 5.0) == gittins_ttl(nothing, 5.0) == 0.0 and len(nothing) == 0


def test_weights_count_as_repetitions() -> None:
    samples, weights = np.array([4.0, 1.0, 1.0, 9.0]), np.array([2.0, 1.0, 3.0, 1.0])
    weighted, repeated = Durations.of(samples, weights), Durations.of(np.repeat(samples, [2, 1, 3, 1]))
    for age, t_fill in itertools.product((0.0, 0.5, 1.0, 5.0), (0.5, 3.0, 9.0)):
        assert gittins_rate(weighted, age) == pytest.approx(gittins_rate(repeated, age))
        assert gittins_ttl(weighted, t_fill) == gittins_ttl(repeated, t_fill)


def test_chances_and_occupancy_by_hand() -> None:
    durations = Durations.of(np.array([4.0, 2.0, 2.0, 0.0]))
    assert durations.seconds.tolist() == [0.0, 2.0, 2.0, 4.0]
    assert durations.longer.tolist() == [0.75, 0.25, 0.25, 0.0]
    assert durations.occupied.tolist() == [0.0, 1.5, 1.5, 2.0]
    assert durations.at_age(3.0) == (0.25, 1.75) and durations.at_age(9.0) == (0.0, 2.0)
    assert Durations.of(np.array([2.0])).at_age(1.0) == (1.0, 1.0)


def test_fixed_rule() -> None:
    assert fixed_ttl(None) == fixed_ttl(2.0) == 2.0
    assert fixed_ttl(2.01) == 0.0 and fixed_ttl(2.01, threshold_s=3.0) == 3.0
