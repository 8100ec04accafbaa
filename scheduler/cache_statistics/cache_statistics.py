"""Statistics of the prefix cache (queries, hits, evictions): since start or a reset, and over recent windows."""

from __future__ import annotations

from collections.abc import Iterable

from ...radix.cache import RadixCache
from ...radix.statistics.lives import KVLives
from ...radix.statistics.spread import Spread
from ...radix.statistics.tick_times import TickTimes
from ..request import Request
from .alert import HitRateAlert
from .cache_stats import Buckets, CacheStats, CacheTotals
from .lookups import Lookups
from .windows import WINDOWS_S, RollingWindows

ALERT_WINDOW_S = 300


class CacheStatistics:
    """Combines the counts of all sources. Time comes from the scheduler, once a turn."""

    def __init__(self, cache: RadixCache, hit_rate_alert: float = 0.0) -> None:
        """hit_rate_alert: as the flag."""
        self.alert = HitRateAlert(hit_rate_alert)
        self._lookups = Lookups()
        self._lives = KVLives(cache)
        self._windows = RollingWindows()
        self._now = 0.0
        self._began: float | None = None
        """Time of the first `advance`; None before."""
        self._reset_at: float | None = None
        self._before_reset = CacheTotals()

    def advance(self, now: float) -> None:
        """Call in each turn, before anything happens to the cache."""
        if now <= self._now and self._began is not None:
            return
        self._now = now
        self._lives.advance(now)
        if self._windows.is_due(now):
            self._began = now if self._began is None else self._began
            totals = self._counts()
            self._windows.add_snapshot(totals, now)
            if now >= self._lives.cleared_at + ALERT_WINDOW_S:
                self.alert.judge(self._windows.last(ALERT_WINDOW_S, totals, now))
            else:
                self.alert.active = False  # an empty cache finds nothing at first

    @property
    def tick_times(self) -> TickTimes:
        """Times of the cache's ticks."""
        return self._lives.times

    def admitted(self, requests: Iterable[Request]) -> None:
        """Count requests at their first admission."""
        for request in requests:
            self._lookups.admitted(request)

    def since_start(self) -> CacheStats:
        began = self._now if self._began is None else self._began
        return self._snapshot(self._totals(), self._now - began)

    def since_reset(self) -> CacheStats:
        """As `since_start`, but the totals count from the last `reset` on."""
        if self._reset_at is None:
            return self.since_start()
        return self._snapshot(self._totals() - self._before_reset, self._now - self._reset_at)

    def reset(self) -> None:
        """Set `since_reset` and the windows back to zero; the alert waits until its window is full again."""
        if self._began is None:
            return
        self._before_reset, self._reset_at = self._totals(), self._now
        self._windows.clear()
        self._windows.add_snapshot(self._counts(), self._now)
        self.alert.active = False

    def _snapshot(self, totals: CacheTotals, seconds: float) -> CacheStats:
        counts = self._counts()
        windows = tuple(self._windows.last(length, counts, self._now) for length in WINDOWS_S)
        return CacheStats(totals, seconds, windows, self.alert.active)

    def _counts(self) -> CacheTotals:
        """Counts since start, for the windowed statistics."""
        lookups, lives = self._lookups, self._lives
        return CacheTotals(
            prompts=lookups.prompts,
            query_tokens=lookups.query_tokens,
            hits=lookups.hits,
            evicted_tokens=lives.evicted_tokens,
        )

    def _totals(self) -> CacheTotals:
        lookups, lives = self._lookups, self._lives
        return CacheTotals(
            prompts=lookups.prompts,
            query_tokens=lookups.query_tokens,
            hits=lookups.hits,
            query_depth=lookups.query_depth.buckets(),
            hit_depth=lookups.hit_depth.buckets(),
            stored_tokens=lives.stored_tokens,
            evicted_nodes=lives.evicted_nodes,
            evicted_tokens=lives.evicted_tokens,
            retired_tokens=lives.retired_tokens,
            to_host_tokens=lives.to_host_tokens,
            recorded_tokens=lives.ghosts.recorded_tokens,
            recomputed_tokens=lives.ghosts.recomputed_tokens,
            given_up_tokens=lives.given_up_tokens,
            lifetime=_buckets(lives.lifetime),
            idle_time=_buckets(lives.idle_time),
            reuse_gap=_buckets(lives.reuse_gap),
        )


def _buckets(spread: Spread) -> Buckets:
    return Buckets(tuple(spread.counts), spread.sum)
