"""The invariants of a simulated engine, checked from scratch (`--check`)."""

from __future__ import annotations

from ...radix.invariants import InvariantError, check_leases, check_tree, conservation
from ...radix.tiers.host_invariants import check_host
from ...scheduler.memory.self_check import unaccounted_tokens
from .engine import SimulatedEngine


def check_engine(engine: SimulatedEngine) -> None:
    """Tree, leases and host tier are sound, every token of the pool has one owner, and nobody has more KV than tokens.
    A step may be in flight. Raises InvariantError."""
    scheduler, cache = engine.scheduler, engine.cache
    check_tree(cache)
    check_leases(scheduler.leases, cache)
    if engine.host is not None:
        check_host(engine.host, cache.tree)
    live = scheduler.live_requests
    sequences = [request.kv for request in live if request.kv is not None]
    sequences += [lease.kv for lease in scheduler.leases.live() if lease.kv is not None]
    conservation(cache, cache.allocator, sequences, []).check()
    if lost := unaccounted_tokens(cache, sequences, []):
        raise InvariantError(f"{lost} tokens of the pool are not accounted for")
    for request in live:
        known = len(request.token_ids) + request.num_output_placeholders
        if not request.committed_len <= request.scheduled_len <= known:
            raise InvariantError(f"{request} has {request.scheduled_len} tokens of KV, but {known} tokens")
