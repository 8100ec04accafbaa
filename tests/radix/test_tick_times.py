"""Ticks are found in time, however long ago they were."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from baton.radix.tick_times import FINEST_S, TickTimes


def at(times: TickTimes, *ticks: int) -> list[float]:
    return times.seconds_at(np.array(ticks)).tolist()


def test_tick_has_the_time_of_its_turn() -> None:
    times = TickTimes()
    times.record_tick(0, 10.0)
    times.record_tick(3, 20.0)  # 1, 2 and 3 were made in the turn at 10
    times.record_tick(4, 30.0)
    assert at(times, 1, 2, 3, 4, 5, 99) == [10.0, 10.0, 10.0, 20.0, 30.0, 30.0]


def test_turn_without_ticks_is_ignored() -> None:
    times = TickTimes()
    times.record_tick(0, 10.0)
    times.record_tick(2, 20.0)
    times.record_tick(2, 500.0)  # the clock went on, the cache stood still
    assert at(times, 2, 3) == [10.0, 500.0] and len(times) == 2


def test_tick_times_survive_packing() -> None:
    times = TickTimes()
    times.record_tick(0, 10.0)
    times.record_tick(3, 20.0)
    assert at(TickTimes.unpacked(*times.packed()), 1, 4) == [10.0, 20.0] and not len(
        TickTimes.unpacked(*TickTimes().packed())
    )


def test_older_ticks_get_the_oldest_known_time() -> None:
    times = TickTimes()
    times.record_tick(100, 7.0)
    times.record_tick(200, 8.0)
    assert at(times, 0, 50, 100, 101) == [7.0, 7.0, 7.0, 7.0]


@pytest.mark.parametrize("seed", range(4))
def test_tick_times_have_bounded_memory_and_error(seed: int) -> None:
    """Turns of a hundredth of a second to a minute, for a few days."""
    rng = random.Random(seed)
    times, made, now, tick = TickTimes(), list[tuple[int, float]](), 0.0, 0
    for _ in range(30_000):
        times.record_tick(tick, now)
        for _ in range(rng.randrange(3)):
            tick += 1
            made.append((tick, now))
        now += math.exp(rng.uniform(math.log(0.01), math.log(60)))
        assert len(times) <= TickTimes.MAX_ENTRIES
    found = at(times, *[tick for tick, _ in made])
    assert found == sorted(found)
    for (_, then), seconds in zip(made, found):
        # Turns of a minute's distance: what is noted last may be that old.
        assert then - seconds <= 0.021 * (now - then) + FINEST_S + 60 * 0.021, (then, seconds)
        assert seconds <= then
