"""Tokens are counted at the position they have in the prompt."""

from __future__ import annotations

import random

import pytest

from baton.scheduler.cache_statistics.cache_stats import DEPTHS
from baton.scheduler.cache_statistics.lookups import Depths


def test_by_hand() -> None:
    depths = Depths()
    for length in (0, 1, 128, 129, 300, 600):
        depths.add_prefix(length)
    found = depths.buckets()
    assert found.counts[:5] == (1 + 128 + 128 + 128 + 128, 1 + 128 + 128, 44 + 256, 88, 0)
    assert found.tokens == 1 + 128 + 129 + 300 + 600
    assert found.sum == sum(n * (n + 1) // 2 for n in (1, 128, 129, 300, 600))


@pytest.mark.parametrize("seed", range(5))
def test_as_a_slow_twin(seed: int) -> None:
    rng = random.Random(seed)
    depths, twin = Depths(), [0] * (len(DEPTHS) + 1)
    lengths = [rng.choice([2**power + off for power in range(12) for off in (-1, 0, 1)]) for _ in range(30)]
    for length in lengths:
        depths.add_prefix(length)
        for position in range(1, length + 1):
            twin[next((i for i, bound in enumerate(DEPTHS) if position <= bound), len(DEPTHS))] += 1
    assert depths.buckets().counts == tuple(twin)


def test_the_longest_prompts_have_a_bucket_too() -> None:
    depths = Depths()
    depths.add_prefix(DEPTHS[-1] + 5)
    assert depths.buckets().counts[-2:] == (DEPTHS[-1] // 2, 5)
