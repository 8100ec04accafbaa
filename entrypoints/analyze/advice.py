"""From the curve to sizes: how large pool, host cache and disk cache should be for a log like this one."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import ceil, floor, log10
from typing import Any

from .analysis import Analysis

GIB = 2**30

TIERS = ("device", "host", "disk")
REACH = (0.8, 0.95, 0.99)
"""Of the hits of an endless cache, what each tier is to find together with those above it."""


@dataclass(frozen=True, slots=True)
class Tier:
    """tokens: it should have room for, what is above it included; None where that cannot be told or it is not worth
    having, and ``why`` says so. hit_rate: of all prompt tokens, with it and those above it."""

    tier: str
    tokens: int | None
    hit_rate: float | None
    why: str

    def described(self, kv_bytes: int | None) -> dict[str, Any]:
        return {
            "tier": self.tier,
            "tokens": self.tokens,
            "gib": gib(self.tokens, kv_bytes),
            "hit_rate": self.hit_rate,
            "why": self.why,
        }


def gib(tokens: int | None, kv_bytes: int | None) -> float | None:
    return None if tokens is None or kv_bytes is None else tokens * kv_bytes / GIB


def recommend(analysis: Analysis, reach: tuple[float, ...] = REACH) -> list[Tier]:
    """A size for each tier: the smallest that reaches its share of what any cache could find."""
    totals, per_unit, curve = analysis.totals, analysis.units.tokens, analysis.curve
    hits = curve.hits()
    found: list[Tier] = []
    largest = 0
    for tier, share in zip(TIERS, reach):
        size = curve.least_size(share * totals.endless_hits / per_unit, analysis.tree.exact_units)
        if size is None:
            why = f"more than {analysis.exact_tokens:,} tokens, which is as far as --memory-gb lets this look"
            found.append(Tier(tier, None, None, why))
            continue
        tokens, why = size * per_unit, f"{share:.0%} of the hits that any cache could have"
        if tier == "device" and tokens < totals.longest:
            tokens, why = totals.longest, "room for the longest request; the hits need less"
        if tier == "device" and tokens < analysis.running.peak_tokens:
            tokens, why = analysis.running.peak_tokens, "room for what ran at once; the hits need less"
        elif tier != "device" and tokens <= 1.1 * largest:
            found.append(Tier(tier, None, None, "none: what is above it finds nearly as much"))
            continue
        largest = max(largest, tokens)
        rate = hits_at(hits, curve.grid, tokens // per_unit) * per_unit / max(1, totals.prompt_tokens)
        found.append(Tier(tier, tokens, rate, why))
    return found


def hits_at(hits: list[int], grid: list[int], size: int) -> int:
    """Units found by a cache of ``size`` units: those of the largest size of the grid that is not above it."""
    return hits[max(0, bisect_right(grid, size) - 1)]


def flags(tiers: list[Tier], kv_bytes: int | None) -> str:
    """The server's flags for these sizes."""
    found = []
    for tier in tiers:
        size = gib(tier.tokens, kv_bytes)
        if tier.tier == "device" and tier.tokens is not None:
            found.append(f"--max-total-tokens {tier.tokens}")
        elif size is not None and tier.tier == "host":
            found.append(f"--host-cache-gb {ceil_gib(size):g}")
        elif size is not None:
            found.append(f"--disk-cache-path DIR --disk-cache-gb {ceil_gib(size):g}")
    return " ".join(found)


def ceil_gib(size: float) -> float:
    """Rounded up to two digits."""
    if size <= 0:
        return 0.0
    step = 10.0 ** (floor(log10(size)) - 1)
    return round(ceil(size / step - 1e-9) * step, 6)
