"""The metrics of the tiers follow what the worker reports of them."""

from __future__ import annotations

import re

import msgspec

from baton.runtime.metrics import ServerMetrics
from baton.scheduler.outcome import FoundTokens
from baton.scheduler.stats import CopyStats, SchedulerStats, TierStats


def values(metrics: ServerMetrics) -> dict[str, float]:
    """Name, tier and direction -> value."""
    found: dict[str, float] = {}
    for name, labels, value in re.findall(r"^baton:(\w+)\{(.*?)\} (\S+)$", metrics.render().decode(), re.MULTILINE):
        given = dict(re.findall(r'(\w+)="(.*?)"', labels))
        if name.startswith("tier_") and not name.endswith("_created"):
            found[" ".join([name, *(given[key] for key in ("tier", "direction") if key in given)])] = float(value)
    return found


HOST = TierStats(
    "host",
    total_tokens=100,
    used_tokens=60,
    free_tokens=30,
    quarantined_tokens=10,
    copies_under_way=2,
    evicted_tokens=7,
    no_room_tokens=8,
    stores=CopyStats(tokens=50, seconds=0.5, failed_tokens=3),
    loads=CopyStats(tokens=20, seconds=0.25, failed_tokens=4, tokens_per_s=80.0),
    total_states=6,
    used_states=5,
    stored_states=11,
    loaded_states=12,
    evicted_states=13,
    no_room_states=14,
)


def test_every_number_has_its_metric() -> None:
    metrics = ServerMetrics("m")
    metrics.worker_reported(SchedulerStats(tiers=(HOST,), bytes_per_token=16, hits_by_tier=FoundTokens(9, 5)))
    assert values(metrics) == {
        "tier_hits_total device": 9,
        "tier_hits_total host": 5,
        "tier_total_tokens host": 100,
        "tier_used_tokens host": 60,
        "tier_free_tokens host": 30,
        "tier_quarantined_tokens host": 10,
        "tier_copies_under_way host": 2,
        "tier_evicted_tokens_total host": 7,
        "tier_no_room_tokens_total host": 8,
        "tier_total_states host": 6,
        "tier_used_states host": 5,
        "tier_stored_states_total host": 11,
        "tier_loaded_states_total host": 12,
        "tier_evicted_states_total host": 13,
        "tier_no_room_states_total host": 14,
        "tier_copied_tokens_total host store": 50,
        "tier_copied_tokens_total host load": 20,
        "tier_copied_bytes_total host store": 800,
        "tier_copied_bytes_total host load": 320,
        "tier_copy_seconds_total host store": 0.5,
        "tier_copy_seconds_total host load": 0.25,
        "tier_failed_tokens_total host store": 3,
        "tier_failed_tokens_total host load": 4,
        "tier_copy_tokens_per_second host load": 80,
    }


def test_only_a_disk_reports_how_full_it_is() -> None:
    metrics = ServerMetrics("m")
    disk = TierStats("disk", 640, 128, 512, total_bytes=10_000, used_bytes=2_000)
    metrics.worker_reported(SchedulerStats(tiers=(disk, TierStats("remote", None, None, None)), bytes_per_token=16))
    shown = values(metrics)
    assert (shown["tier_total_tokens disk"], shown["tier_used_tokens disk"], shown["tier_free_tokens disk"]) == (
        640, 128, 512,
    )  # fmt: skip
    assert (shown["tier_total_bytes disk"], shown["tier_used_bytes disk"]) == (10_000, 2_000)
    assert "tier_total_tokens remote" not in shown and "tier_used_bytes remote" not in shown


def test_counters_grow_with_the_totals_and_gauges_follow() -> None:
    metrics = ServerMetrics("m")
    first = SchedulerStats(tiers=(HOST,), bytes_per_token=16, hits_by_tier=FoundTokens(9, 5), quarantined_tokens=3)
    more = msgspec.structs.replace(
        first,
        tiers=(TierStats("host", evicted_tokens=17, loads=CopyStats(tokens=21)), TierStats("disk", evicted_tokens=5)),
        hits_by_tier=FoundTokens(9, 6, 2),
        prefill_tokens_per_s=1234.0,
        open_fences=4,
    )
    for stats in (first, more, more):
        metrics.worker_reported(stats)
    shown = values(metrics)
    assert (shown["tier_hits_total host"], shown["tier_hits_total disk"], shown["tier_hits_total device"]) == (6, 2, 9)
    assert (shown["tier_evicted_tokens_total host"], shown["tier_evicted_tokens_total disk"]) == (17, 5)
    assert shown["tier_copied_bytes_total host load"] == 21 * 16 and shown["tier_total_tokens host"] == 0
    text = metrics.render().decode()
    assert 'baton:prefill_tokens_per_second{model_name="m"} 1234.0' in text
    assert 'baton:open_fences{model_name="m"} 4.0' in text
    assert 'baton:kv_cache_quarantined_tokens{model_name="m"} 3.0' in text


def test_metrics_without_tiers_show_only_the_device() -> None:
    metrics = ServerMetrics("m")
    metrics.worker_reported(SchedulerStats(hits_by_tier=FoundTokens(4)))
    assert values(metrics) == {"tier_hits_total device": 4}
