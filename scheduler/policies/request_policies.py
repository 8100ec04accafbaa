"""The policies that know no jobs: they order the waiting requests by arrival, by cached prefix, or at random."""

from __future__ import annotations

from ...radix.cache import RadixCache
from ..request import Request
from .base import BasePolicy
from .fill_time import FillTime


class FirstComeFirstServed(BasePolicy):
    """The longest-waiting request first. A retracted request keeps its first arrival, so it comes back first."""

    def rank(self, waiting: list[Request], now: float) -> list[Request]:
        return waiting


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


class DepthFirstByWeight(BasePolicy):
    """Walks the cache's tree from the root, first to where most requests wait. Requests that share a prefix run
    together, the largest groups first, so that all of them use the prefix before it is evicted. A request with a cached
    prefix that ends at a node comes after those that continue below it. Groups of equal size go by their first arrival.

    As with lpm, a long queue is served in order of arrival. `BasePolicy` bounds how often requests below a light branch
    are overtaken.
    """

    max_queue = 128
    """The longest queue that is ranked."""

    def __init__(self, cache: RadixCache, fill_time: FillTime) -> None:
        super().__init__(fill_time)
        self._cache = cache

    def rank(self, waiting: list[Request], now: float) -> list[Request]:
        if len(waiting) > self.max_queue:
            return waiting
        paths: list[list[int]] = []
        """For each request, the serials of the nodes from the root down to the end of its cached prefix."""
        weights: dict[int, int] = {}
        """Number of requests that wait at a node or below it, by the node's serial."""
        firsts: dict[int, int] = {}
        """Queue position of the first of these requests, by the node's serial."""
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


GOLDEN = 0x9E3779B97F4A7C15


class RandomOrder(BasePolicy):
    """Each request draws its place once, when it arrives. The draw depends on the serial, so all ranks draw the same,
    and so does a repeated run. A baseline for comparing other orders.

    Newcomers overtake a request with a late place for a while, but no longer than `BasePolicy` allows.
    """

    def rank(self, waiting: list[Request], now: float) -> list[Request]:
        return sorted(waiting, key=lambda request: _drawn(request.serial))


def _drawn(serial: int) -> int:
    """A number of 64 bits that looks random (SplitMix64); no two serials draw the same."""
    mixed = (serial + 1) * GOLDEN & (1 << 64) - 1
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
    return mixed ^ mixed >> 31
