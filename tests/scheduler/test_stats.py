"""The numbers that an operator sees of a scheduler are those of the pool, the cache, the leases and the counters."""

from __future__ import annotations

import msgspec

from baton.memory_pool.allocator import Allocator
from baton.memory_pool.req_to_token import ReqToTokenPool
from baton.radix.cache import RadixCache
from baton.radix.lease import LeaseTable
from baton.scheduler.cache_stats import CacheStats
from baton.scheduler.config import SchedulerConfig
from baton.scheduler.limits import lease_budget
from baton.scheduler.outcome import DraftCounts, FoundTokens
from baton.scheduler.stats import (
    JobStats,
    PreparationStats,
    SchedulerCounters,
    StateStats,
    TierStats,
    WindowPoolStats,
    take_stats,
)
from tests.doubles.kv_echo import prompt_of
from tests.doubles.scheduler_harness import Harness


def test_stats_fields_have_expected_values() -> None:
    allocator = Allocator(64, 16)
    cache = RadixCache(ReqToTokenPool(4, 64), allocator, page_size=16)
    leases = LeaseTable(cache, lease_budget(SchedulerConfig(), allocator), value=lambda lease, now: (0.0,))
    counters = SchedulerCounters(
        steps=1,
        retractions=2,
        leaked_tokens=3,
        nonfinite_requests=4,
        failed_requests=5,
        prefix_cache_queries=5,
        prefix_cache_hits=FoundTokens(1, 2, 0, 3),
        longest_gap=7,
        computed_prompt_tokens=23,
        output_tokens=24,
    )
    cache.evicted_total = 8
    counts = leases.counts
    counts.granted, counts.handed_off, counts.expired, counts.broken = 9, 10, 11, 12
    tiers = (TierStats("host", total_tokens=15),)
    allocator.fences.open_fence()
    jobs = JobStats(jobs=18, pins=19)
    taken = take_stats(
        counters,
        cache,
        leases,
        num_running=13,
        num_waiting=14,
        prefill_tokens_per_s=16.0,
        fill_time_s=27.0,
        bytes_per_token=17,
        tiers=tiers,
        jobs=jobs,
        preparations=PreparationStats(pending=25, steps=26),
        drafts=DraftCounts(20, 21, 22),
        cache_stats=CacheStats(seconds=23.0),
    )
    stats = msgspec.structs.asdict(taken)
    assert stats == {
        "num_running_reqs": 13,
        "num_queue_reqs": 14,
        "total_tokens": 64,
        "free_tokens": 64,
        "evictable_tokens": 0,
        "protected_tokens": 0,
        "private_tokens": 0,
        "leased_tokens": 0,
        "leases_granted": 9,
        "leases_handed_off": 10,
        "leases_expired": 11,
        "leases_broken": 12,
        "prefix_cache_queries": 5,
        "prefix_cache_hits": 6,
        "evicted_tokens": 8,
        "retractions": 2,
        "leaked_tokens": 3,
        "nonfinite_requests": 4,
        "failed_requests": 5,
        "steps": 1,
        "longest_gap": 7,
        "quarantined_tokens": 0,
        "open_fences": 1,
        "hits_by_tier": FoundTokens(1, 2, 0, 3),
        "prefill_tokens_per_s": 16.0,
        "fill_time_s": 27.0,
        "bytes_per_token": 17,
        "tiers": tiers,
        "jobs": jobs,
        "preparations": PreparationStats(pending=25, steps=26),
        "states": StateStats(),
        "window_pool": WindowPoolStats(),
        "drafts": DraftCounts(20, 21, 22),
        "computed_prompt_tokens": 23,
        "output_tokens": 24,
        "cache": CacheStats(seconds=23.0),
    }


def test_pool_tokens_add_up_in_stats() -> None:
    harness = Harness(num_tokens=256, page_size=16, depth=2)
    harness.add("cached", prompt_of(40, 1), 2)
    harness.add("leased", prompt_of(40, 2), 2, retain_ttl=1e6)
    harness.run()
    harness.add("runs", prompt_of(40, 3), 9)
    harness.add("ends", prompt_of(40, 4), 30)
    for _ in range(3):
        harness.step()
    harness.abort("ends")
    stats, quarantined = harness.scheduler.stats(), harness.allocator.quarantined_tokens
    assert (stats.leased_tokens, stats.num_running_reqs, stats.num_queue_reqs) == (48, 1, 0)
    assert stats.evictable_tokens and stats.protected_tokens and stats.private_tokens and quarantined
    parts = stats.free_tokens + stats.evictable_tokens + stats.protected_tokens + stats.private_tokens
    assert parts + quarantined == stats.total_tokens == 256 and stats.quarantined_tokens == quarantined


def test_computed_tokens_include_retracted_work() -> None:
    harness = Harness(num_tokens=96, chunk=32, rows=4)
    for number in range(3):
        harness.add(f"r{number}", prompt_of(20, number), 40, ignore_eos=True)
    harness.run()
    stats = harness.scheduler.stats()
    outputs = sum(len(outcome.tokens) for outcome in harness.outcomes.values())
    assert stats.retractions and stats.output_tokens == outputs == 120
    assert stats.computed_prompt_tokens > 60


def test_output_tokens_count_each_beam() -> None:
    harness = Harness()
    harness.add("s", prompt_of(20, 1), 5, beam_width=3, n=2, ignore_eos=True)
    harness.run()
    stats = harness.scheduler.stats()
    assert (stats.computed_prompt_tokens, stats.output_tokens) == (20, 15)


def test_cache_hits_count_once_per_request() -> None:
    harness = Harness(chunk=16)
    harness.add("a", prompt_of(40, 1), 2)
    harness.run()
    harness.add("b", [*prompt_of(30, 1), 5, 6], 2)
    harness.run()
    stats = harness.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (40 + 32, 30)


def test_states_are_counted_where_they_are() -> None:
    harness = Harness(states=8)
    harness.add("a", prompt_of(40), 4, retain_ttl=9.0)
    harness.run()
    harness.add("b", [*prompt_of(30), 1, 2], 4)
    harness.run()  # states: where the two part, where each may be sent again, and where each ended
    found = harness.scheduler.stats().states
    assert found == StateStats(total=8, free=3, in_tree=5, kept=3, held=5)
    harness.add("c", prompt_of(30, 1), 4)
    harness.step()
    assert harness.scheduler.stats().states.held == 7
    harness.cache.evict_states(2, kept_too=True)
    assert harness.scheduler.stats().states.evicted == 2


def test_the_report_names_what_no_state_makes_usable() -> None:
    harness = Harness(states=8)
    harness.add("a", prompt_of(40), 4)
    harness.run()
    harness.add("b", [*prompt_of(30), 1, 2], 4)
    harness.run()
    request = harness.outcomes["b", 0].request
    assert request is not None and request.cache_report is not None
    report = request.cache_report
    assert [(span.reason, span.tokens) for span in report.missed] == [("no_state", 30), ("unseen", 1), ("required", 1)]
