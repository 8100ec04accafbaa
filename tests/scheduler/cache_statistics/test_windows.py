"""Windows hold the last minutes, and not more."""

from __future__ import annotations

import random

import pytest

from baton.scheduler.cache_statistics.cache_stats import CacheTotals, HitTokens
from baton.scheduler.cache_statistics.windows import SLOT_S, WINDOWS_S, RollingWindows


def totals(count: int) -> CacheTotals:
    return CacheTotals(
        prompts=count, query_tokens=100 * count, hits=HitTokens(match=40 * count, disk=count), evicted_tokens=7 * count
    )


def test_by_hand() -> None:
    windows = RollingWindows()
    for now in range(0, 200, 5):
        assert windows.is_due(now)
        windows.add_snapshot(totals(now), now)
        assert not windows.is_due(now + 4.9)
    window = windows.last(60, totals(300), 198.0)  # since the snapshot at 135, the last one that is 60 s old
    assert (window.prompts, window.covered_s) == (165, 63.0)
    assert window.hits == HitTokens(match=40 * 165, disk=165) and window.hit_rate == pytest.approx(0.41)
    assert window.evicted_tokens == 7 * 165
    young = windows.last(300, totals(300), 198.0)
    assert (young.prompts, young.covered_s) == (300, 198.0), "there is no more"


def test_nothing_asked_has_no_rate() -> None:
    windows = RollingWindows()
    assert windows.last(60, totals(0), 5.0).hit_rate is None
    windows.add_snapshot(totals(3), 0.0)
    assert windows.last(60, totals(3), 5.0).hit_rate is None


@pytest.mark.parametrize("seed", range(10))
def test_memory_is_bounded_and_the_longest_window_is_there(seed: int) -> None:
    rng = random.Random(seed)
    windows, now, noted = RollingWindows(), 0.0, []
    for count in range(2000):
        if windows.is_due(now):
            windows.add_snapshot(totals(count), now)
            noted.append((now, count))
        assert len(windows) <= RollingWindows.MAX_SNAPSHOTS
        for seconds in WINDOWS_S:
            window = windows.last(seconds, totals(count), now)
            then, before = next(((t, c) for t, c in reversed(noted) if t <= now - seconds), noted[0])
            assert (window.covered_s, window.prompts) == (now - then, count - before)
            if now > 1.1 * seconds + 30:
                assert seconds <= window.covered_s < seconds + SLOT_S + 10
        now += rng.choice([0.01, 1.0, 10.0])
