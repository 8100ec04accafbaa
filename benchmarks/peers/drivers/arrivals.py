"""Times between steps, where an engine's own loop cannot be seen: from the tokens of its streams."""

from __future__ import annotations

import itertools


def step_times(arrivals: list[list[tuple[float, int]]]) -> list[float]:
    """Seconds per token of the request that began last, from its second token until the first request has ended:
    meanwhile all of them decode.

    arrivals: of each request, when which number of tokens was there."""
    last, until = max(arrivals, key=lambda mine: mine[0][0]), min(mine[-1][0] for mine in arrivals)
    together = [arrival for arrival in last[1:] if arrival[0] <= until]
    return [(b - a) / (after - before) for (a, before), (b, after) in itertools.pairwise(together)]
