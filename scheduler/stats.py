"""The numbers that an operator can see of a scheduler, for metrics and logs."""

from __future__ import annotations

from dataclasses import dataclass

from ..radix.cache import RadixCache
from ..radix.lease import LeaseTable
from .batch_builder import PlannedStep


@dataclass(slots=True)
class SchedulerCounters:
    """Counted by the scheduler since start. The prefix cache counts tokens of prompts."""

    steps: int = 0
    retractions: int = 0
    leaked_tokens: int = 0
    nonfinite_requests: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    longest_gap: int = 0

    def count_step(self, step: PlannedStep) -> None:
        self.steps += 1
        self.longest_gap = max(self.longest_gap, step.longest_gap)

    def count_admissions(self, step: PlannedStep) -> None:
        """Note what the requests of an extend step found in the cache; each counts once."""
        for request, prefix_len in zip(step.requests, step.batch.prefix_lens.tolist()):
            if request.queried:
                continue
            request.queried = True
            if request.inheritance is not None:
                inherited = request.inheritance.inherited_tokens
                request.inheritance.recomputed_tokens = max(0, inherited - prefix_len)
            self.prefix_cache_queries += request.prompt_len
            self.prefix_cache_hits += prefix_len


@dataclass(slots=True, frozen=True)
class SchedulerStats:
    """A snapshot; token counts exclude the padding page, counters run since start."""

    num_running_reqs: int
    num_queue_reqs: int
    total_tokens: int
    free_tokens: int
    evictable_tokens: int
    protected_tokens: int
    private_tokens: int
    leased_tokens: int
    leases_granted: int
    leases_handed_off: int
    leases_expired: int
    leases_broken: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    evicted_tokens: int
    retractions: int
    leaked_tokens: int
    nonfinite_requests: int
    steps: int
    longest_gap: int
    """In steps: between two tokens of a running request, since start."""


def take_stats(
    counters: SchedulerCounters, cache: RadixCache, leases: LeaseTable, num_running: int, num_waiting: int
) -> SchedulerStats:
    allocator = cache.allocator
    free, evictable, protected = allocator.free_tokens, cache.evictable_tokens, cache.protected_tokens
    return SchedulerStats(
        num_running_reqs=num_running,
        num_queue_reqs=num_waiting,
        total_tokens=allocator.total_tokens,
        free_tokens=free,
        evictable_tokens=evictable,
        protected_tokens=protected,
        private_tokens=allocator.total_tokens - free - evictable - protected - allocator.quarantined_tokens,
        leased_tokens=leases.leased_tokens,
        leases_granted=leases.counts.granted,
        leases_handed_off=leases.counts.handed_off,
        leases_expired=leases.counts.expired,
        leases_broken=leases.counts.broken,
        prefix_cache_queries=counters.prefix_cache_queries,
        prefix_cache_hits=counters.prefix_cache_hits,
        evicted_tokens=cache.evicted_total,
        retractions=counters.retractions,
        leaked_tokens=counters.leaked_tokens,
        nonfinite_requests=counters.nonfinite_requests,
        steps=counters.steps,
        longest_gap=counters.longest_gap,
    )
