"""What an operator can see of a scheduler: plain numbers, for metrics and logs."""

from __future__ import annotations

from dataclasses import dataclass


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
    steps: int
