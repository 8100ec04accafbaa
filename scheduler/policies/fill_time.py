"""The fill time (T_fill): how long the whole pool would take to fill with newly computed KV.

This is the break-even time of an idle lease: recomputing its KV costs ``tokens × seconds per token``, and the pool
could have served others with those tokens for as long. A lease that has been idle for longer costs more than it saves
(DESIGN §5; a simulation of agents found 9 s on a 24 GB card and 21 s on one of 141 GB).
"""

from __future__ import annotations

START_S = 10.0
"""T_fill until enough has been measured."""

ENOUGH_TOKENS = 2048
"""Computed prompt tokens after which the measurement counts."""

WINDOW_TOKENS = 1 << 18
"""Counted tokens at which all counts are halved, so that old measurements fade."""


class FillTime:
    """Measures, while serving, what a prompt token costs. ``fixed``: seconds to use instead; 0 to measure."""

    def __init__(self, pool_tokens: int, fixed: float = 0.0) -> None:
        self._pool_tokens = pool_tokens
        self._fixed = fixed
        self._tokens = 0
        self._busy_s = 0.0
        self._last_result = 0.0

    @property
    def seconds(self) -> float:
        if self._fixed:
            return self._fixed
        if self._tokens < ENOUGH_TOKENS:
            return START_S
        return self._pool_tokens * self._busy_s / self._tokens

    @property
    def tokens_per_s(self) -> float | None:
        """Prompt tokens that are computed per second; None until enough has been measured."""
        return self._tokens / self._busy_s if self._tokens >= ENOUGH_TOKENS and self._busy_s > 0 else None

    def record_step(self, prompt_tokens: int, launched: float, now: float) -> None:
        """Note a step's result at ``now``. prompt_tokens: how many it computed, 0 for a decode step. launched: when the
        step was formed; if the one before it was still running then, the step began with that one's result."""
        began = max(launched, self._last_result)
        self._last_result = now
        if not prompt_tokens:
            return
        self._tokens += prompt_tokens
        self._busy_s += max(0.0, now - began)
        if self._tokens > WINDOW_TOKENS:
            self._tokens //= 2
            self._busy_s /= 2
