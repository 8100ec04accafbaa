"""Answer of GET /cache/tiers: the tiers of the KV cache, from the worker's stats and settings."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from ...scheduler.stats import SchedulerStats, TierStats

TIERS = ("host", "disk", "remote")
"""Tiers below the device."""


def report_tiers(stats: SchedulerStats, settings: dict[str, Any]) -> dict[str, Any]:
    """settings: the worker's ``info["tiers"]``. A tier that is not there is None."""
    size = stats.bytes_per_token
    tiers = {tier.tier: tier for tier in stats.tiers}
    hits = {name: getattr(stats.hits_by_tier, name) for name in ("device", *TIERS)}
    device = {
        "total_tokens": stats.total_tokens,
        "free_tokens": stats.free_tokens,
        "evictable_tokens": stats.evictable_tokens,
        "protected_tokens": stats.protected_tokens,
        "private_tokens": stats.private_tokens,
        "quarantined_tokens": stats.quarantined_tokens,
        "total_gib": _gib(stats.total_tokens * size),
        "evicted_tokens": stats.evicted_tokens,
        "hit_tokens": hits["device"],
        "prefill_tokens_per_s": stats.prefill_tokens_per_s,
    }
    below = {name: _tier(tiers[name], size, hits[name]) if name in tiers else None for name in TIERS}
    if (host := below["host"]) is not None:
        host["write_policy"], host["copied_by"] = settings["host_write_policy"], settings["host_copied_by"]
    return {"bytes_per_token": size, "open_fences": stats.open_fences, "device": device, **below}


def _tier(tier: TierStats, size: int, hits: int) -> dict[str, Any]:
    shown = asdict(tier)
    for name in ("tier", "total_bytes", "used_bytes"):
        del shown[name]
    shown |= {"total_gib": _room(tier.total_bytes, tier.total_tokens, size)}
    shown |= {"used_gib": _room(tier.used_bytes, tier.used_tokens, size)}
    for way in ("stores", "loads"):
        shown[way]["gib"] = _gib(shown[way]["tokens"] * size)
    return shown | {"hit_tokens": hits}


def _room(count: int | None, tokens: int | None, size: int) -> float | None:
    """Bytes, or else tokens of this size, in GiB."""
    if count is None and tokens is None:
        return None
    return _gib(tokens * size if count is None and tokens is not None else count or 0)


def _gib(count: int) -> float:
    return round(count / 2**30, 6)
