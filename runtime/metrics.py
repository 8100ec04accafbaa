"""A server's Prometheus metrics. Names start with ``baton:``; the rest is standard in the field.

The HTTP process owns all of them: request metrics come from the TokenizerManager, cache and queue metrics from the
worker's once-a-second `SchedulerStats`. Time to first token and inter-token latency exist for streamed requests only:
the others get their tokens all at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from ..radix.kv_lives import SECONDS
from ..scheduler.cache_stats import DEPTHS, NOT_COUNTED, Buckets, CacheStats, HitTokens
from ..scheduler.outcome import CacheReport, FoundTokens, missed_by_reason
from ..scheduler.stats import CopyStats, SchedulerStats, TierStats
from .messages import TokenOutput
from .prompt import Prompt

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_FIRST_TOKEN_BUCKETS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160)
_INTER_TOKEN_BUCKETS = (0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
_LATENCY_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)

# Metric name -> (field of SchedulerStats, help); a dot leads into a part. Counters grow with the totals, gauges follow.
_WORKER_COUNTERS = {
    "prefix_cache_queries": ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    "evicted_tokens": ("evicted_tokens", "Tokens evicted from the prefix cache."),
    "num_retractions": ("retractions", "Running requests sent back to the queue because the KV pool was full."),
    "num_steps": ("steps", "Forward steps."),
    "spec_verify": ("drafts.verified", "Times that a step verified guessed tokens of a request."),
    "spec_draft_tokens": ("drafts.drafted", "Tokens that were guessed, and verified."),
    "spec_accepted_tokens": ("drafts.accepted", "Guessed tokens that are part of an output."),
    "leases_granted": ("leases_granted", "Leases on the KV of finished requests."),
    "leases_handed_off": ("leases_handed_off", "Leases that a continuation took over."),
    "leases_expired": ("leases_expired", "Leases that no continuation claimed in time."),
    "leases_broken": ("leases_broken", "Leases ended early because memory was needed more."),
    "num_failed": ("failed_requests", "Requests ended because the server failed while handling them."),
    "num_nonfinite": ("nonfinite_requests", "Requests ended because the model's logits were NaN or infinite."),
    "leaked_tokens": ("leaked_tokens", "KV slots without an owner that the self-check reclaimed."),
    "states_evicted": ("states.evicted", "Recurrent states that the prefix cache gave up."),
    "leaked_states": ("states.leaked", "Recurrent states without a holder that the self-check reclaimed."),
    "window_pool_evicted_tokens": (
        "window_pool.evicted_tokens",
        "Tokens of cached prefixes whose K and V in layers with a sliding window were evicted.",
    ),
    "leaked_window_tokens": (
        "window_pool.leaked_tokens",
        "Slots of the pool for sliding windows without an owner that the self-check reclaimed.",
    ),
    "prepared_tokens": ("preparations.computed_tokens", "Tokens of next prompts that were computed in idle time."),
    "prepared_tokens_used": ("preparations.used_tokens", "Prepared tokens that the next turn found in the cache."),
    "prepared_turns": ("preparations.completed", "Next prompts prepared as far as they were known."),
    "preparation_steps": ("preparations.steps", "Forward steps that computed part of a next prompt in idle time."),
    "pins": ("jobs.pins", "Steps of jobs with KV pinned for the job's next step."),
    "pin_hits": ("jobs.hits", "Pins that the job's next step took over."),
    "pins_expired": ("jobs.expired", "Pins that expired before the job returned."),
    "pins_broken": ("jobs.broken", "Pins ended early because memory was needed more."),
    "pins_released": ("jobs.released", "Pins released because their job had ended or continued with other steps."),
    "pins_demoted": ("jobs.demoted", "Expired or broken pins with a copy on a tier below the device."),
    "pin_slot_seconds": ("jobs.slot_seconds", "Tokens × seconds that pins held."),
    "pin_saved_tokens": ("jobs.saved_tokens", "Tokens of pins that were taken over instead of being recomputed."),
    "tool_returns": ("jobs.tool_returns", "Returns of jobs after a step that called tools."),
    "tool_away_seconds": ("jobs.tool_away_s", "Seconds that these jobs were away."),
    "user_returns": ("jobs.user_returns", "Returns of jobs after a step without calls: the user wrote again."),
    "user_away_seconds": ("jobs.user_away_s", "Seconds that the users of these jobs took."),
    "pin_returned_tokens": ("jobs.returned_tokens", "Tokens that were pinned when their job returned."),
    "pin_returned_hit_tokens": (
        "jobs.returned_hit_tokens",
        "Returned tokens found by the job's next step; fewer where a chat template drops the model's reasoning.",
    ),
}
_WORKER_GAUGES = {
    "num_running_reqs": ("num_running_reqs", "Requests in the running batch."),
    "num_queue_reqs": ("num_queue_reqs", "Requests in the waiting queue."),
    "kv_cache_total_tokens": ("total_tokens", "KV slots in the pool."),
    "kv_bytes_per_token": (
        "bytes_per_token",
        "Bytes of a token in the KV pool and on the tiers below it, without layers that have a pool of their own.",
    ),
    "kv_cache_free_tokens": ("free_tokens", "KV slots on the free list."),
    "kv_cache_evictable_tokens": ("evictable_tokens", "KV slots of cached prefixes that no request uses."),
    "kv_cache_protected_tokens": ("protected_tokens", "KV slots of cached prefixes that requests use."),
    "jobs": ("jobs.jobs", "Jobs on record."),
    "leased_tokens": ("leased_tokens", "KV slots that leases keep for continuations."),
    "kv_cache_private_tokens": ("private_tokens", "KV slots that belong to one request."),
    "kv_cache_quarantined_tokens": (
        "quarantined_tokens",
        "KV slots that were freed while a step or a copy still uses them.",
    ),
    "states_total": ("states.total", "Recurrent states that fit the pool; 0 for models without."),
    "states_free": ("states.free", "Slots of recurrent states on the free list."),
    "states_cached": ("states.in_tree", "Recurrent states of cached prefixes."),
    "states_kept": ("states.kept", "Of these, newest turn ends and shared beginnings, which go last."),
    "states_held": ("states.held", "Slots of recurrent states that requests, leases or cached prefixes use."),
    "window_pool_total_tokens": (
        "window_pool.total_tokens",
        "Slots of the pool for layers with a sliding window; 0 for models without one.",
    ),
    "window_pool_free_tokens": ("window_pool.free_tokens", "Slots of this pool on the free list."),
    "window_pool_evictable_tokens": (
        "window_pool.evictable_tokens",
        "Slots of this pool that belong to cached prefixes and that no request or lease holds.",
    ),
    "open_fences": ("open_fences", "Steps, and copies between tiers, that have not ended."),
    "longest_token_gap_steps": ("longest_gap", "Most steps from one token of a running request to its next, so far."),
    "fill_time_seconds": (
        "fill_time_s",
        "Time to compute a whole pool of KV, measured lately: KV that idles for longer costs more than it saves.",
    ),
}

# The same for the tiers below the device, by the fields of TierStats and of its CopyStats.
_TIER_GAUGES = {
    "tier_total_tokens": ("total_tokens", "Capacity of the tier, in tokens."),
    "tier_used_tokens": ("used_tokens", "Tokens of prefixes that the tier holds or is storing."),
    "tier_free_tokens": ("free_tokens", "Unused capacity, in tokens."),
    "tier_total_bytes": ("total_bytes", "Bytes that the disk tier may use; disk only."),
    "tier_used_bytes": ("used_bytes", "Bytes that its blocks use, headers included; disk only."),
    "tier_quarantined_tokens": ("quarantined_tokens", "Tokens that the tier has freed while a copy still uses them."),
    "tier_copies_under_way": ("copies_under_way", "Copies to and from the tier in progress."),
    "tier_total_states": ("total_states", "Recurrent states that the tier has room for; 0 for models without."),
    "tier_used_states": ("used_states", "Recurrent states that the tier holds or is storing."),
}
_TIER_COUNTERS = {
    "tier_evicted_tokens": ("evicted_tokens", "Tokens that the tier evicted."),
    "tier_no_room_tokens": (
        "no_room_tokens",
        "Tokens that were not stored because nothing in the tier could be evicted.",
    ),
    "tier_stored_states": ("stored_states", "Recurrent states stored on the tier."),
    "tier_loaded_states": ("loaded_states", "Recurrent states loaded from the tier."),
    "tier_evicted_states": ("evicted_states", "Recurrent states that the tier evicted."),
    "tier_no_room_states": (
        "no_room_states",
        "Recurrent states that were not stored because nothing on the host could be evicted.",
    ),
}
_COPY_COUNTERS = {
    "tier_copied_tokens": ("tokens", "Tokens copied to the tier (store) and from it (load)."),
    "tier_copy_seconds": ("seconds", "Duration of these copies, in seconds."),
    "tier_failed_tokens": ("failed_tokens", "Tokens of failed copies."),
}
_DIRECTIONS = {"store": "stores", "load": "loads"}


class TierMetrics:
    """Metrics of the KV cache's tiers, by ``tier``; those of copies also by ``direction``."""

    def __init__(self, registry: CollectorRegistry, model_name: str) -> None:
        self._model_name = model_name
        self._last: dict[str, TierStats] = {}
        self._last_hits = FoundTokens()
        tier, copy = ["model_name", "tier"], ["model_name", "tier", "direction"]

        def counters(table: dict[str, tuple[str, str]], labels: list[str]) -> dict[str, Counter]:
            return {f: Counter(f"baton:{name}", help, labels, registry=registry) for name, (f, help) in table.items()}

        self._hits = Counter(
            "baton:tier_hits", "Prompt tokens found in the prefix cache, by where they were.", tier, registry=registry
        )
        self._gauges = {
            field: Gauge(f"baton:{name}", help, tier, registry=registry) for name, (field, help) in _TIER_GAUGES.items()
        }
        self._counters = counters(_TIER_COUNTERS, tier)
        self._copies = counters(_COPY_COUNTERS, copy)
        self._bytes = Counter("baton:tier_copied_bytes", "Bytes of these tokens.", copy, registry=registry)
        self._rates = Gauge(
            "baton:tier_copy_tokens_per_second", "Speed of copies, measured lately.", copy, registry=registry
        )

    def update(self, stats: SchedulerStats) -> None:
        for name in FoundTokens.__struct_fields__:
            if name == "device" or any(tier.tier == name for tier in stats.tiers):
                grown = getattr(stats.hits_by_tier, name) - getattr(self._last_hits, name)
                self._hits.labels(self._model_name, name).inc(max(0, grown))
        self._last_hits = stats.hits_by_tier
        for tier in stats.tiers:
            self._update_tier(tier, self._last.get(tier.tier, TierStats(tier.tier)), stats.bytes_per_token)
            self._last[tier.tier] = tier

    def _update_tier(self, tier: TierStats, last: TierStats, bytes_per_token: int) -> None:
        labels = (self._model_name, tier.tier)
        for field, gauge in self._gauges.items():
            if (value := getattr(tier, field)) is not None:
                gauge.labels(*labels).set(value)
        for field, counter in self._counters.items():
            counter.labels(*labels).inc(max(0, getattr(tier, field) - getattr(last, field)))
        for direction, way in _DIRECTIONS.items():
            now, before = getattr(tier, way), getattr(last, way)
            self._update_copies((*labels, direction), now, before, bytes_per_token)

    def _update_copies(
        self, labels: tuple[str, str, str], now: CopyStats, before: CopyStats, bytes_per_token: int
    ) -> None:
        for field, counter in self._copies.items():
            counter.labels(*labels).inc(max(0, getattr(now, field) - getattr(before, field)))
        self._bytes.labels(*labels).inc(max(0, now.tokens - before.tokens) * bytes_per_token)
        if now.tokens_per_s is not None:
            self._rates.labels(*labels).set(now.tokens_per_s)


# Metric name -> (field of CacheTotals, help).
_COUNTERS = {
    "prefix_cache_prompts": ("prompts", "Prompts looked up in the prefix cache; each of n samples is one."),
    "prefix_cache_stored_tokens": ("stored_tokens", "Tokens added to the prefix cache on the device."),
    "evicted_nodes": ("evicted_nodes", "Nodes of the prefix cache's tree that were evicted from the device."),
    "evicted_retired_tokens": (
        "retired_tokens",
        "Evicted tokens that their job or request had marked as not reusable.",
    ),
    "evicted_to_host_tokens": ("to_host_tokens", "Evicted tokens with a copy on the host."),
    "evicted_sampled_tokens": (
        "recorded_tokens",
        "Sample of evicted tokens without a copy, watched until the pool has been evicted once more.",
    ),
    "evicted_too_early_tokens": ("recomputed_tokens", "Sampled evicted tokens that were computed again meanwhile."),
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
    "evicted_idle_seconds": ("idle_time", SECONDS, "Evicted tokens, by the time since their last use."),
    "prefix_cache_reuse_gap_seconds": (
        "reuse_gap",
        SECONDS,
        "Tokens found again or taken over, by how long ago their path had been used, or stored.",
    ),
}


class CacheMetrics(Collector):
    """A collector for a registry; it shows ``stats``."""

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
            "Share of prompt tokens found in the prefix cache; label window: the period in seconds.",
            labels=["model_name", "window"],
        )
        for window in self.stats.windows:
            if (rate := window.hit_rate) is not None:
                rates.add_metric([self._model_name, str(window.seconds)], rate)
        return rates


def _cumulative(buckets: Buckets, bounds: tuple[float, ...]) -> list[tuple[str, float]]:
    """(upper bound, tokens up to it) pairs, as the Prometheus format requires."""
    counts = buckets.counts or (0,) * (len(bounds) + 1)
    found: list[tuple[str, float]] = []
    below = 0
    for bound, count in zip((*bounds, float("inf")), counts, strict=True):
        below += count
        found.append((floatToGoString(bound), below))
    return found


class ServerMetrics:
    """All metrics of one server, in a registry of their own, labelled with the model's served name."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._last = SchedulerStats()

        def counter(name: str, help: str) -> Counter:
            return Counter(f"baton:{name}", help, ["model_name"], registry=self.registry).labels(model_name)

        def gauge(name: str, help: str) -> Gauge:
            return Gauge(f"baton:{name}", help, ["model_name"], registry=self.registry).labels(model_name)

        def histogram(name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
            metric = Histogram(f"baton:{name}", help, ["model_name"], registry=self.registry, buckets=buckets)
            return metric.labels(model_name)

        self.num_requests = counter("num_requests", "Prompts accepted.")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens accepted.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.cached_tokens = counter("cached_tokens", "Prompt tokens of finished outputs that came from the cache.")
        self.num_aborted_requests = counter("num_aborted_requests", "Calls whose client left before their end.")
        self.recorded_requests = counter("recorded_requests", "Requests written to the log of --record-requests.")
        self.unrecorded_requests = counter(
            "unrecorded_requests", "Requests that this log lacks: it could not be written, or not fast enough."
        )
        self._finished = Counter(
            "baton:request_success", "Outputs that ended, by reason.", ["model_name", "finished_reason"],
            registry=self.registry,
        )  # fmt: skip
        self._finished_by_reason: dict[str, Counter] = {}
        labels = ["model_name", "reason"]
        self._missed_tokens = Counter(
            "baton:cache_missed_tokens", "Prompt tokens of finished outputs that were computed, by reason.", labels,
            registry=self.registry,
        )  # fmt: skip
        self._missed_requests = Counter(
            "baton:cache_missed_requests", "Finished outputs with such tokens, by reason.", labels,
            registry=self.registry,
        )  # fmt: skip
        self._refused = Counter(
            "baton:num_errors", "Calls refused or failed, by HTTP status.", ["model_name", "status"],
            registry=self.registry,
        )  # fmt: skip
        self._normalized = Counter(
            "baton:normalized_prefix_tokens", "Prompt tokens that --normalize-prefix took, by rule.",
            ["model_name", "rule"], registry=self.registry,
        )  # fmt: skip
        self._dropped_preparations = Counter(
            "baton:preparations_dropped", "Next prompts not prepared, or not to their end, by reason.", labels,
            registry=self.registry,
        )  # fmt: skip
        self._diverged = Counter(
            "baton:conversation_divergences", "Chats that part from the last turn of their conversation, by kind.",
            ["model_name", "kind"], registry=self.registry,
        )  # fmt: skip
        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From arrival to the first token; streamed requests.", _FIRST_TOKEN_BUCKETS
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Between tokens of an output; streamed requests.", _INTER_TOKEN_BUCKETS
        )
        self.e2e_request_latency = histogram(
            "e2e_request_latency_seconds", "From arrival to the last token.", _LATENCY_BUCKETS
        )
        self._counters = {field: counter(name, help) for name, (field, help) in _WORKER_COUNTERS.items()}
        self._gauges = {field: gauge(name, help) for name, (field, help) in _WORKER_GAUGES.items()}
        self._usage = gauge("kv_cache_usage_perc", "Share of KV slots in use, 0 to 1; evictable slots are not in use.")
        self._prefill_rate = gauge("prefill_tokens_per_second", "Prompt tokens computed per second, measured lately.")
        self._tiers = TierMetrics(self.registry, model_name)
        self._cache = CacheMetrics(model_name)
        self.registry.register(self._cache)

    def output_finished(self, reason: str) -> None:
        if reason not in self._finished_by_reason:
            self._finished_by_reason[reason] = self._finished.labels(self._model_name, reason)
        self._finished_by_reason[reason].inc()

    def count_misses(self, report: CacheReport | None) -> None:
        """Count why the prompt of a finished output was not found; None: it has no report."""
        for reason, tokens in missed_by_reason(report).items():
            self._missed_tokens.labels(self._model_name, reason).inc(tokens)
            self._missed_requests.labels(self._model_name, reason).inc()

    def call_refused(self, status: int) -> None:
        self._refused.labels(self._model_name, str(status)).inc()

    def prefix_normalized(self, rule: str, tokens: int) -> None:
        self._normalized.labels(self._model_name, rule).inc(tokens)

    def conversation_diverged(self, kind: str) -> None:
        self._diverged.labels(self._model_name, kind).inc()

    def worker_reported(self, stats: SchedulerStats) -> None:
        """Update the metrics from the worker's stats. Their totals only grow."""
        for field, metric in self._counters.items():
            value = attrgetter(field)
            metric.inc(max(0, value(stats) - value(self._last)))
        for field, metric in self._gauges.items():
            metric.set(attrgetter(field)(stats))
        if stats.total_tokens:
            in_use = stats.total_tokens - stats.free_tokens - stats.evictable_tokens
            self._usage.set(in_use / stats.total_tokens)
        if stats.prefill_tokens_per_s is not None:
            self._prefill_rate.set(stats.prefill_tokens_per_s)
        for reason, count in stats.preparations.dropped.items():
            grown = count - self._last.preparations.dropped.get(reason, 0)
            self._dropped_preparations.labels(self._model_name, reason).inc(max(0, grown))
        self._tiers.update(stats)
        self._cache.stats = stats.cache
        self._last = stats

    def render(self) -> bytes:
        """Render the text that Prometheus scrapes."""
        return generate_latest(self.registry)


class RequestMeter:
    """Counts the tokens, latencies and finished outputs of one request."""

    def __init__(self, metrics: ServerMetrics, prompt: Prompt, *, started: float, streams: bool) -> None:
        """started: when its call arrived, on the clock of `count_output`."""
        self._metrics = metrics
        self._started: float | None = started
        self._streams = streams
        self._is_search = prompt.sampling.beam_width is not None
        self._is_continuation = prompt.continuation is not None
        self._last_token_at: dict[int, float] = {}
        """Sample -> when its last token came; streamed requests only."""

    def caller_left(self) -> None:
        """The caller has left: record no more latencies that count from arrival."""
        self._started = None

    def count_output(self, output: TokenOutput, now: float) -> None:
        metrics, num_new = self._metrics, len(output.new_ids) // 4
        metrics.generation_tokens.inc(num_new)
        if self._streams and num_new:
            self._count_gaps(output.index, num_new, now)
        if output.finish is None:
            return
        metrics.output_finished(output.finish.type)
        # All results of a search count as one.
        if output.index == 0 or not self._is_search:
            metrics.cached_tokens.inc(output.found.total)
            metrics.count_misses(output.cache_report)
            if self._is_continuation and output.index == 0:
                metrics.prompt_tokens.inc(output.prompt_tokens)  # the parent's length is known only now
            if self._started is not None:
                metrics.e2e_request_latency.observe(now - self._started)

    def _count_gaps(self, sample: int, num_new: int, now: float) -> None:
        last = self._last_token_at.get(sample)
        if last is not None:
            gap = (now - last) / num_new
            for _ in range(num_new):
                self._metrics.inter_token_latency.observe(gap)
        elif self._started is not None:
            self._metrics.time_to_first_token.observe(now - self._started)
        self._last_token_at[sample] = now
