"""The scheduler of a simulation: the real one, with its real pools, tree and host tier, and no model behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...memory_pool.allocator import Allocator
from ...memory_pool.req_to_token import ReqToTokenPool
from ...radix.cache import RadixCache
from ...radix.eviction.orders import ORDERS
from ...radix.invariants import InvariantError, check_leases, check_tree, conservation
from ...radix.tiers.host_invariants import check_host
from ...radix.tiers.host_tier import HostTier
from ...scheduler.config import SchedulerConfig
from ...scheduler.memory.self_check import unaccounted_tokens
from ...scheduler.policies.policy import SchedulePolicy
from ...scheduler.policies.registry import make_policy
from ...scheduler.policies.tools import PolicyTools
from ...scheduler.scheduler import Scheduler
from .burst import BurstDecode, PlanBurst
from .work.job import EOS


@dataclass(slots=True)
class SimulatedEngine:
    scheduler: Scheduler
    cache: RadixCache
    rows: ReqToTokenPool
    host: HostTier | None
    burst: BurstDecode


def build_engine(
    config: SchedulerConfig,
    host_tokens: int,
    bytes_per_token: int,
    plan: PlanBurst,
    make: Callable[[str, PolicyTools], SchedulePolicy] = make_policy,
) -> SimulatedEngine:
    """``config`` must be resolved: no zeros that stand for "from the model". host_tokens: size of the host tier, 0 for
    none. make: makes the policy that ``config`` names, or another in its place."""
    rows = ReqToTokenPool(config.num_rows, config.context_length)
    allocator = Allocator(config.max_total_tokens, config.page_size)
    cache = RadixCache(
        rows,
        allocator,
        page_size=config.page_size,
        disabled=config.disable_radix_cache,
        lanes=ORDERS[config.radix_eviction_policy](config.max_total_tokens),
    )
    host = None
    if host_tokens:
        host = HostTier(cache, Allocator(host_tokens, config.page_size, fences=allocator.fences))
        cache.residency = host
    scheduler = Scheduler(config, rows, allocator, cache, (EOS,), host, (), bytes_per_token, make)
    # The one place where a simulation differs from a server: decode steps may bring several tokens.
    burst = BurstDecode(scheduler._memory, scheduler._beams, scheduler._reserve, plan)
    scheduler._decode = burst
    return SimulatedEngine(scheduler, cache, rows, host, burst)


def check_engine(engine: SimulatedEngine) -> None:
    """Check the invariants from scratch (``--check``): tree, leases and host tier are sound, every token of the pool
    has one owner, and no request has more KV than tokens. A step may be in flight. Raises InvariantError."""
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
