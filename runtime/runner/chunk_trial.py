"""Finds out, on a CPU, how many prompt tokens a step should compute: as few as are computed about as fast as more.

Large steps pay on a GPU, where more rows fill the products. A CPU's are as fast with some hundred rows as with
thousands; what grows with the step is the wait of all other requests. Of 32 short prompts that arrive together
half have their first token in a third of the time where a step has 256 tokens and not 2,048, and the last as early.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SMALLEST = 256
GAIN = 0.95
"""Twice as many tokens must take less than this share of twice the time, or they are not worth the wait."""
LONG_S = 0.5
"""Longest step, in seconds, whatever a longer one would gain."""
ROUNDS = 3
"""The best time of so many counts."""


def choose_chunk(
    compute: Callable[[int], None], largest: int, clock: Callable[[], float] = time.perf_counter
) -> tuple[int, dict[int, float]]:
    """compute: a step of so many prompt tokens. largest: the most that are tried.

    -> how many a step should have, and the seconds of every number that was tried."""

    def seconds(tokens: int) -> float:
        times = []
        for _ in range(ROUNDS):
            began = clock()
            compute(tokens)
            times.append(clock() - began)
        return min(times)

    size = min(SMALLEST, largest)
    tried = {size: seconds(size)}
    while 2 * size <= largest and 2 * tried[size] <= LONG_S:
        tried[2 * size] = seconds(2 * size)
        if tried[2 * size] >= GAIN * 2 * tried[size]:
            break
        size *= 2
    return size, tried
