"""Measured speed of copies between two tiers, to compare loading KV with computing it again."""

from __future__ import annotations

from ..policies.fill_time import FillTime

ENOUGH_TOKENS = 1024
"""Copied tokens after which the measurement counts."""

HALF_LIFE_TOKENS = 1 << 16
"""Copied tokens after which an older measurement counts half."""


class CopyRate:
    """Speed of copies in one direction. Large copies count for more than small ones, and new for more than old."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Total duration of the copies."""
        self._seen = 0
        self._tokens = 0.0
        self._busy_s = 0.0

    def record_copy(self, tokens: int, seconds: float) -> None:
        """Record a copy. seconds: its duration without the time in the queue; a copy too short to measure is
        ignored."""
        if seconds <= 0:
            return
        self.seconds += seconds
        self._seen += tokens
        faded = 0.5 ** (tokens / HALF_LIFE_TOKENS)
        self._tokens = self._tokens * faded + tokens
        self._busy_s = self._busy_s * faded + seconds

    @property
    def seen(self) -> tuple[float, float | None]:
        """(seconds, tokens_per_s)"""
        return self.seconds, self.tokens_per_s

    @property
    def tokens_per_s(self) -> float | None:
        """None until ENOUGH_TOKENS have been copied."""
        return self._tokens / self._busy_s if self._seen >= ENOUGH_TOKENS else None


TRY_AGAIN = 32
"""One in this many loads that would not pay is made all the same, to keep the measurement up to date."""


class TransferRates:
    """Copy rates of one tier in both directions. fill_time: the cost of computing KV again, to compare with."""

    def __init__(self, fill_time: FillTime) -> None:
        self.stores = CopyRate()
        """Rate of copies to this tier."""
        self.loads = CopyRate()
        """Rate of copies from this tier."""
        self._fill_time = fill_time
        self._declined = 0

    def loading_pays(self) -> bool:
        """True unless loading was measured to be slower than computing. Only rates count: copies and steps overlap."""
        load, compute = self.loads.tokens_per_s, self._fill_time.tokens_per_s
        if load is None or compute is None or load >= compute:
            return True
        self._declined += 1
        return self._declined % TRY_AGAIN == 0
