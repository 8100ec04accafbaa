"""Counts the tokens that prompts look up in the cache, and the hits by source and depth in the prompt."""

from __future__ import annotations

from ..request import Request
from .cache_stats import DEPTHS, Buckets, HitTokens

FIRST_BITS = (DEPTHS[0] - 1).bit_length()


class Depths:
    """Histogram of tokens by position, for prefixes of prompts: O(1) per prefix."""

    def __init__(self) -> None:
        self._ends = [0] * (len(DEPTHS) + 1)
        """Number of prefixes, by the bucket in which they end."""
        self._rests = [0] * (len(DEPTHS) + 1)
        """The prefixes' tokens in that bucket."""
        self._sum = 0

    def add_prefix(self, length: int) -> None:
        """Count the first ``length`` tokens of a prompt."""
        if length <= 0:
            return
        bucket = min(max(0, (length - 1).bit_length() - FIRST_BITS), len(DEPTHS))
        self._ends[bucket] += 1
        self._rests[bucket] += length - (DEPTHS[bucket - 1] if bucket else 0)
        self._sum += length * (length + 1) // 2

    def buckets(self) -> Buckets:
        counts: list[int] = []
        longer = sum(self._ends)
        low = 0
        for high, ends, rest in zip((*DEPTHS, 0), self._ends, self._rests):
            longer -= ends
            counts.append(rest + longer * (high - low))
            low = high
        return Buckets(tuple(counts), float(self._sum))


class Lookups:
    """Counts admitted requests, each at its first admission."""

    def __init__(self) -> None:
        self.prompts = 0
        self.query_tokens = 0
        self.hits = HitTokens()
        self.query_depth, self.hit_depth = Depths(), Depths()

    def admitted(self, request: Request) -> None:
        found = request.found
        self.prompts += 1
        self.query_tokens += request.prompt_len
        self.query_depth.add_prefix(request.prompt_len)
        if found.total:
            self.hits += _by_kind(request)
            self.hit_depth.add_prefix(found.total)


def _by_kind(request: Request) -> HitTokens:
    found, inheritance = request.found, request.inheritance
    handoff = fork = 0
    if inheritance is not None and inheritance.took_over:
        handoff, fork = (0, found.device) if inheritance.path == "fork" else (found.device, 0)
    return HitTokens(handoff, fork, found.device - handoff - fork, found.host, found.disk, found.remote)
