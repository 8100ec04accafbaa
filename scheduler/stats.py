"""The numbers that an operator can see of a scheduler, for metrics and logs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from ..radix.cache import RadixCache
from ..radix.lease import LeaseTable
from ..radix.node_states import NodeStates
from ..radix.node_windows import NodeWindows
from .batch_builder import PlannedStep
from .cache_stats import NOT_COUNTED, CacheStats
from .outcome import NO_DRAFTS, DraftCounts, FoundTokens
from .request import Request, RequestEvent


@dataclass(slots=True)
class SchedulerCounters:
    """Counted by the scheduler since start. The prefix cache counts tokens of prompts."""

    steps: int = 0
    retractions: int = 0
    leaked_tokens: int = 0
    leaked_states: int = 0
    leaked_window_tokens: int = 0
    nonfinite_requests: int = 0
    failed_requests: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: FoundTokens = FoundTokens()
    longest_gap: int = 0
    computed_prompt_tokens: int = 0
    output_tokens: int = 0

    def count_step(self, step: PlannedStep) -> list[Request]:
        """Count a step, and what its prompts found in the cache. Returns the requests that were admitted with it: each
        once, whatever becomes of it later."""
        self.steps += 1
        if not step.is_preparation:
            self.computed_prompt_tokens += step.num_prompt_tokens
        self.longest_gap = max(self.longest_gap, step.longest_gap)
        admitted = [request for request in step.requests[: step.num_prompts] if not request.queried]
        for request in admitted:
            request.queried = True
            if request.inheritance is not None:
                request.inheritance.note_admitted(request.found)
            self.prefix_cache_queries += request.prompt_len
            self.prefix_cache_hits += request.found
        return admitted

    def count_outputs(self, events: Sequence[RequestEvent], searches: Sequence[Request]) -> None:
        """Note what a step has brought: the tokens of these events, and one for each beam of these searches."""
        self.output_tokens += sum(len(event.token_ids) for event in events)
        self.output_tokens += sum(search.num_rows for search in searches)


@dataclass(slots=True, frozen=True)
class CopyStats:
    """Copies in one direction, since start."""

    tokens: int = 0
    seconds: float = 0.0
    """Duration of the copies themselves, summed."""
    tokens_per_s: float | None = None
    """Measured lately; None until enough has been copied."""
    failed_tokens: int = 0


@dataclass(slots=True, frozen=True)
class TierStats:
    """One tier; token counts exclude the padding page, counters run since start."""

    tier: str
    """host, disk or remote."""
    total_tokens: int | None = 0
    """None, like the next two, for a store that does not know how full it is."""
    used_tokens: int | None = 0
    """Tokens of prefixes with a copy here or being stored; on disk, of all blocks, including earlier servers'."""
    free_tokens: int | None = 0
    total_bytes: int | None = None
    """Bytes that the tier may take; None where they follow from the tokens."""
    used_bytes: int | None = None
    quarantined_tokens: int = 0
    """Freed, but not reusable until a copy that still touches them ends."""
    copies_under_way: int = 0
    """Copies that were ordered and have not ended."""
    evicted_tokens: int = 0
    no_room_tokens: int = 0
    """Tokens not stored, because nothing could be evicted for them."""
    stores: CopyStats = field(default_factory=CopyStats)
    """Copies to this tier."""
    loads: CopyStats = field(default_factory=CopyStats)
    """Copies from this tier."""
    total_states: int | None = 0
    """Recurrent states that it can hold; None, like the next, where that is unknown."""
    used_states: int | None = 0
    stored_states: int = 0
    """Since start, like the next three."""
    loaded_states: int = 0
    evicted_states: int = 0
    no_room_states: int = 0
    """Not stored, because nothing could be evicted for them."""


@dataclass(slots=True)
class JobStats:
    """Since start. A hit is a pin that the job's next step took over; slot-seconds are tokens × seconds under pins.
    `PinManager` counts in one of its own, and returns copies."""

    jobs: int = 0
    """Jobs known now."""
    pins: int = 0
    hits: int = 0
    expired: int = 0
    broken: int = 0
    released: int = 0
    demoted: int = 0
    """Expired or broken pins with a copy on a tier below the device."""
    slot_seconds: float = 0.0
    saved_tokens: int = 0
    """Tokens that were not computed again, because a pin was taken over."""
    returned_tokens: int = 0
    """Tokens that were pinned when the job's next step arrived."""
    tool_returns: int = 0
    """Returns of jobs with a last step that called tools."""
    tool_away_s: float = 0.0
    user_returns: int = 0
    """Returns of jobs with a last step that called nothing: the user wrote again."""
    user_away_s: float = 0.0
    returned_hit_tokens: int = 0
    """Returned tokens that the step found in the cache; fewer where a template drops the model's reasoning."""


@dataclass(slots=True, frozen=True)
class PreparationStats:
    """Next turns prepared in idle time (preparations.py), since start."""

    pending: int = 0
    """Preparations that wait or are under way now."""
    steps: int = 0
    completed: int = 0
    computed_tokens: int = 0
    used_tokens: int = 0
    """Prepared tokens that the next turns found."""
    dropped: dict[str, int] = field(default_factory=dict)
    """Preparations that ended early, by reason; see `preparations.Drop`."""


@dataclass(slots=True, frozen=True)
class StateStats:
    """Recurrent states, by slots; all 0 for models without."""

    total: int = 0
    free: int = 0
    in_tree: int = 0
    """Carried by nodes of the prefix cache."""
    kept: int = 0
    """Of these, the newest turn ends and places where several continue: they are evicted after all others."""
    held: int = 0
    """Named by requests, leases or nodes."""
    quarantined: int = 0
    evicted: int = 0
    """Since start."""
    leaked: int = 0
    """Without a holder, and freed by the self-check, since start."""


@dataclass(slots=True, frozen=True)
class WindowPoolStats:
    """The pool of layers with a sliding window, in tokens; all 0 for models without."""

    total_tokens: int = 0
    free_tokens: int = 0
    evictable_tokens: int = 0
    """Beside cached prefixes, and held by no sequence."""
    evicted_tokens: int = 0
    """Since start."""
    leaked_tokens: int = 0
    """Without an owner, and freed by the self-check, since start."""


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A snapshot; token counts exclude the padding page, counters run since start.

    It is also the message that the worker sends once a second: its heartbeat, and the source of its metrics.
    """

    num_running_reqs: int = 0
    num_queue_reqs: int = 0
    total_tokens: int = 0
    free_tokens: int = 0
    evictable_tokens: int = 0
    protected_tokens: int = 0
    private_tokens: int = 0
    leased_tokens: int = 0
    leases_granted: int = 0
    leases_handed_off: int = 0
    leases_expired: int = 0
    leases_broken: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    evicted_tokens: int = 0
    retractions: int = 0
    leaked_tokens: int = 0
    nonfinite_requests: int = 0
    failed_requests: int = 0
    steps: int = 0
    longest_gap: int = 0
    """Most steps between two tokens of a running request, since start."""
    quarantined_tokens: int = 0
    open_fences: int = 0
    """Steps and copies that have not ended."""
    hits_by_tier: FoundTokens = FoundTokens()
    """``prefix_cache_hits``, by where they were found."""
    prefill_tokens_per_s: float | None = None
    """Measured lately; None until enough has been computed."""
    fill_time_s: float = 0.0
    """T_fill (policies/fill_time.py): the break-even time of idle KV."""
    bytes_per_token: int = 0
    """Bytes of KV per token, on every tier; 0 where unknown."""
    tiers: tuple[TierStats, ...] = ()
    """The tiers below the device."""
    jobs: JobStats = JobStats()
    preparations: PreparationStats = PreparationStats()
    states: StateStats = StateStats()
    window_pool: WindowPoolStats = WindowPoolStats()
    drafts: DraftCounts = NO_DRAFTS
    computed_prompt_tokens: int = 0
    """Computed tokens of prompts, and of retracted requests."""
    output_tokens: int = 0
    """Generated; of a search, in all beams."""
    cache: CacheStats = NOT_COUNTED


def take_stats(
    counters: SchedulerCounters,
    cache: RadixCache,
    leases: LeaseTable,
    *,
    num_running: int,
    num_waiting: int,
    prefill_tokens_per_s: float | None,
    fill_time_s: float,
    bytes_per_token: int,
    tiers: tuple[TierStats, ...],
    jobs: JobStats,
    preparations: PreparationStats,
    drafts: DraftCounts,
    cache_stats: CacheStats,
) -> SchedulerStats:
    """Build a snapshot from the figures of all owners."""
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
        prefix_cache_hits=counters.prefix_cache_hits.total,
        evicted_tokens=cache.evicted_total,
        retractions=counters.retractions,
        leaked_tokens=counters.leaked_tokens,
        nonfinite_requests=counters.nonfinite_requests,
        failed_requests=counters.failed_requests,
        steps=counters.steps,
        longest_gap=counters.longest_gap,
        quarantined_tokens=allocator.quarantined_tokens,
        open_fences=len(allocator.fences),
        hits_by_tier=counters.prefix_cache_hits,
        prefill_tokens_per_s=prefill_tokens_per_s,
        fill_time_s=fill_time_s,
        bytes_per_token=bytes_per_token,
        tiers=tiers,
        jobs=jobs,
        preparations=preparations,
        states=_state_stats(cache.states, counters.leaked_states),
        window_pool=_window_stats(cache.windows, counters.leaked_window_tokens),
        drafts=drafts,
        computed_prompt_tokens=counters.computed_prompt_tokens,
        output_tokens=counters.output_tokens,
        cache=cache_stats,
    )


def _state_stats(states: NodeStates | None, leaked: int) -> StateStats:
    if states is None:
        return StateStats()
    slots = states.slots
    return StateStats(
        total=slots.total,
        free=slots.free,
        in_tree=len(states),
        kept=states.num_kept,
        held=slots.held,
        quarantined=slots.quarantined,
        evicted=states.evicted_total,
        leaked=leaked,
    )


def _window_stats(windows: NodeWindows | None, leaked: int) -> WindowPoolStats:
    if windows is None:
        return WindowPoolStats()
    pages = windows.pages
    return WindowPoolStats(
        total_tokens=pages.total_tokens,
        free_tokens=pages.free_tokens,
        evictable_tokens=pages.evictable_tokens,
        evicted_tokens=windows.evicted_total,
        leaked_tokens=leaked,
    )
