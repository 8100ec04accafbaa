"""The report of an analysis, as plain data for the JSON file, the table and the plots."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise
from typing import Any

from .advice import flags, hits_at, recommend
from .analysis import Analysis
from .log.log_reader import LogStory
from .miss_advice import advise
from .pool_sizes import PoolSizes
from .reuse.sharing import LENGTHS, SHARES, top_prefixes
from .uneven_layers import describe_states, describe_windows, with_states

TOP = 10
RETAIN_SHARE = 0.9
"""Share of turns that a recommended lease should outlast."""


def make_report(
    analysis: Analysis, story: LogStory, *, sizes: PoolSizes, pool_tokens: int | None, reach: tuple[float, ...]
) -> dict[str, Any]:
    """pool_tokens: the pool for which leases are assessed; None for the recommended one."""
    tiers = recommend(analysis, reach)
    pool = pool_tokens or tiers[0].tokens or analysis.exact_tokens or 0
    totals, model = analysis.totals, sizes.model
    described = [tier.described(sizes) for tier in tiers]
    states = describe_states(analysis, sizes, reach)
    if states is not None:
        described = with_states(described, states, sizes)
    windows, misses = describe_windows(analysis, sizes, pool), _misses(analysis)
    report: dict[str, Any] = {
        "log": asdict(story),
        "units": asdict(analysis.units),
        "kv_bytes_per_token": None if model is None else model.bytes_per_token,
        "requests": {name: value for name, value in asdict(totals).items() if not name.startswith("missed")}
        | {
            "span_s": analysis.span,
            "prompt_tokens_median": analysis.lengths.quantile(0.5),
            "running_requests_peak": analysis.running.peak_requests,
            "running_tokens_peak": analysis.running.peak_tokens,
            "running_gib_peak": sizes.device_gib(analysis.running.peak_tokens),
        },
        "hit_rate": _hit_rate(analysis, sizes),
        "misses": misses,
        "states": states,
        "windows": windows,
        "sharing": _sharing(analysis),
        "working_set": _working_set(analysis, sizes),
        "turns": _turns(analysis, pool, sizes),
        "recommended": described,
        "advice": advise(misses, totals.prompt_tokens, states, windows),
        "flags": flags(described, None if states is None else states["max_states"]),
    }
    return report


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _hit_rate(analysis: Analysis, sizes: PoolSizes) -> dict[str, Any]:
    totals, per_unit, curve = analysis.totals, analysis.units.tokens, analysis.curve
    hits, most = curve.hits(), curve.units
    points = []
    for size, found in zip(curve.grid, hits):
        tokens = size * per_unit
        rate = _share(found * per_unit, totals.prompt_tokens)
        points.append({"tokens": tokens, "gib": sizes.device_gib(tokens), "hit_rate": rate})
        if found >= most:
            break
    distinct = None if analysis.exact_tokens is not None else analysis.tree.live_units * per_unit
    false_share = analysis.forgotten.false_share if analysis.forgotten is not None else 0.0
    return {
        "endless": _share(totals.endless_hits, totals.prompt_tokens),
        "endless_false_share": false_share,
        "exact_up_to_tokens": analysis.exact_tokens,
        "exact_up_to_gib": sizes.device_gib(analysis.exact_tokens),
        "recorded": _share(totals.recorded_hits, totals.recorded) if totals.recorded else None,
        "distinct_tokens": distinct,
        "distinct_gib": sizes.device_gib(distinct),
        "by_size": points,
    }


def _misses(analysis: Analysis) -> list[dict[str, Any]]:
    """Prompt tokens that the recording server did not find, by reason, most tokens first."""
    tokens, requests = analysis.totals.missed_tokens, analysis.totals.missed_requests
    whole = sum(tokens.values())
    rows = [
        {
            "reason": reason,
            "tokens": tokens[reason],
            "share": _share(tokens[reason], whole),
            "requests": requests[reason],
        }
        for reason in tokens
    ]
    return sorted(rows, key=lambda row: (-row["tokens"], row["reason"]))


def _sharing(analysis: Analysis) -> dict[str, Any]:
    names = ["0", *(f"{low}-{high - 1}" for low, high in pairwise(LENGTHS)), f"{LENGTHS[-1]}+"]
    shares = ["0", *(f"{low:.0%}-{high:.0%}" for low, high in zip((0.0, *SHARES[1:]), SHARES[1:])), "95%-100%"]
    prefixes = top_prefixes(analysis.tree, analysis.units.tokens, TOP)
    return {
        "requests_by_shared_tokens": dict(zip(names, analysis.sharing.by_length)),
        "requests_by_shared_part_of_prompt": dict(zip(shares, analysis.sharing.by_share)),
        "top_prefixes": [asdict(prefix) for prefix in prefixes],
    }


def _working_set(analysis: Analysis, sizes: PoolSizes) -> dict[str, Any]:
    per_unit, follower = analysis.units.tokens, analysis.working_set
    points = [
        {
            "at": point.at,
            "tokens": [None if units is None else units * per_unit for units in point.units],
            "prompt_tokens": point.asked,
            "endless_hits": point.found,
        }
        for point in follower.points
    ]
    largest = [
        max((point["tokens"][place] for point in points if point["tokens"][place] is not None), default=None)
        for place in range(len(follower.lengths))
    ]
    return {
        "window_unit": "s" if analysis.has_times else "requests",
        "windows": list(follower.lengths),
        "largest_tokens": largest,
        "largest_gib": [sizes.device_gib(tokens) for tokens in largest],
        "points": points,
    }


def _turns(analysis: Analysis, pool: int, sizes: PoolSizes) -> dict[str, Any]:
    turns, totals, per_unit = analysis.turns, analysis.totals, analysis.units.tokens
    inherited = turns.inherited_units * per_unit
    kept = hits_at(turns.curve.hits(), turns.curve.grid, pool // per_unit) * per_unit
    found: dict[str, Any] = {
        "requests": turns.count,
        "named_parents": turns.named,
        "requests_gone_on_from": turns.parents,
        "inherited_tokens": inherited,
        "inherited_share": _share(inherited, totals.prompt_tokens),
        "pool_tokens": pool,
        "pool_gib": sizes.device_gib(pool),
        "lost_to_eviction_tokens": inherited - kept,
        "lost_share": _share(inherited - kept, inherited),
        "gap_s": {f"p{share}": turns.gaps.quantile(share / 100) for share in (50, 90, 99)},
    }
    ttl = turns.gaps.quantile(RETAIN_SHARE)
    if ttl is not None and analysis.span:
        found |= {"retain_ttl_s": ttl, "leased_tokens_on_average": _leased(analysis, ttl)}
        found["leased_gib_on_average"] = sizes.device_gib(round(found["leased_tokens_on_average"]))
    return found


def _leased(analysis: Analysis, ttl: float) -> float:
    """Tokens leased on average if every request keeps its KV for ``ttl`` seconds or until its next turn."""
    totals, gaps = analysis.totals, analysis.turns.token_gaps
    token_seconds = sum(tokens * min(gap, ttl) for gap, tokens in gaps.buckets())
    never = max(0.0, totals.prompt_tokens + totals.output_tokens - gaps.total)
    return (token_seconds + never * ttl) / analysis.span
