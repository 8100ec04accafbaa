"""How much of a core a walk may take: a token bucket over the loop's time."""

from __future__ import annotations

SHARE = 0.005
"""Of a core, on average. What reports take comes on top, and the turns of a loop that would have slept: together less
than a hundredth."""

SAVED_S = 0.010
"""The most that is saved up: a small tree is then seen at once."""

SLICE_S = 150e-6
"""What is done in one turn should take no longer."""

BURST_S = 0.002
"""Slices come one turn after the other until what is saved is spent, and then not until so much is saved again: a loop
that has to wake for each pays more for waking than for walking."""


class Budget:
    """Times in seconds."""

    def __init__(self) -> None:
        self._saved = SAVED_S
        self._is_spending = True
        self._filled_at: float | None = None

    def fill(self, now: float) -> bool:
        """Let time pass; True if a slice may be spent."""
        if self._filled_at is not None:
            self._saved = min(SAVED_S, self._saved + SHARE * max(0.0, now - self._filled_at))
        self._filled_at = now
        self._is_spending = self._saved >= (SLICE_S if self._is_spending else BURST_S)
        return self._is_spending

    def spend(self, seconds: float) -> None:
        """May go below nothing: then there is a longer wait."""
        self._saved -= max(0.0, seconds)

    def wait(self) -> float:
        """Seconds from the last `fill` until a slice may be spent."""
        is_spending = self._is_spending and self._saved >= SLICE_S
        return 0.0 if is_spending else max(0.0, BURST_S - self._saved) / SHARE
