"""Depth first, by weight (SGLang's dfs-weight)."""

from __future__ import annotations

from ...radix.cache import RadixCache
from ..request import Request
from .base import BasePolicy
from .fill_time import FillTime


class DepthFirstByWeight(BasePolicy):
    """Goes through the cache's tree from the root, first to where most requests wait: those that share a prefix go
    together, the largest groups first, so that a prefix is used by all who want it before it makes room. Whose prompt
    ends in the cache where others go on comes after them. Equal groups go by their first arrival.

    As with lpm a long queue is served in order of arrival; that whoever waits below a light branch is not passed for
    ever, `BasePolicy` sees to."""

    max_queue = 128
    """The longest queue that is ranked."""

    def __init__(self, cache: RadixCache, fill_time: FillTime) -> None:
        super().__init__(fill_time)
        self._cache = cache

    def rank(self, waiting: list[Request], now: float) -> list[Request]:
        if len(waiting) > self.max_queue:
            return waiting
        paths: list[list[int]] = []
        """Of each request the nodes from the root down to where its cached prefix ends, by serial."""
        weights: dict[int, int] = {}
        """Of each node the requests that wait at it or below."""
        firsts: dict[int, int] = {}
        """Of each node the place of the first of them."""
        for place, request in enumerate(waiting):
            _, _, end = self._cache.find_prefix(request.namespace, request.token_ids.view())
            paths.append([node.serial for node in self._cache.tree.path(end, 0)])
            for serial in paths[-1]:
                weights[serial] = weights.get(serial, 0) + 1
                firsts.setdefault(serial, place)
        keys = [
            [*((-weights[serial], firsts[serial]) for serial in path), (1, place)] for place, path in enumerate(paths)
        ]
        return [waiting[place] for place in sorted(range(len(waiting)), key=keys.__getitem__)]
