"""Longest prefix match (SGLang's default)."""

from __future__ import annotations

from ...radix.cache import RadixCache
from ..request import Request
from .base import BasePolicy
from .fill_time import FillTime


class LongestPrefixMatch(BasePolicy):
    """Most cached tokens first; arrival breaks ties. A long queue is served in order of arrival: ranking it would cost
    a tree walk for each waiting request in every step."""

    max_queue = 128
    """The longest queue that is ranked."""

    def __init__(self, cache: RadixCache, fill_time: FillTime) -> None:
        super().__init__(fill_time)
        self._cache = cache

    def rank(self, waiting: list[Request], now: float) -> list[Request]:
        if len(waiting) > self.max_queue:
            return waiting
        return sorted(waiting, key=lambda r: -self._cache.match_len(r.namespace, r.token_ids.view()))
