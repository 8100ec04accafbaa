"""Hits of the optimal eviction order, which knows the future (Belády).

A request needs the whole path from the root to the end of its answer in the pool, and hits the prefix of its prompt
that is still there. The token evicted first is the one whose next use is furthest in the future. A path is used no
later than the paths below it, so this always evicts the ends of paths first, and the kept tokens are prefix-closed.

This is **exact** for a server that computes one request at a time, with pages of one token, and evicts only when it
needs the room: then the tokens are Belády's pages, all of the same size and cost, and a path is a run of accesses. For
the real cache it is an upper **bound**: that cache evicts more than it needs where only a short rest of a node would be
left, and holds the last token of a prompt twice until the prompt is in the tree.
"""

from __future__ import annotations

from heapq import heappop, heappush

from benchmarks.cache.traces import Trace

NEVER = 1 << 60


def optimal_hits(trace: Trace, capacity: int) -> list[int]:
    """The prompt tokens that each request finds, at most all but the last. capacity: tokens."""
    content = trace.content
    uses = trace.uses()
    turns = [0] * len(uses)
    """Number of past uses of each place."""
    resident = [0] * len(uses)
    """Number of tokens of each place that are in the pool, from its front."""
    farthest: list[tuple[int, int]] = []
    """(minus the next use, minus the place): a place is made after those above it. One live entry for each that is in
    the pool, in part at least; the others are out of date."""
    next_use = [NEVER] * len(uses)
    used, hits = 0, []
    for request in trace.requests:
        path = list(content.path(request.end))
        hits.append(
            min(
                _found(path, content.sizes, resident, content.lengths[request.prompt]),
                content.lengths[request.prompt] - 1,
            )
        )
        needed = 0
        for place in path:
            needed += content.sizes[place] - resident[place]
            turns[place] += 1
            next_use[place] = uses[place][turns[place]] if turns[place] < len(uses[place]) else NEVER
        short = used + needed - capacity
        if short > 0:
            _evict(short, farthest, next_use, resident)
        used += needed - max(short, 0)
        for place in path:
            resident[place] = content.sizes[place]
            heappush(farthest, (-next_use[place], -place))
    return hits


def _found(path: list[int], sizes: list[int], resident: list[int], prompt: int) -> int:
    found = 0
    for place in reversed(path):
        found += resident[place]
        if resident[place] < sizes[place]:
            break
    return min(found, prompt)


def _evict(count: int, farthest: list[tuple[int, int]], next_use: list[int], resident: list[int]) -> None:
    while count > 0:
        if not farthest:
            raise ValueError("a request does not fit the pool")
        key, negative = heappop(farthest)
        place = -negative
        if -key != next_use[place] or not resident[place]:
            continue  # so has all that is on the path, which gets new entries
        taken = min(count, resident[place])
        resident[place] -= taken
        count -= taken
        if resident[place]:
            heappush(farthest, (key, negative))
