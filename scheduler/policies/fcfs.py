"""First come, first served."""

from __future__ import annotations

from ..request import Request
from .base import BasePolicy


class FirstComeFirstServed(BasePolicy):
    """The longest-waiting request first. A retracted request keeps its first arrival, so it comes back first."""

    def rank(self, waiting: list[Request], now: float) -> list[Request]:
        return waiting
