"""The orders of eviction by name, as ``--radix-eviction-policy`` takes them."""

from __future__ import annotations

from collections.abc import Callable

from .learned import LearnedLanes
from .order import Lanes, OneLane
from .ranks import RANKS, Rank


def _by(rank: Rank) -> Callable[[int], Lanes]:
    return lambda pool_tokens: OneLane(rank)


ORDERS: dict[str, Callable[[int], Lanes]] = {name: _by(rank) for name, rank in RANKS.items()} | {
    "learned": LearnedLanes
}
"""Each makes a new order for one cache of so many tokens."""
