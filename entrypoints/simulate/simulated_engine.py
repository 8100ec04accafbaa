"""The scheduler of a simulation: the real one, with its real pools, tree and host tier, and no model behind it. It is
put together as in `runtime/worker.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ...memory_pool.allocator import Allocator
from ...memory_pool.req_to_token import ReqToTokenPool
from ...memory_pool.state_slots import StateSlots
from ...memory_pool.window_pages import WindowedAllocator, WindowPages
from ...radix.cache import RadixCache
from ...radix.eviction.registry import ORDERS
from ...radix.node_states import NodeStates
from ...radix.node_windows import NodeWindows
from ...radix.tiers.host_tier import HostTier
from ...runtime.pool_sizes import PoolSizes
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
    pools: PoolSizes,
    plan: PlanBurst,
    make: Callable[[str, PolicyTools], SchedulePolicy] = make_policy,
) -> SimulatedEngine:
    """``config`` must be resolved, but for the sizes that ``pools`` has: no zeros that stand for "from the model".
    make: makes the policy that ``config`` names, or another in its place."""
    config = replace(config, max_total_tokens=pools.tokens, page_size=pools.page_size, max_states=pools.states)
    rows = ReqToTokenPool(config.num_rows, config.context_length)
    windows = None
    if pools.window:
        windows = WindowPages(pools.window_tokens, pools.tokens, pools.page_size, pools.window)
        allocator = WindowedAllocator(windows, pools.tokens)
    else:
        allocator = Allocator(pools.tokens, pools.page_size)
    slots = StateSlots(pools.states, fences=allocator.fences) if pools.states else None
    cache = RadixCache(
        rows,
        allocator,
        page_size=pools.page_size,
        disabled=config.disable_radix_cache,
        lanes=ORDERS[config.radix_eviction_policy](pools.tokens),
        states=NodeStates(slots, pools.page_size) if slots is not None else None,
        windows=NodeWindows(windows) if windows is not None else None,
    )
    host = None
    if pools.host_tokens:
        host_slots = StateSlots(pools.host_states, fences=allocator.fences) if pools.host_states else None
        host_allocator = Allocator(pools.host_tokens, pools.page_size, fences=allocator.fences)
        host = HostTier(cache, host_allocator, states=host_slots)
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
        bytes_per_token=pools.bytes_per_token,
        make_policy=make,
        make_decode=make_burst,
    )
    return SimulatedEngine(scheduler, cache, rows, host, bursts[0])
