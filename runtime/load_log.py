"""Lines of the log about load: one per interval while there is work, and the totals at the end.

    load: 8 running, 3 waiting; 1,250 prompt tokens/s, 412 output tokens/s; cache hit rate 63 %; KV pool 71 % in use

They are computed from the worker's reports, one a second, so they add no cost to steps.
"""

from __future__ import annotations

import logging

from ..scheduler.stats import SchedulerStats

logger = logging.getLogger(__name__)


class LoadLog:
    """Writes the lines from the worker's reports. It has no clock: each report comes with its time, in seconds."""

    def __init__(self, interval_s: float) -> None:
        """interval_s: 0 for the totals only."""
        self._interval_s = interval_s
        self._last = SchedulerStats()
        """Where the interval began."""
        self._began: float | None = None
        """None while there is no work."""
        self._newest = SchedulerStats()

    def add_report(self, stats: SchedulerStats, now: float) -> None:
        """Log a line if an interval with work in it has ended."""
        before, self._newest = self._newest, stats
        is_working = bool(stats.num_running_reqs or stats.num_queue_reqs) or stats.steps > before.steps
        if self._began is None:
            if is_working:
                self._began, self._last = now, before
            return
        if not self._interval_s or now - self._began < self._interval_s:
            return
        if stats.steps > self._last.steps or is_working:
            self._log_interval(stats, now - self._began)
        self._began, self._last = (now, stats) if is_working else (None, stats)

    def log_totals(self) -> None:
        """Log what has been served, when the server ends."""
        stats = self._newest
        logger.info(
            "served: %s prompt tokens computed, %s output tokens, cache hit rate %s",
            f"{stats.computed_prompt_tokens:,}",
            f"{stats.output_tokens:,}",
            _hit_rate(stats, SchedulerStats()),
        )

    def _log_interval(self, stats: SchedulerStats, seconds: float) -> None:
        last = self._last
        in_use = stats.total_tokens - stats.free_tokens - stats.evictable_tokens
        logger.info(
            "load: %d running, %d waiting; %s prompt tokens/s, %s output tokens/s; cache hit rate %s; KV pool %.0f %% "
            "in use",
            stats.num_running_reqs,
            stats.num_queue_reqs,
            f"{(stats.computed_prompt_tokens - last.computed_prompt_tokens) / seconds:,.0f}",
            f"{(stats.output_tokens - last.output_tokens) / seconds:,.0f}",
            _hit_rate(stats, last),
            100 * in_use / stats.total_tokens if stats.total_tokens else 0.0,
        )


def _hit_rate(stats: SchedulerStats, last: SchedulerStats) -> str:
    """The share of the prompts' tokens that were found in the cache since ``last``."""
    asked = stats.prefix_cache_queries - last.prefix_cache_queries
    return f"{100 * (stats.prefix_cache_hits - last.prefix_cache_hits) / asked:.0f} %" if asked > 0 else "-"
