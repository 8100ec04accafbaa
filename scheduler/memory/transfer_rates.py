"""How fast copies between two tiers are, measured: what loading KV costs, against computing it again."""

from __future__ import annotations

from ..policies.fill_time import FillTime

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
    def seen(self) -> tuple[float, float | None]:
        """(seconds, tokens_per_s)"""
        return self.seconds, self.tokens_per_s

    @property
    def tokens_per_s(self) -> float | None:
        """None until enough has been seen."""
        return self._tokens / self._busy_s if self._seen >= ENOUGH_TOKENS else None


TRY_AGAIN = 32
"""So often, of the times when loading would not pay, it is done all the same, to see whether it still does not."""


class TransferRates:
    """Of one tier, both directions: is loading from it faster than computing again? fill_time: what that costs."""

    def __init__(self, fill_time: FillTime) -> None:
        self.stores = CopyRate()
        """Of copies to this tier."""
        self.loads = CopyRate()
        """Of copies from this tier."""
        self._fill_time = fill_time
        self._declined = 0

    def loading_pays(self) -> bool:
        """Yes, as long as nothing else was measured. Copies and steps overlap, so what counts is the rate alone."""
        load, compute = self.loads.tokens_per_s, self._fill_time.tokens_per_s
        if load is None or compute is None or load >= compute:
            return True
        self._declined += 1
        return self._declined % TRY_AGAIN == 0
