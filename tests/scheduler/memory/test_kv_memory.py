"""How memory is reclaimed when the pool is full."""

from __future__ import annotations

from itertools import pairwise

from scheduler_harness import Harness


def fill(harness: Harness) -> None:
    """Cache prompts until the next one must evict."""
    number = 0
    while harness.allocator.free_tokens > 64:
        harness.add(f"fill{number}", [number % 97 + 1, number // 97 + 1, *range(1, 61)], max_new_tokens=1)
        harness.run()
        number += 1


def test_a_full_pool_evicts_in_pieces_and_not_for_every_token() -> None:
    harness = Harness(num_tokens=2560)
    fill(harness)
    harness.add("r", [99, 99, *range(1, 61)], max_new_tokens=100)
    evictions = [harness.cache.evicted_total]
    while not harness.scheduler.is_idle:
        harness.step()
        evictions.append(harness.cache.evicted_total)
    pieces = [new - old for old, new in pairwise(evictions) if new > old]
    assert len(pieces) < 15 and min(pieces) >= 10  # 1/256 of the pool


def test_a_small_pool_gives_up_no_more_than_is_needed() -> None:
    harness = Harness(num_tokens=255)
    fill(harness)
    free = harness.allocator.free_tokens
    harness.add("r", [99, 99, *range(1, 61)], max_new_tokens=20)
    harness.run()
    assert harness.cache.evicted_total == 62 + 19 - free > 0
