"""The scheduler of a simulation: the real one, with its real pools, tree and host tier, and no model behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...memory_pool.allocator import Allocator
from ...memory_pool.req_to_token import ReqToTokenPool
from ...radix.cache import RadixCache
from ...radix.eviction.registry import ORDERS
from ...radix.tiers.host_tier import HostTier
from ...scheduler.config import SchedulerConfig
from ...scheduler.memory.beam_memory import BeamMemory
from ...scheduler.memory.kv_memory import KVMemory
from ...scheduler.policies.policy import PolicyTools, SchedulePolicy
from ...scheduler.policies.registry import make_policy
from ...scheduler.prefill import DecodeReserve
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
    bursts: list[BurstDecode] = []

    def make_burst(memory: KVMemory, beams: BeamMemory, reserve: DecodeReserve) -> BurstDecode:
        """The one place where a simulation differs from a server: decode steps may bring several tokens."""
        bursts.append(BurstDecode(memory, beams, reserve, plan))
        return bursts[0]

    scheduler = Scheduler(
        config,
        rows,
        allocator,
        cache,
        (EOS,),
        tier=host,
        bytes_per_token=bytes_per_token,
        make_policy=make,
        make_decode=make_burst,
    )
    return SimulatedEngine(scheduler, cache, rows, host, bursts[0])
