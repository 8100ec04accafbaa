"""Statistics of the cache's use as plain data, sent to the HTTP process; `describe` formats them for clients."""

from __future__ import annotations

from typing import Any

import msgspec

from ..radix.kv_lives import SECONDS

DEPTHS = tuple(128 << k for k in range(14))
"""Upper bounds of positions in a prompt, counted from 1: 128, 256, …, 1 M."""


class HitTokens(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Prompt tokens found in the cache, by source. Each token counts in one field only."""

    handoff: int = 0
    """Taken over from a parent's lease, without a look-up."""
    fork: int = 0
    """Taken over from a running parent, without a look-up."""
    match: int = 0
    """Found on the device by a look-up."""
    host: int = 0
    """Found on the host by a look-up; ``disk`` and ``remote`` likewise."""
    disk: int = 0
    remote: int = 0

    @property
    def total(self) -> int:
        return self.handoff + self.fork + self.match + self.host + self.disk + self.remote

    def __add__(self, other: HitTokens) -> HitTokens:
        return HitTokens(*map(int.__add__, msgspec.structs.astuple(self), msgspec.structs.astuple(other)))

    def __sub__(self, other: HitTokens) -> HitTokens:
        return HitTokens(*map(int.__sub__, msgspec.structs.astuple(self), msgspec.structs.astuple(other)))


class Buckets(msgspec.Struct, frozen=True, omit_defaults=True):
    """A histogram of tokens. The bounds are `DEPTHS` or `SECONDS`, depending on the value."""

    counts: tuple[int, ...] = ()
    """Not cumulative; the last bucket counts tokens above all bounds. Empty: nothing was counted."""
    sum: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    def __sub__(self, other: Buckets) -> Buckets:
        if not other.counts:
            return self
        return Buckets(tuple(a - b for a, b in zip(self.counts, other.counts, strict=True)), self.sum - other.sum)


class CacheTotals(msgspec.Struct, frozen=True, omit_defaults=True):
    """Counts since some time. See radix/kv_lives.py for those of KV."""

    prompts: int = 0
    """Admitted prompts; each sample of n counts."""
    query_tokens: int = 0
    """Tokens in these prompts."""
    hits: HitTokens = HitTokens()
    query_depth: Buckets = Buckets()
    """``query_tokens``, by their position in the prompt."""
    hit_depth: Buckets = Buckets()
    """``hits``, likewise."""
    stored_tokens: int = 0
    evicted_nodes: int = 0
    evicted_tokens: int = 0
    retired_tokens: int = 0
    to_host_tokens: int = 0
    recorded_tokens: int = 0
    recomputed_tokens: int = 0
    given_up_tokens: int = 0
    lifetime: Buckets = Buckets()
    idle_time: Buckets = Buckets()
    reuse_gap: Buckets = Buckets()

    def __sub__(self, earlier: CacheTotals) -> CacheTotals:
        """The counts since ``earlier``."""
        mine, theirs = msgspec.structs.astuple(self), msgspec.structs.astuple(earlier)
        return CacheTotals(*(a - b for a, b in zip(mine, theirs)))


class WindowStats(msgspec.Struct, frozen=True, omit_defaults=True):
    """Counts of the last ``seconds``."""

    seconds: int
    covered_s: float = 0.0
    """Seconds really covered: fewer after a start or a reset, otherwise up to one slot more."""
    prompts: int = 0
    query_tokens: int = 0
    hits: HitTokens = HitTokens()
    evicted_tokens: int = 0

    @property
    def hit_rate(self) -> float | None:
        """None without queries."""
        return rate(self.hits.total, self.query_tokens)


class CacheStats(msgspec.Struct, frozen=True, omit_defaults=True):
    """A snapshot of the cache's statistics."""

    totals: CacheTotals = CacheTotals()
    seconds: float = 0.0
    """The time that ``totals`` covers."""
    windows: tuple[WindowStats, ...] = ()
    alert: bool = False
    """True while the hit rate is below --hit-rate-alert."""


NOT_COUNTED = CacheStats()


def rate(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def describe(stats: CacheStats, threshold: float) -> dict[str, Any]:
    """Format for JSON. threshold: --hit-rate-alert."""
    totals = stats.totals
    return {
        "seconds": stats.seconds,
        "queries": _queries(totals),
        "depth": _depth(totals),
        "kv": {
            "stored_tokens": totals.stored_tokens,
            "evicted_nodes": totals.evicted_nodes,
            "evicted_tokens": totals.evicted_tokens,
            "retired_tokens": totals.retired_tokens,
            "to_host_tokens": totals.to_host_tokens,
            "given_up_tokens": totals.given_up_tokens,
        },
        "evicted_too_early": {
            "recorded_tokens": totals.recorded_tokens,
            "recomputed_tokens": totals.recomputed_tokens,
            "share": rate(totals.recomputed_tokens, totals.recorded_tokens),
        },
        "lifetime": _times(totals.lifetime),
        "idle_time": _times(totals.idle_time),
        "reuse_gap": _times(totals.reuse_gap),
        "windows": [_window(window) for window in stats.windows],
        "alert": {"threshold": threshold, "active": stats.alert},
    }


def _queries(counted: CacheTotals | WindowStats) -> dict[str, Any]:
    hits = counted.hits
    return {
        "prompts": counted.prompts,
        "query_tokens": counted.query_tokens,
        "hit_tokens": hits.total,
        "hit_rate": rate(hits.total, counted.query_tokens),
        "hits": {name: getattr(hits, name) for name in HitTokens.__struct_fields__},
    }


def _window(window: WindowStats) -> dict[str, Any]:
    return {
        "seconds": window.seconds,
        "covered_s": window.covered_s,
        **_queries(window),
        "evicted_tokens": window.evicted_tokens,
    }


def _depth(totals: CacheTotals) -> list[dict[str, Any]]:
    """Hit rate by position in the prompt, up to the longest prompt."""
    rows: list[dict[str, Any]] = []
    low = 0
    hits = totals.hit_depth.counts or (0,) * (len(DEPTHS) + 1)
    for high, asked, found in zip((*DEPTHS, None), totals.query_depth.counts, hits):
        if asked:
            counts = {"query_tokens": asked, "hit_tokens": found, "hit_rate": rate(found, asked)}
            rows.append({"from": low, "to": high, **counts})
        low = high
    return rows


def _times(spread: Buckets) -> dict[str, Any]:
    """``tokens`` by the seconds they took: each bucket goes up to its ``to``, and begins where the one before ends."""
    tokens = spread.tokens
    buckets = [{"to": high, "tokens": count} for high, count in zip((*SECONDS, None), spread.counts)]
    return {"tokens": tokens, "mean_s": spread.sum / tokens if tokens else None, "buckets": buckets}
