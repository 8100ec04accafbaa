"""How fast copies between two tiers are, measured: what loading KV costs, against computing it again."""

from __future__ import annotations

ENOUGH_TOKENS = 1024
"""Copied tokens after which the measurement counts."""

HALF_LIFE_TOKENS = 1 << 16
"""After so many tokens what was measured before them counts half."""


class CopyRate:
    """Of one direction. Large copies count for more than small ones, new ones for more than old ones."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """That copies took, in all."""
        self._seen = 0
        self._tokens = 0.0
        self._busy_s = 0.0

    def note(self, tokens: int, seconds: float) -> None:
        """A copy has been made. seconds: how long it took itself, without its time in the queue. What took no time that
        could be measured says nothing."""
        if seconds <= 0:
            return
        self.seconds += seconds
        self._seen += tokens
        faded = 0.5 ** (tokens / HALF_LIFE_TOKENS)
        self._tokens = self._tokens * faded + tokens
        self._busy_s = self._busy_s * faded + seconds

    @property
    def tokens_per_s(self) -> float | None:
        """None until enough has been seen."""
        return self._tokens / self._busy_s if self._seen >= ENOUGH_TOKENS else None
