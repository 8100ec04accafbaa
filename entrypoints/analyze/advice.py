"""Recommended sizes of pool, host cache and disk cache, and a number of recurrent states, from the curves of a log."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import Any

from .analysis import Analysis
from .pool_sizes import PoolSizes
from .reuse.state_pools import StatePools

TIERS = ("device", "host", "disk")
REACH = (0.8, 0.95, 0.99)
"""Share of an infinite cache's hits that each tier should find together with the tiers above it."""


@dataclass(frozen=True, slots=True)
class Tier:
    """tokens: its size, including the tiers above it; None where the size is unknown or the tier is not worthwhile,
    with the reason in ``why``. hit_rate: share of all prompt tokens found in it and the tiers above."""

    tier: str
    tokens: int | None
    hit_rate: float | None
    why: str

    def described(self, sizes: PoolSizes) -> dict[str, Any]:
        gib = sizes.device_gib if self.tier == "device" else sizes.shared_gib
        return {
            "tier": self.tier,
            "tokens": self.tokens,
            "gib": gib(self.tokens),
            "hit_rate": self.hit_rate,
            "why": self.why,
        }


def recommend(analysis: Analysis, reach: tuple[float, ...] = REACH) -> list[Tier]:
    """A size for each tier: the smallest that reaches its share of an infinite cache's hits."""
    totals, per_unit, curve = analysis.totals, analysis.units.tokens, analysis.curve
    hits = curve.hits()
    found: list[Tier] = []
    largest = 0
    for tier, share in zip(TIERS, reach):
        size = curve.least_size(share * totals.endless_hits / per_unit, analysis.tree.exact_units)
        if size is None:
            why = f"more than {analysis.exact_tokens:,} tokens, the limit of exact sizes with this --memory-gb"
            found.append(Tier(tier, None, None, why))
            continue
        tokens, why = size * per_unit, f"{share:.0%} of the hits of an infinite cache"
        if tier == "device" and tokens < totals.longest:
            tokens, why = totals.longest, "room for the longest request; the hits alone need less"
        if tier == "device" and tokens < analysis.running.peak_tokens:
            tokens, why = (
                analysis.running.peak_tokens,
                "room for concurrent requests; the hits alone need less",
            )
        elif tier != "device" and tokens <= 1.1 * largest:
            found.append(Tier(tier, None, None, "not needed: the tiers above it find nearly as much"))
            continue
        largest = max(largest, tokens)
        rate = hits_at(hits, curve.grid, tokens // per_unit) * per_unit / max(1, totals.prompt_tokens)
        found.append(Tier(tier, tokens, rate, why))
    return found


def hits_at(hits: list[int], grid: list[int], size: int) -> int:
    """Units found by a cache of ``size`` units, at the largest size of the grid that is not above it."""
    return hits[max(0, bisect_right(grid, size) - 1)]


STATES_OF_RUNNING = 3
"""States that a running sequence has beside those of the tree: of its last two steps, and of its last whole page."""


def recommend_states(pools: StatePools, share: float) -> int | None:
    """The fewest states beside those of running requests with which this share of the prompt tokens that any number of
    states would find is found; None if not even the largest pool does."""
    wanted = share * pools.found_units[-1]
    return next((size for size, found in zip(pools.sizes, pools.found_units) if found >= wanted), None)


def flags(tiers: list[dict[str, Any]], max_states: int | None = None) -> str:
    """The server's flags for these sizes. tiers: as `Tier.described`. max_states: None for a model without states."""
    found = []
    for tier in tiers:
        if tier["tier"] == "device":
            found += [f"--max-total-tokens {tier['tokens']}"] if tier["tokens"] is not None else []
            found += [f"--max-states {max_states}"] if max_states is not None else []
        elif tier["gib"] is not None and tier["tier"] == "host":
            found.append(f"--host-cache-gb {ceil_gib(tier['gib']):g}")
        elif tier["gib"] is not None:
            found.append(f"--disk-cache-path DIR --disk-cache-gb {ceil_gib(tier['gib']):g}")
    return " ".join(found)


def ceil_gib(size: float) -> float:
    """Rounded up to two digits."""
    if size <= 0:
        return 0.0
    step = 10.0 ** (floor(log10(size)) - 1)
    return round(ceil(size / step - 1e-9) * step, 6)
