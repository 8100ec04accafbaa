"""What the scheduler says of its tiers, on the KV-echo model."""

from __future__ import annotations

import pytest

from baton.radix.tiers.host_tier import TierCopy
from baton.scheduler.outcome import FoundTokens
from baton.scheduler.stats import CopyStats, TierStats
from tests.doubles.kv_echo import expected_output, prompt_of
from tests.doubles.scheduler_harness import Harness


def test_stats_list_no_tiers_without_offload() -> None:
    assert Harness().scheduler.stats().tiers == ()


def test_stats_fields_have_expected_values() -> None:
    harness = Harness(host_tokens=64, page_size=4)
    harness.add("a", prompt_of(41), 1)
    harness.run()
    harness.add("b", prompt_of(41, 1), 1)
    harness.run()
    harness.cache.evict(10**9)
    harness.add("again", prompt_of(41, 1), 1)
    harness.step()
    assert harness.tiers is not None
    counts = harness.tiers.host.counts
    counts.no_room, counts.failed_stores, counts.failed_loads = 5, 6, 7
    stats = harness.scheduler.stats()
    host = TierStats(
        "host",
        total_tokens=64,
        used_tokens=64,
        copies_under_way=1,
        evicted_tokens=16,
        no_room_tokens=5,
        stores=CopyStats(tokens=80, failed_tokens=6),
        loads=CopyStats(failed_tokens=7),
    )
    assert stats.tiers == (host,) and stats.open_fences == 2 - 1 and stats.quarantined_tokens == 0
    harness.run()
    (host,) = harness.scheduler.stats().tiers
    assert host.loads.tokens == 40 and host.copies_under_way == 0
    assert harness.scheduler.stats().hits_by_tier == FoundTokens(host=40)
    assert harness.scheduler.stats().prefix_cache_hits == 40


def test_copy_rates_are_measured_per_direction() -> None:
    harness = Harness(num_tokens=4096, context=2100, host_tokens=4096, chunk=4096)
    harness.add("a", prompt_of(2001), 1)
    harness.step()
    scheduler = harness.scheduler
    (store,) = scheduler.take_transfer_orders(0.0)
    assert isinstance(store, TierCopy)
    assert scheduler.stats().open_fences == 1 and scheduler._offload.copies_under_way == 1
    scheduler.finish_copy(store.fence, True, 1.0, seconds=0.5)
    harness.cache.evict(10**9)
    harness.add("again", prompt_of(2001), 1)
    assert scheduler.next_batch(2.0) is not None
    (load,) = scheduler.take_transfer_orders(2.0)
    assert isinstance(load, TierCopy)
    scheduler.finish_copy(load.fence, False, 3.0, seconds=0.25)
    (host,) = scheduler.stats().tiers
    assert (host.stores.tokens, host.stores.seconds, host.stores.tokens_per_s) == (2001, 0.5, pytest.approx(4002))
    assert host.loads == CopyStats(failed_tokens=2000), "a copy that failed says nothing of how fast copies are"


def test_leaking_host_pool_fails_no_request(caplog: pytest.LogCaptureFixture) -> None:
    harness = Harness(host_tokens=64, page_size=4)
    harness.add("a", prompt_of(41), 8)
    harness.step()
    assert harness.tiers is not None
    harness.tiers.host.tokens -= 4
    assert harness.scheduler.self_check(1.0) == [] and "the host's KV pool does not add up by 4 tokens" in caplog.text
    harness.run()
    assert harness.outcomes["a", 0].tokens == expected_output(prompt_of(41), 8)


def test_copies_in_flight_are_waited_for_before_retraction() -> None:
    harness = Harness(num_tokens=70, host_tokens=64)
    harness.add("done", prompt_of(20), 1)
    harness.step()
    held = harness.scheduler.take_transfer_orders(harness.now)  # nobody carries them out: what they copy is locked
    assert len(held) == 1 and harness.tiers is not None
    harness.add("long", prompt_of(10, 1), 50)
    for _ in range(60):
        harness.step()
    long = harness.outcomes["long", 0]
    assert long.finish is None and 30 < len(long.tokens) < 45 and harness.scheduler.stats().retractions == 0
    harness.tiers.order(held)
    harness.run()
    assert long.tokens == expected_output(prompt_of(10, 1), 50) and harness.scheduler.stats().retractions == 0
