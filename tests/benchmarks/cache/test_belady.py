"""The optimum is compared with every way to evict, on traces so small that all can be tried."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

from benchmarks.cache.belady import optimal_hits
from benchmarks.cache.replay import replay
from benchmarks.cache.traces import NOWHERE, TRACES, Content, Request, Trace


def small_trace(seed: int, requests: int = 7) -> Trace:
    """Three branching places of a token or two; each request ends in a token of its own."""
    rng, content = random.Random(seed), Content()
    places = [NOWHERE]
    for _ in range(3):
        places.append(content.add_tokens(rng.choice(places), rng.randint(1, 2)))
    asked = []
    for _ in range(requests):
        prompt = content.add_tokens(rng.choice(places), 1)
        asked.append(Request(prompt, prompt))
    return Trace("small", content, asked)


def tokens_of(trace: Trace, place: int) -> tuple[int, ...]:
    return tuple(trace.content.token_ids(place).tolist())


def best_of_all(trace: Trace, capacity: int) -> int:
    """By trying every set of tokens to keep, after every request."""
    reached: dict[frozenset[int], int] = {frozenset(): 0}
    for request in trace.requests:
        path = tokens_of(trace, request.end)
        following: dict[frozenset[int], int] = {}
        for held, hits in reached.items():
            found = 0
            while found < len(path) - 1 and path[found] in held:
                found += 1
            others = sorted(held - set(path))
            room = capacity - len(path)
            for kept in combinations(others, min(room, len(others))):
                state = frozenset(path) | frozenset(kept)
                following[state] = max(following.get(state, 0), hits + found)
        reached = following
    return max(reached.values())


@pytest.mark.parametrize("seed", range(40))
def test_optimal_hits_equal_exhaustive_search(seed: int) -> None:
    trace = small_trace(seed)
    longest = max(trace.content.lengths)
    for capacity in (longest, longest + 1, longest + 3):
        assert sum(optimal_hits(trace, capacity)) == best_of_all(trace, capacity)


def test_by_hand() -> None:
    """A document of 10 tokens is asked for in every second request; those between need 5, 5 and then 5 again."""
    content = Content()
    document, other = content.add_tokens(NOWHERE, 10), content.add_tokens(NOWHERE, 5)
    asked = [content.add_tokens(place, 1) for place in (document, other, document, other)]
    trace = Trace("by hand", content, [Request(place, place) for place in asked])
    assert optimal_hits(trace, 100) == [0, 0, 10, 5]
    assert optimal_hits(trace, 11) == [0, 0, 5, 0], "5 of the document can stay, and are needed sooner"
    assert optimal_hits(trace, 15) == [0, 0, 9, 4]
    with pytest.raises(ValueError, match="does not fit"):
        optimal_hits(trace, 10)


@pytest.mark.parametrize("name", TRACES)
def test_no_eviction_order_beats_the_optimum(name: str) -> None:
    trace = TRACES[name](0, 300)
    pool = max(max(trace.content.lengths) + 1, int(trace.working_set() * 0.5))
    best = sum(optimal_hits(trace, pool))
    for order in ("lru", "slru", "learned"):
        for hints in (False, True):
            assert 0 < sum(replay(trace, pool, order, hints=hints).hits) <= best
    endless = sum(optimal_hits(trace, 10**9))
    assert endless == sum(replay(trace, sum(trace.content.sizes) + 10_000, "lru", hints=False).hits) >= best
