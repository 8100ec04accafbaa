"""Warns in the log, once, when the hit rate of the cache falls below a threshold."""

from __future__ import annotations

import logging

from .cache_stats import WindowStats

logger = logging.getLogger(__name__)

MIN_PROMPTS = 20
"""Least prompts in the window; the rate of fewer says little."""

RECOVERY = 0.1
"""The alert ends once the rate exceeds the threshold by this share of the distance from the threshold to 1."""


class HitRateAlert:
    """Compares the hit rate of one window with a threshold; 0 turns it off."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.active = False

    def judge(self, window: WindowStats) -> None:
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
                    "/cache/statistics says what was not found",
                    rate, window.query_tokens, window.seconds, self.threshold,
                )  # fmt: skip
            elif self.active and rate >= self.threshold + RECOVERY * (1 - self.threshold):
                self.active = False
                logger.info("the prefix cache has enough again: %.3f of the prompt tokens", rate)
