"""How much ran at the same time, where a log says when requests came and how long they took."""

from __future__ import annotations

from heapq import heappop, heappush

MOST = 100_000
"""Requests that are taken to run at once; times that make it more are no times."""


class Running:
    """Takes requests about in the order in which they came."""

    def __init__(self) -> None:
        self.peak_requests = 0
        self.peak_tokens = 0
        """Of prompts and outputs; what several share counts for each."""
        self._ends: list[tuple[float, int]] = []
        self._tokens = 0

    def add(self, came: float, seconds: float, tokens: int) -> None:
        ends = self._ends
        while ends and (ends[0][0] <= came or len(ends) >= MOST):
            self._tokens -= heappop(ends)[1]
        heappush(ends, (came + seconds, tokens))
        self._tokens += tokens
        self.peak_requests = max(self.peak_requests, len(ends))
        self.peak_tokens = max(self.peak_tokens, self._tokens)
