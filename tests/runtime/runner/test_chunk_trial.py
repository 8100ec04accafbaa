"""How many prompt tokens a step on a CPU computes. Time is the test's own."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from baton.runtime.runner.chunk_trial import LONG_S, ROUNDS, SMALLEST, choose_chunk


def chosen(seconds: Callable[[int], float], largest: int = 2048) -> tuple[int, list[int]]:
    """-> the size, and what was computed."""
    now, computed = 0.0, []

    def compute(tokens: int) -> None:
        nonlocal now
        now += seconds(tokens)
        computed.append(tokens)

    size, tried = choose_chunk(compute, largest, lambda: now)
    assert sorted(computed) == sorted([*tried] * ROUNDS)
    assert all(found == pytest.approx(seconds(tokens)) for tokens, found in tried.items())
    return size, sorted(set(computed))


def test_where_more_is_no_faster_a_step_is_small() -> None:
    assert chosen(lambda tokens: tokens / 5000) == (256, [256, 512])


def test_a_step_grows_for_as_long_as_that_is_faster() -> None:
    """By a tenth, and a tenth, and 4 %."""
    rates = {256: 5000, 512: 5500, 1024: 6050, 2048: 6290}
    assert chosen(lambda tokens: tokens / rates[tokens]) == (1024, [256, 512, 1024, 2048])


def test_it_does_not_grow_beyond_what_may_be_asked_for() -> None:
    assert chosen(lambda tokens: 0.1, largest=1024) == (1024, [256, 512, 1024])
    assert chosen(lambda tokens: 0.01, largest=100) == (100, [100])


def test_nobody_waits_for_long() -> None:
    """However much faster it would be; and a slow machine does not try it at all."""
    assert chosen(lambda tokens: LONG_S * 0.6) == (SMALLEST, [SMALLEST])


def test_the_best_time_counts() -> None:
    """Somebody else had the cores for a moment."""
    times = iter([0.05, 9.0, 0.05, 9.0, 0.08, 0.1, 0.2, 0.2, 9.0])
    now = 0.0

    def compute(tokens: int) -> None:
        nonlocal now
        now += next(times)

    size, tried = choose_chunk(compute, 1024, lambda: now)
    assert size == 512 and tried == pytest.approx({256: 0.05, 512: 0.08, 1024: 0.2})
