"""Leaves alone what keeps failing, so that waiting for it costs next to nothing."""

from __future__ import annotations


class Breaker:
    """Closed: everything goes. After ``limit`` failures in a row it is open, and nothing goes for ``pause_s`` seconds.
    Then the next call is a try: it closes the breaker, or opens it again by itself."""

    def __init__(self, limit: int, pause_s: float) -> None:
        self.pause_s = pause_s
        self._limit = limit
        self._failures = 0
        self._open_until = float("-inf")

    def allows(self, now: float) -> bool:
        return now >= self._open_until

    def succeeded(self) -> None:
        self._failures = 0

    def failed(self, now: float) -> bool:
        """Whether this opened it."""
        self._failures += 1
        if self._failures < self._limit:
            return False
        self._open_until = now + self.pause_s
        return True
