"""Parts of a report for models with layers that do not keep the K and V of every token: recurrent states, and sliding
windows."""

from __future__ import annotations

from typing import Any

from .advice import STATES_OF_RUNNING, TIERS, recommend_states
from .analysis import Analysis
from .pool_sizes import PoolSizes
from .reuse.state_pools import StatePools


def describe_states(analysis: Analysis, sizes: PoolSizes, reach: tuple[float, ...]) -> dict[str, Any] | None:
    """The curve of recurrent states, and how many to have; None for a model without them."""
    pools = analysis.states
    if pools is None:
        return None
    asked, running = max(1, analysis.totals.prompt_tokens), STATES_OF_RUNNING * max(1, analysis.running.peak_requests)
    points = []
    for place, size in enumerate(pools.sizes):
        point = _point(pools, place, analysis.units.tokens / asked)
        points.append({"states": size, "gib": sizes.states_gib(size), **point})
        if pools.found_units[place:] == [pools.found_units[-1]] * (len(pools.sizes) + 1 - place):
            break
    by_tier = {tier: recommend_states(pools, share) for tier, share in zip(TIERS, reach)}
    beside = by_tier["device"]
    max_states = None if beside is None else beside + running
    return {
        "bytes_per_state": None if sizes.model is None else sizes.model.bytes_per_state,
        "turns": pools.turns,
        "older_turns": pools.older_turns,
        "left": pools.left,
        "endless": _point(pools, -1, analysis.units.tokens / asked),
        "by_number": points,
        "by_tier": by_tier,
        "of_running_requests": running,
        "max_states": max_states,
        "max_states_gib": sizes.states_gib(max_states),
        "reach": reach[0],
    }


def _point(pools: StatePools, place: int, share_of_unit: float) -> dict[str, Any]:
    turns = pools.found_turns[place] / pools.turns if pools.turns else None
    return {"turns_found": turns, "hit_rate": pools.found_units[place] * share_of_unit}


def with_states(tiers: list[dict[str, Any]], states: dict[str, Any], sizes: PoolSizes) -> list[dict[str, Any]]:
    """The tiers, each with its states. The server divides host and disk as the device, so the larger of both needs
    decides about the size."""
    device = tiers[0] if tiers else {}
    kv, pool = device.get("gib"), states["max_states_gib"]
    found = []
    for tier in tiers:
        if tier["tier"] == "device":
            found.append(tier | {"states": states["max_states"], "states_gib": pool})
            continue
        count = None if tier["tokens"] is None else states["by_tier"][tier["tier"]]
        size = sizes.states_gib(count)
        whole = tier["gib"]
        if whole is not None and size is not None and kv is not None and pool:
            share = kv / (kv + pool)
            whole = max(whole / share if share else 0.0, size / (1 - share))
        found.append(tier | {"states": count, "states_gib": size, "gib": whole})
    return found


def describe_windows(analysis: Analysis, sizes: PoolSizes, pool: int) -> dict[str, Any] | None:
    """How memory for a pool of so many tokens is divided between layers that see all of them and layers with a sliding
    window; None for a model without the latter."""
    model = sizes.model
    if model is None or not model.window:
        return None
    windows = sizes.window_tokens(pool)
    typical = max(1.0, analysis.lengths.quantile(0.5) or 1.0)
    return {
        "window": model.window,
        "bytes_per_token": model.bytes_per_token - model.bytes_per_window_token,
        "bytes_per_window_token": model.bytes_per_window_token,
        "ratio": sizes.window_ratio,
        "pool_tokens": pool,
        "window_tokens": windows,
        "gib": sizes.device_gib(pool),
        "shared_gib": sizes.shared_gib(pool),
        "prompts_in_pool": pool / typical,
        "windows_in_pool": (windows or pool) / min(model.window, typical),
    }
