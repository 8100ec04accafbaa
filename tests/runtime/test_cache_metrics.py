"""What the worker reports of the cache is what Prometheus reads."""

from __future__ import annotations

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from baton.radix.kv_lives import SECONDS
from baton.runtime.metrics import ServerMetrics
from baton.scheduler.cache_stats import (
    DEPTHS,
    Buckets,
    CacheStats,
    CacheTotals,
    HitTokens,
    WindowStats,
)
from baton.scheduler.stats import SchedulerStats
from tests.doubles.kv_echo import prompt_of
from tests.doubles.scheduler_harness import Harness


def read(metrics: ServerMetrics) -> dict[str, dict[tuple[str, ...], float]]:
    """Sample -> values of its labels, the model left out -> value."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = tuple(value for name, value in sample.labels.items() if name != "model_name")
            found.setdefault(sample.name.removeprefix("baton:"), {})[labels] = sample.value
    return found


def counts(of: dict[int, int], bounds: tuple[float, ...]) -> tuple[int, ...]:
    return tuple(of.get(bucket, 0) for bucket in range(len(bounds) + 1))


TOTALS = CacheTotals(
    prompts=1,
    query_tokens=1000,
    hits=HitTokens(2, 3, 4, 5, 6, 7),
    query_depth=Buckets(counts({0: 128, 1: 72}, DEPTHS), 20100.0),
    hit_depth=Buckets(counts({0: 27}, DEPTHS), 378.0),
    stored_tokens=8,
    evicted_nodes=9,
    evicted_tokens=10,
    retired_tokens=11,
    to_host_tokens=12,
    recorded_tokens=13,
    recomputed_tokens=14,
    given_up_tokens=15,
    lifetime=Buckets(counts({2: 10, 16: 5}, SECONDS), 99.5),
    idle_time=Buckets(counts({0: 1}, SECONDS), 0.05),
    reuse_gap=Buckets(counts({16: 3}, SECONDS), 300_000.0),
)
WINDOWS = (WindowStats(60), WindowStats(300, 300.0, 2, 80, HitTokens(match=20)))


def test_every_number_has_its_metric() -> None:
    metrics = ServerMetrics("m")
    metrics.worker_reported(SchedulerStats(cache=CacheStats(TOTALS, 16.0, WINDOWS, alert=True)))
    found = read(metrics)
    for name, value in {
        "prefix_cache_prompts_total": 1,
        "prefix_cache_stored_tokens_total": 8,
        "evicted_nodes_total": 9,
        "evicted_retired_tokens_total": 11,
        "evicted_to_host_tokens_total": 12,
        "evicted_sampled_tokens_total": 13,
        "evicted_too_early_tokens_total": 14,
        "hit_rate_alert": 1,
    }.items():
        assert found[name] == {(): value}, name
    kinds = ("handoff", "fork", "match", "host", "disk", "remote")
    assert found["prefix_cache_hits_by_kind_total"] == {(kind,): 2 + i for i, kind in enumerate(kinds)}
    assert found["prefix_cache_hit_rate"] == {("300",): 0.25}, "nothing was asked in the last minute"


def test_histograms_are_cumulative() -> None:
    metrics = ServerMetrics("m")
    metrics.worker_reported(SchedulerStats(cache=CacheStats(TOTALS)))
    found = read(metrics)
    depth = found["prefix_cache_query_depth_tokens_bucket"]
    assert depth["128.0",] == 128 and depth["256.0",] == depth["+Inf",] == 200 and len(depth) == len(DEPTHS) + 1
    assert found["prefix_cache_query_depth_tokens_sum"] == {(): 20100}
    assert found["prefix_cache_query_depth_tokens_count"] == {(): 200}
    assert found["prefix_cache_hit_depth_tokens_count"] == {(): 27}
    life = found["evicted_lifetime_seconds_bucket"]
    assert [life[f"{bound}",] for bound in (0.25, 0.5, 86400.0)] == [0, 10, 10] and life["+Inf",] == 15
    assert found["evicted_lifetime_seconds_sum"] == {(): 99.5}
    assert found["evicted_idle_seconds_bucket"]["0.1",] == 1
    assert found["prefix_cache_reuse_gap_seconds_bucket"]["86400.0",] == 0
    assert found["prefix_cache_reuse_gap_seconds_count"] == {(): 3}


def test_cache_metrics_exist_before_worker_reports() -> None:
    found = read(ServerMetrics("m"))
    assert found["evicted_lifetime_seconds_count"] == {(): 0} and found["hit_rate_alert"] == {(): 0}
    assert len(found["prefix_cache_query_depth_tokens_bucket"]) == len(DEPTHS) + 1
    assert "prefix_cache_hit_rate" not in found


def test_statistics_reset_lowers_no_counter() -> None:
    """The whole way: a scheduler's stats, as the heartbeat that the HTTP process decodes."""
    harness, metrics = Harness(num_tokens=96, context=96), ServerMetrics("m")
    before: dict[str, dict[tuple[str, ...], float]] = {}
    for number in range(8):
        harness.add(f"r{number}", [*prompt_of(30, 1), *prompt_of(40, number)], 2)
        harness.run()
        if number == 5:
            harness.scheduler.reset_cache_statistics()
        stats = harness.scheduler.stats()
        metrics.worker_reported(msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=SchedulerStats))
        after = read(metrics)
        for name, values in before.items():
            if name.endswith(("_total", "_count", "_bucket", "_sum")):
                assert all(after[name][labels] >= value for labels, value in values.items()), name
        before = after
    assert before["prefix_cache_hits_by_kind_total"]["match",] == before["prefix_cache_hits_total"][()] == 7 * 30
    assert before["evicted_lifetime_seconds_count"] == before["evicted_tokens_total"] != {(): 0}
    assert before["prefix_cache_hit_depth_tokens_count"] == before["prefix_cache_hits_total"]


def test_the_window_pool_has_its_metrics() -> None:
    harness, metrics = Harness(window=20, window_tokens=256, num_tokens=1024, chunk=64), ServerMetrics("m")
    for number in range(5):
        harness.add(f"r{number}", prompt_of(100, number), 2)
        harness.run()
    stats = harness.scheduler.stats()
    metrics.worker_reported(msgspec.msgpack.decode(msgspec.msgpack.encode(stats), type=SchedulerStats))
    found, pool = read(metrics), stats.window_pool
    names = {"total_tokens": 256, "free_tokens": pool.free_tokens, "evictable_tokens": pool.evictable_tokens}
    names["evicted_tokens_total"] = pool.evicted_tokens
    assert pool.free_tokens + pool.evictable_tokens == 256 and 0 < pool.free_tokens < 256 and pool.evicted_tokens > 0
    assert {name: found[f"window_pool_{name}"][()] for name in names} == names
    assert found["leaked_window_tokens_total"][()] == 0
