"""Says in the log, once, that the cache finds less than it should."""

from __future__ import annotations

import logging

from .cache_stats import WindowStats

logger = logging.getLogger(__name__)

MIN_PROMPTS = 20
"""In the window; of fewer prompts the rate says little."""

RECOVERY = 0.1
"""Of what the threshold lacks to 1: so far above it the rate must be before it counts as good again."""


class HitRateAlert:
    """Compares the hit rate of one window with a threshold; 0: never mind."""

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.active = False

    def judge(self, window: WindowStats) -> None:
        """Call when the window has moved on. It counts once it is full: an empty cache finds nothing at first."""
        if not self.threshold:
            return
        rate = window.hit_rate
        if rate is None:
            self.active = False  # nobody asks any more
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
