"""A random order."""

from __future__ import annotations

from ..request import Request
from .base import BasePolicy

GOLDEN = 0x9E3779B97F4A7C15


class RandomOrder(BasePolicy):
    """Each request draws its place once, when it arrives. The draw depends on the serial, so all ranks draw the same,
    and so does a repeated run. A baseline for comparing other orders.

    Newcomers overtake a request with a late place for a while, but no longer than `BasePolicy` allows.
    """

    def rank(self, waiting: list[Request], now: float) -> list[Request]:
        return sorted(waiting, key=lambda request: _drawn(request.serial))


def _drawn(serial: int) -> int:
    """A number of 64 bits that looks random (SplitMix64); no two serials draw the same."""
    mixed = (serial + 1) * GOLDEN & (1 << 64) - 1
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & (1 << 64) - 1
    return mixed ^ mixed >> 31
