from __future__ import annotations

import random
from itertools import pairwise

import pytest

from baton.radix.eviction.reuse import BUCKETS, FIRSTS, MOST_SPELLS, WIDTHS, Reuse, Spells, bucket_of, values


def test_buckets_hold_all_idle_times_in_order() -> None:
    for idle in range(5_000):
        bucket = bucket_of(idle)
        assert FIRSTS[bucket] <= idle < FIRSTS[bucket] + WIDTHS[bucket]
    assert bucket_of(1 << 60) == BUCKETS - 1


@pytest.mark.parametrize("seed", range(5))
def test_value_maximizes_reuse_per_waiting_time(seed: int) -> None:
    rng = random.Random(seed)
    chances = [rng.random() ** 3 for _ in range(BUCKETS)]
    found = values(chances)
    for begin in range(BUCKETS):
        alive, reused, stay, best = 1.0, 0.0, 0.0, 0.0
        for bucket in range(begin, BUCKETS):
            reused += alive * chances[bucket]
            stay += alive * WIDTHS[bucket] * (1 - chances[bucket] / 2)
            alive *= 1 - chances[bucket]
            best = max(best, reused / stay)
        assert found[begin] == pytest.approx(best)


def test_evicted_spell_counts_only_up_to_its_idle_time() -> None:
    """Three spells: used again after 4, given up after 16, used again after 64 ticks."""
    spells = Spells()
    for idle, reused in ((4, True), (16, False), (64, True)):
        spells.count_spell(bucket_of(idle), reused)
    chances = spells.chances([0.0] * BUCKETS, 1e-9)
    assert chances[bucket_of(4)] == pytest.approx(1 / 3)
    assert chances[bucket_of(16)] == 0
    assert chances[bucket_of(64)] == pytest.approx(1.0)


def test_spell_counts_are_halved_over_time() -> None:
    spells = Spells()
    for _ in range(MOST_SPELLS):
        spells.count_spell(3, False)
    for _ in range(MOST_SPELLS):
        spells.count_spell(3, True)
    assert spells.total <= MOST_SPELLS and sum(spells.ends) == pytest.approx(spells.total)
    assert spells.chances([0.0] * BUCKETS, 1e-9)[3] > 0.6, "the newer half counts more"


def reuse() -> Reuse:
    return Reuse([0, 0, 1], [4.0, 4.0])


def test_longest_idle_is_worth_least_before_learning() -> None:
    unknown = [reuse().value(0, idle) for idle in range(1, 3_000)]
    assert all(later <= sooner for sooner, later in pairwise(unknown))
    assert reuse().value(0, 1 << 50) == reuse().value(1, 1 << 60) > 0


def test_reused_class_gains_value_and_lifts_its_kind_a_little() -> None:
    learned = reuse()
    before = learned.value(0, 100)
    changed = [learned.end_spell(0, 120, reused=True) for _ in range(100)]
    assert 5 < sum(changed) < 40, "it is valued anew once there is news enough"
    for _ in range(8):
        learned.end_spell(1, 1, reused=True)  # says nothing of who lies idle for 100 ticks
    assert learned.value(0, 100) > learned.value(1, 100) > before == learned.value(2, 100)


def test_class_without_reuse_loses_value() -> None:
    learned = reuse()
    before = learned.value(0, 100)
    for _ in range(100):
        learned.end_spell(0, 5_000, reused=False)
    assert learned.value(0, 100) < before / 4
