"""Collects the prefix cache's statistics (queries, hits, evictions): since start or a reset, and over recent windows.

    admitted requests ──▶ HitCounts ─┐
                                     ├──▶ CacheStatsCollector ──▶ CacheStats (cache_stats.py)
    cache ──────────────▶ KVLives ───┘      │  every few seconds
                                            └──▶ RollingWindows ──▶ HitRateAlert

The alert warns in the log, once, when the hit rate falls below --hit-rate-alert.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterable

from ..radix.cache import RadixCache
from ..radix.kv_lives import Histogram, KVLives
from ..radix.tick_times import TickTimes
from .cache_stats import DEPTHS, Buckets, CacheStats, CacheTotals, HitTokens, WindowStats
from .request import Request

logger = logging.getLogger(__name__)

WINDOWS_S = (60, 300, 900)

SLOT_S = 5.0

ALERT_WINDOW_S = 300

MIN_PROMPTS = 20
"""Least prompts in the window; the rate of fewer says little."""

RECOVERY = 0.1
"""The alert ends once the rate exceeds the threshold by this share of the distance from the threshold to 1."""

FIRST_BITS = (DEPTHS[0] - 1).bit_length()


class CacheStatsCollector:
    """Combines the counts of all sources. Time comes from the scheduler, once a turn."""

    def __init__(self, cache: RadixCache, hit_rate_alert: float = 0.0) -> None:
        """hit_rate_alert: as the flag."""
        self.alert = HitRateAlert(hit_rate_alert)
        self._hit_counts = HitCounts()
        self._lives = KVLives(cache)
        self._windows = RollingWindows()
        self._now = 0.0
        self._began: float | None = None
        """Time of the first `set_time`; None before."""
        self._reset_at: float | None = None
        self._before_reset = CacheTotals()

    def set_time(self, now: float) -> None:
        """Call in each turn, before anything happens to the cache."""
        if now <= self._now and self._began is not None:
            return
        self._now = now
        self._lives.set_time(now)
        if self._windows.is_due(now):
            self._began = now if self._began is None else self._began
            totals = self._counts()
            self._windows.add_snapshot(totals, now)
            if now >= self._lives.cleared_at + ALERT_WINDOW_S:
                self.alert.judge_window(self._windows.last(ALERT_WINDOW_S, totals, now))
            else:
                self.alert.active = False  # an empty cache finds nothing at first

    @property
    def tick_times(self) -> TickTimes:
        """Times of the cache's ticks."""
        return self._lives.times

    def count_admissions(self, requests: Iterable[Request]) -> None:
        """Count requests at their first admission."""
        for request in requests:
            self._hit_counts.count_admission(request)

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
        counts, lives = self._hit_counts, self._lives
        return CacheTotals(
            prompts=counts.prompts,
            query_tokens=counts.query_tokens,
            hits=counts.hits,
            evicted_tokens=lives.evicted_tokens,
        )

    def _totals(self) -> CacheTotals:
        counts, lives = self._hit_counts, self._lives
        return CacheTotals(
            prompts=counts.prompts,
            query_tokens=counts.query_tokens,
            hits=counts.hits,
            query_depth=counts.query_depth.buckets(),
            hit_depth=counts.hit_depth.buckets(),
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


def _buckets(spread: Histogram) -> Buckets:
    return Buckets(tuple(spread.counts), spread.sum)


class HitCounts:
    """Counts admitted requests, each at its first admission."""

    def __init__(self) -> None:
        self.prompts = 0
        self.query_tokens = 0
        self.hits = HitTokens()
        self.query_depth, self.hit_depth = Depths(), Depths()

    def count_admission(self, request: Request) -> None:
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


class RollingWindows:
    """The snapshots of the longest window."""

    MAX_SNAPSHOTS = int(WINDOWS_S[-1] / SLOT_S) + 2

    def __init__(self) -> None:
        self._times: list[float] = []
        self._snapshots: list[CacheTotals] = []

    def __len__(self) -> int:
        return len(self._times)

    def clear(self) -> None:
        self._times.clear()
        self._snapshots.clear()

    def is_due(self, now: float) -> bool:
        """True if the next snapshot is due."""
        return not self._times or now >= self._times[-1] + SLOT_S

    def add_snapshot(self, totals: CacheTotals, now: float) -> None:
        """Add a snapshot; only the counts that `last` reports are needed."""
        self._times.append(now)
        self._snapshots.append(totals)
        if len(self._times) > self.MAX_SNAPSHOTS:
            del self._times[0], self._snapshots[0]

    def last(self, seconds: int, totals: CacheTotals, now: float) -> WindowStats:
        """Counts of the last ``seconds``, or since the first snapshot if that is later."""
        if not self._times:
            return WindowStats(seconds)
        index = max(0, bisect_right(self._times, now - seconds) - 1)
        then = self._snapshots[index]
        return WindowStats(
            seconds,
            covered_s=now - self._times[index],
            prompts=totals.prompts - then.prompts,
            query_tokens=totals.query_tokens - then.query_tokens,
            hits=totals.hits - then.hits,
            evicted_tokens=totals.evicted_tokens - then.evicted_tokens,
        )


class HitRateAlert:
    """Compares the hit rate of one window with a threshold; 0 turns it off."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.active = False

    def judge_window(self, window: WindowStats) -> None:
        """Call when the window has advanced. Judges only a full window: an empty cache finds nothing at first."""
        if not self.threshold:
            return
        rate = window.hit_rate
        if rate is None:
            self.active = False  # no prompts lately
        elif window.covered_s >= window.seconds and window.prompts >= MIN_PROMPTS:
            if rate < self.threshold and not self.active:
                self.active = True
                logger.warning(
                    "the prefix cache had %.3f of %d prompt tokens in the last %d s, less than --hit-rate-alert %g; "
                    "see /cache/statistics for the hits by kind",
                    rate, window.query_tokens, window.seconds, self.threshold,
                )  # fmt: skip
            elif self.active and rate >= self.threshold + RECOVERY * (1 - self.threshold):
                self.active = False
                logger.info("the prefix cache has enough again: %.3f of the prompt tokens", rate)
