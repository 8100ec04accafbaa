"""Prometheus metrics of the prefix cache's use, straight from the worker's counts: they are cumulative already, and its
buckets are histograms as they are."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ..radix.statistics.spread import SECONDS
from ..scheduler.cache_statistics.cache_stats import DEPTHS, NOT_COUNTED, Buckets, CacheStats, HitTokens

# Metric name -> (field of CacheTotals, help).
_COUNTERS = {
    "prefix_cache_prompts": ("prompts", "Prompts looked up in the prefix cache; each of n samples is one."),
    "prefix_cache_stored_tokens": ("stored_tokens", "Tokens whose KV was put into the prefix cache on the device."),
    "evicted_nodes": ("evicted_nodes", "Nodes of the prefix cache's tree that were evicted from the device."),
    "evicted_retired_tokens": (
        "retired_tokens",
        "Of the evicted tokens: those that nobody was to come back for, as their job or request had said.",
    ),
    "evicted_to_host_tokens": ("to_host_tokens", "Of the evicted tokens: those that have a copy on the host."),
    "evicted_sampled_tokens": (
        "recorded_tokens",
        "Of the evicted tokens without a copy: a sample, watched until the pool has been evicted once more.",
    ),
    "evicted_too_early_tokens": ("recomputed_tokens", "Of that sample: tokens that were computed again meanwhile."),
}
_HISTOGRAMS = {
    "prefix_cache_query_depth_tokens": (
        "query_depth",
        DEPTHS,
        "Prompt tokens looked up in the prefix cache, by their position in the prompt.",
    ),
    "prefix_cache_hit_depth_tokens": (
        "hit_depth",
        DEPTHS,
        "Prompt tokens found in the prefix cache, by their position in the prompt.",
    ),
    "evicted_lifetime_seconds": ("lifetime", SECONDS, "Evicted tokens, by how long they had been in the cache."),
    "evicted_idle_seconds": ("idle_time", SECONDS, "Evicted tokens, by how long nobody had used them."),
    "prefix_cache_reuse_gap_seconds": (
        "reuse_gap",
        SECONDS,
        "Tokens found again or taken over, by how long ago their path had been used, or stored.",
    ),
}


class CacheMetrics(Collector):
    """A collector for a registry; ``stats`` is what it shows."""

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self.stats: CacheStats = NOT_COUNTED

    def collect(self) -> Iterator[Metric]:
        totals, model = self.stats.totals, [self._model_name]
        for name, (field, about) in _COUNTERS.items():
            counter = CounterMetricFamily(f"baton:{name}", about, labels=["model_name"])
            counter.add_metric(model, getattr(totals, field))
            yield counter
        hits = CounterMetricFamily(
            "baton:prefix_cache_hits_by_kind", "Prompt tokens found in the prefix cache, by how.",
            labels=["model_name", "kind"],
        )  # fmt: skip
        for kind in HitTokens.__struct_fields__:
            hits.add_metric([*model, kind], getattr(totals.hits, kind))
        yield hits
        for name, (field, bounds, about) in _HISTOGRAMS.items():
            histogram = HistogramMetricFamily(f"baton:{name}", about, labels=["model_name"])
            buckets: Buckets = getattr(totals, field)
            histogram.add_metric(model, _cumulative(buckets, bounds), buckets.sum)
            yield histogram
        yield self._hit_rates()
        alert = GaugeMetricFamily(
            "baton:hit_rate_alert", "1 while the hit rate is below --hit-rate-alert.", labels=["model_name"]
        )
        alert.add_metric(model, int(self.stats.alert))
        yield alert

    def _hit_rates(self) -> Metric:
        rates = GaugeMetricFamily(
            "baton:prefix_cache_hit_rate",
            "Share of the prompt tokens that were found in the prefix cache in the last so many seconds.",
            labels=["model_name", "window"],
        )
        for window in self.stats.windows:
            if (rate := window.hit_rate) is not None:
                rates.add_metric([self._model_name, str(window.seconds)], rate)
        return rates


def _cumulative(buckets: Buckets, bounds: tuple[float, ...]) -> list[tuple[str, float]]:
    """(upper bound, tokens up to it), as the format has it."""
    counts = buckets.counts or (0,) * (len(bounds) + 1)
    found: list[tuple[str, float]] = []
    below = 0
    for bound, count in zip((*bounds, float("inf")), counts, strict=True):
        below += count
        found.append((floatToGoString(bound), below))
    return found
