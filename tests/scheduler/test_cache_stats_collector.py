"""What a scheduler counts of its cache: on scenes with numbers by hand, and in simulations beside a slow twin."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any

import pytest

from baton.radix.kv_lives import SECONDS, Histogram, KVLives
from baton.radix.node import TreeNode
from baton.scheduler.cache_stats import DEPTHS, CacheStats, CacheTotals, HitTokens, WindowStats, describe
from baton.scheduler.cache_stats_collector import (
    ALERT_WINDOW_S,
    MIN_PROMPTS,
    SLOT_S,
    WINDOWS_S,
    CacheStatsCollector,
    Depths,
    HitRateAlert,
    RollingWindows,
)
from tests.doubles.kv_echo import prompt_of
from tests.doubles.scheduler_harness import PAGES, Harness
from tests.doubles.simulation import SEED, Simulation
from tests.doubles.tier_rig import FakeBlocks


def totals(harness: Harness) -> CacheTotals:
    return harness.scheduler.stats().cache.totals


def asked(harness: Harness) -> tuple[int, int, HitTokens]:
    found = totals(harness)
    return found.prompts, found.query_tokens, found.hits


# -- by hand -----------------------------------------------------------------------------------------------------------


def test_match_counts_tokens_by_depth() -> None:
    harness = Harness(num_tokens=2048, context=1024, chunk=1024)
    harness.add("a", prompt_of(300, 1), 1)
    harness.run()
    harness.add("b", [*prompt_of(200, 1), 5, 6], 1)
    harness.run()
    assert asked(harness) == (2, 502, HitTokens(match=200))
    found = totals(harness)
    assert found.query_depth.counts[:4] == (256, 128 + 74, 44, 0)
    assert found.hit_depth.counts[:4] == (128, 72, 0, 0)
    rows = describe(harness.scheduler.stats().cache, 0.0)["depth"]
    assert [(row["from"], row["to"], row["hit_rate"]) for row in rows] == [
        (0, 128, 0.5),
        (128, 256, 72 / 202),
        (256, 512, 0.0),
    ]


@PAGES
def test_handoff_is_counted_separately_from_match(page_size: int) -> None:
    harness = Harness(page_size=page_size)
    harness.add("parent", prompt_of(100, 1), 4, retain_ttl=1e6)
    harness.run()
    harness.continue_from("parent", "child", [7, 8, 9], 2)
    harness.run()
    # Of 107 tokens 103 are computed: the last that was sampled never was.
    assert asked(harness) == (2, 100 + 107, HitTokens(handoff=103))
    assert totals(harness).reuse_gap.tokens == 103 // page_size * page_size, "what was in the tree was used again"


def test_continuation_after_broken_lease_counts_as_match() -> None:
    harness = Harness()
    harness.add("parent", prompt_of(100, 1), 4, retain_ttl=1e6)
    harness.run()
    harness.scheduler._leases.break_all()
    harness.continue_from("parent", "child", [7, 8, 9], 2)
    harness.run()
    assert asked(harness) == (2, 207, HitTokens(match=103))


def test_fork_hits_are_counted_separately() -> None:
    harness = Harness()
    harness.add("parent", prompt_of(100, 1), 20)
    for _ in range(4):
        harness.step()
    harness.continue_from("parent", "child", [7, 8], 2, at="now")
    harness.run()
    prompts, _, hits = asked(harness)
    assert prompts == 2 and hits.fork >= 100 and hits == HitTokens(fork=hits.fork)


def test_host_hits_are_counted_separately() -> None:
    harness = Harness(num_tokens=128, host_tokens=512, context=128)
    harness.add("a", prompt_of(60, 1), 1)
    harness.run()
    for number in range(2, 5):
        harness.add(f"other{number}", prompt_of(100, number), 1)
        harness.run()
    before = totals(harness)
    assert before.to_host_tokens > 60 and before.recorded_tokens == 0
    harness.add("again", [*prompt_of(60, 1), 3], 1)
    harness.run()
    assert (totals(harness) - before).hits == HitTokens(host=60)
    assert (totals(harness) - before).reuse_gap.tokens == 60


def test_disk_hits_have_no_reuse_gap() -> None:
    blocks, prompt = (FakeBlocks(), FakeBlocks()), prompt_of(161, 1)
    first = Harness(host_tokens=512, block_tokens=16, blocks=blocks)
    first.add("first", prompt, 1)
    first.run()
    harness = Harness(host_tokens=512, block_tokens=16, blocks=blocks)
    harness.add("again", prompt, 1)
    harness.run()
    found = totals(harness)
    assert found.hits == HitTokens(disk=160) and found.reuse_gap.tokens == 0, "it may be a year old"
    harness.now += 100.0
    harness.add("once more", prompt, 1)
    harness.run()
    found = totals(harness)
    assert found.hits == HitTokens(match=160, disk=160) and found.reuse_gap.counts[SECONDS.index(120.0)] == 160
    harness.cache.evict(160)
    found = totals(harness)
    assert found.evicted_tokens >= 160 and found.lifetime.tokens == found.evicted_tokens - 160


@pytest.mark.parametrize("options", [{"n": 3}, {"beam_width": 3, "n": 3}])
def test_each_sample_counts_but_a_search_counts_once(options: dict[str, Any]) -> None:
    harness = Harness(rows=8)
    harness.add("a", prompt_of(50, 1), 4, **options)
    harness.run()
    prompts, queries, hits = asked(harness)
    assert prompts == (1 if "beam_width" in options else 3) and queries == 50 * prompts
    assert hits.total == 49 * (prompts - 1)


def test_retracted_requests_count_once() -> None:
    harness = Harness(num_tokens=96, rows=4, context=96)
    for number in range(4):
        harness.add(f"r{number}", prompt_of(12, number), 60, ignore_eos=True)
    harness.run()
    assert harness.scheduler.stats().retractions > 0
    assert asked(harness) == (4, 48, HitTokens())


def test_waiting_requests_count_once() -> None:
    harness = Harness(num_tokens=128, rows=4, context=128)
    harness.add("runs", prompt_of(40, 1), 60, ignore_eos=True)
    harness.step()
    harness.add("waits", [*prompt_of(40, 1), *prompt_of(60, 2)], 20, ignore_eos=True)
    for _ in range(30):
        harness.step()
    assert asked(harness)[0] == 1
    harness.run()
    assert asked(harness) == (2, 140, HitTokens(match=40))


def test_disabled_cache_has_only_handoff_hits() -> None:
    harness = Harness(disable_radix_cache=True)
    harness.add("parent", prompt_of(100, 1), 4, retain_ttl=1e6)
    harness.run()
    harness.add("same", prompt_of(100, 1), 4)
    harness.continue_from("parent", "child", [7], 2)
    harness.run()
    assert asked(harness) == (3, 305, HitTokens(handoff=103))
    assert totals(harness).stored_tokens == 0


def test_cached_tokens_live_from_processing_of_their_step() -> None:
    harness = Harness()
    harness.add("a", prompt_of(50, 1), 1)
    batch = harness.scheduler.next_batch(100.0)
    assert batch is not None
    harness.scheduler.process_result(harness.model.forward(batch, None), 140.0)  # 50 tokens enter the tree
    assert harness.scheduler.next_batch(160.0) is None
    harness.cache.evict(50)
    assert totals(harness).lifetime.sum == 50 * 20


def test_statistics_windows_and_reset() -> None:
    harness = Harness()
    harness.turn_s = 10.0
    harness.add("a", prompt_of(50, 1), 1)
    harness.run()
    began, at = 10.0, harness.now
    statistics = harness.scheduler._cache_statistics
    for _ in range(8):
        harness.step()
    harness.add("b", [*prompt_of(40, 1), 1], 1)
    harness.run()
    stats = harness.scheduler.stats().cache
    assert [(w.seconds, w.prompts, w.hits.total) for w in stats.windows] == [(60, 1, 40), (300, 2, 40), (900, 2, 40)]
    assert stats.windows[0].hit_rate == 40 / 41 and stats.seconds == harness.now - began > harness.now - at
    assert statistics.since_reset() == stats
    statistics.reset()
    reset_at = harness.now
    fresh = statistics.since_reset()
    zero = CacheTotals()
    assert (fresh.totals.prompts, fresh.totals.hits, fresh.totals.hit_depth.tokens) == (0, zero.hits, 0)
    assert fresh.totals.lifetime.tokens == fresh.totals.stored_tokens == 0
    assert [window.prompts for window in fresh.windows] == [0, 0, 0]
    harness.add("c", [*prompt_of(30, 1), 1], 1)
    harness.run()
    fresh, since_start = statistics.since_reset(), harness.scheduler.stats().cache
    assert (fresh.totals.prompts, fresh.totals.hits) == (1, HitTokens(match=30))
    assert (since_start.totals.prompts, since_start.totals.hits) == (3, HitTokens(match=70))
    assert fresh.seconds == harness.now - reset_at and since_start.seconds == harness.now - began


def test_statistics_reset_before_first_request_changes_nothing() -> None:
    harness = Harness()
    harness.scheduler.reset_cache_statistics()
    harness.now = 5000.0
    harness.add("a", prompt_of(50, 1), 1)
    harness.run()
    stats = harness.scheduler.cache_stats_since_reset()
    assert stats.totals.prompts == 1 and stats.seconds < 100


class AlertScene:
    """One prompt a second, so many of whose hundred tokens are in the cache."""

    def __init__(self, threshold: float) -> None:
        self.harness = Harness(num_tokens=4096, context=256, chunk=256, hit_rate_alert=threshold)
        self.harness.check_every = 9
        self.statistics = self.harness.scheduler._cache_statistics
        self._sent = 0
        self._hot = prompt_of(99, 1)
        self.send(0, 1)

    def send(self, found: int, count: int) -> None:
        for _ in range(count):
            self._sent += 1
            tail = [1000 + self._sent, *prompt_of(99 - found, 100 + self._sent)]
            self.harness.add(f"r{self._sent}", [*self._hot[:found], *tail], 1)
            self.harness.step()
            self.harness.step()

    @property
    def active(self) -> bool:
        return self.harness.scheduler.stats().cache.alert


def test_alert_follows_hit_rate_of_window(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "baton.scheduler.cache_stats_collector")
    scene = AlertScene(0.5)
    scene.harness.add("hot", prompt_of(99, 1), 1)
    scene.send(0, 140)  # two turns of a second each
    assert not scene.active, "the cache has had no time to fill"
    scene.send(0, 20)
    assert scene.active and len(caplog.messages) == 1
    scene.send(0, 100)
    assert scene.active and len(caplog.messages) == 1
    scene.send(98, 200)
    assert not scene.active and len(caplog.messages) == 2
    assert scene.harness.scheduler.flush_cache()
    scene.harness.add("hot again", prompt_of(99, 1), 1)
    scene.send(0, ALERT_WINDOW_S // 2 - 10)
    assert not scene.active, "it was emptied on purpose"
    scene.send(0, 20)
    assert scene.active and len(caplog.messages) == 3
    assert scene.harness.scheduler.flush_cache()
    scene.send(0, 5)
    assert not scene.active
    scene.send(0, ALERT_WINDOW_S // 2 + 5)
    assert scene.active and len(caplog.messages) == 4
    scene.statistics.reset()
    assert not scene.active
    for _ in range(ALERT_WINDOW_S + 20):
        scene.harness.step()
    assert not scene.active and len(caplog.messages) == 4


# -- beside a slow twin ------------------------------------------------------------------------------------------------


class Twin:
    """Knows of every token when it was stored and used, by all the tokens up to the end of its page."""

    def __init__(self, statistics: CacheStatsCollector, page_size: int) -> None:
        self._statistics, self._page_size = statistics, page_size
        self.born: dict[tuple, float] = {}
        self.seen: dict[tuple, float] = {}
        self.stored_tokens = self.evicted_nodes = 0
        self.lifetime, self.idle_time, self.reuse_gap = [], [], []

    def now(self) -> float:
        return self._statistics._now

    def tokens(self, node: TreeNode) -> list[tuple]:
        """A name for each token of a node."""
        above, keys = node, []
        while above.parent is not None:
            keys.append(above.key)
            above, top = above.parent, above
        if not keys:
            return []
        whole = b"".join(reversed(keys))
        namespace = top.child_key[0]  # type: ignore[index]
        first, page = node.prefix_len - len(node), self._page_size
        ends = [(position // page + 1) * page for position in range(first, node.prefix_len)]
        return [(namespace, position, whole[: 4 * end]) for position, end in enumerate(ends, first)]

    def node_stored(self, node: TreeNode) -> None:
        self.stored_tokens += len(node.value)
        if node.host is None:
            for token in self.tokens(node):
                self.born[token] = self.seen[token] = self.now()

    def path_used(self, node: TreeNode, tick: int) -> None:
        if tokens := self.tokens(node):
            self.reuse_gap += [self.now() - self.seen[tokens[-1]]] * node.prefix_len
        for token in tokens:
            self.seen[token] = self.now()

    def nodes_removed(self, nodes: Sequence[TreeNode]) -> None:
        for node in nodes:
            tokens = self.tokens(node)
            if node.on_device or not len(node.value):
                continue
            self.evicted_nodes += 1
            self.lifetime += [self.now() - self.born[token] for token in tokens]
            self.idle_time += [self.now() - self.seen[token] for token in tokens]
            for token in self.tokens(node.parent):  # type: ignore[arg-type]
                self.seen[token] = max(self.seen[token], self.seen[tokens[-1]])

    def cache_cleared(self) -> None:
        self.born.clear()
        self.seen.clear()


def spread(values: list[float]) -> tuple[list[int], float]:
    counts = [0] * (len(SECONDS) + 1)
    for value in values:
        counts[next((i for i, bound in enumerate(SECONDS) if value <= bound), len(SECONDS))] += 1
    return counts, sum(values)


def check(simulation: Simulation, twin: Twin) -> CacheTotals:
    scheduler, cache = simulation.harness.scheduler, simulation.harness.cache
    stats = scheduler.stats()
    found = stats.cache.totals
    assert found.query_tokens == stats.prefix_cache_queries == found.query_depth.tokens
    assert found.hits.total == stats.prefix_cache_hits == found.hit_depth.tokens
    by_tier = stats.hits_by_tier
    assert (found.hits.host, found.hits.disk, found.hits.remote) == (by_tier.host, by_tier.disk, by_tier.remote)
    assert all(hit <= query for hit, query in zip(found.hit_depth.counts, found.query_depth.counts))
    assert found.evicted_tokens == cache.evicted_total == found.lifetime.tokens == found.idle_time.tokens
    assert found.evicted_nodes == twin.evicted_nodes and found.stored_tokens == twin.stored_tokens
    assert found.retired_tokens <= found.evicted_tokens and found.recomputed_tokens <= found.recorded_tokens
    assert found.to_host_tokens + found.recorded_tokens <= found.evicted_tokens
    for mine, theirs in zip(
        (found.lifetime, found.idle_time, found.reuse_gap), (twin.lifetime, twin.idle_time, twin.reuse_gap)
    ):
        counts, total = spread(theirs)
        assert list(mine.counts) == counts and mine.sum == pytest.approx(total)
    return found


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"page_size": 16},
        {"jobs": True, "unwanted": 0.3},
        {"host_ratio": 0.5},
        {"host_ratio": 0.5, "faults": True, "page_size": 4},
        {"depth": 2, "faults": True},
        {"disable_radix_cache": True},
    ],
    ids=str,
)
def test_cache_statistics_match_twin_in_simulation(options: dict[str, Any]) -> None:
    print("seed", SEED)
    seen = HitTokens()
    evicted = to_host = retired = 0
    for seed in range(SEED, SEED + 6):
        simulation = Simulation(seed, grammars=False, check_every=9, **options)
        statistics, page_size = simulation.harness.scheduler._cache_statistics, simulation.harness.config.page_size
        twin = Twin(statistics, page_size)
        simulation.harness.cache.watchers.add_watcher(twin)
        simulation.run(steps=150)
        found = check(simulation, twin)
        seen += found.hits
        evicted += found.evicted_tokens
        to_host += found.to_host_tokens
        retired += found.retired_tokens
    assert seen.handoff and seen.fork
    assert bool(seen.match) == bool(evicted) == (not options.get("disable_radix_cache"))
    assert bool(to_host) == ("host_ratio" in options) >= bool(seen.host)
    assert bool(retired) == ("jobs" in options)


def test_statistics_register_one_cache_watcher() -> None:
    harness = Harness()
    assert [type(watcher) for watcher in harness.cache.watchers].count(KVLives) == 1
    assert harness.scheduler.stats().cache == CacheStats(
        totals=totals(harness), windows=harness.scheduler.stats().cache.windows
    )
    assert Histogram(SECONDS).counts == list(totals(harness).lifetime.counts)


class TestDepths:
    def test_by_hand(self) -> None:
        depths = Depths()
        for length in (0, 1, 128, 129, 300, 600):
            depths.add_prefix(length)
        found = depths.buckets()
        assert found.counts[:5] == (1 + 128 + 128 + 128 + 128, 1 + 128 + 128, 44 + 256, 88, 0)
        assert found.tokens == 1 + 128 + 129 + 300 + 600
        assert found.sum == sum(n * (n + 1) // 2 for n in (1, 128, 129, 300, 600))

    @pytest.mark.parametrize("seed", range(5))
    def test_depth_buckets_match_slow_twin(self, seed: int) -> None:
        rng = random.Random(seed)
        depths, twin = Depths(), [0] * (len(DEPTHS) + 1)
        lengths = [rng.choice([2**power + off for power in range(12) for off in (-1, 0, 1)]) for _ in range(30)]
        for length in lengths:
            depths.add_prefix(length)
            for position in range(1, length + 1):
                twin[next((i for i, bound in enumerate(DEPTHS) if position <= bound), len(DEPTHS))] += 1
        assert depths.buckets().counts == tuple(twin)

    def test_last_depth_bucket_holds_longest_prompts(self) -> None:
        depths = Depths()
        depths.add_prefix(DEPTHS[-1] + 5)
        assert depths.buckets().counts[-2:] == (DEPTHS[-1] // 2, 5)


def snapshot(count: int) -> CacheTotals:
    return CacheTotals(
        prompts=count, query_tokens=100 * count, hits=HitTokens(match=40 * count, disk=count), evicted_tokens=7 * count
    )


class TestRollingWindows:
    def test_by_hand(self) -> None:
        windows = RollingWindows()
        for now in range(0, 200, 5):
            assert windows.is_due(now)
            windows.add_snapshot(snapshot(now), now)
            assert not windows.is_due(now + 4.9)
        window = windows.last(60, snapshot(300), 198.0)  # since the snapshot at 135, the last one that is 60 s old
        assert (window.prompts, window.covered_s) == (165, 63.0)
        assert window.hits == HitTokens(match=40 * 165, disk=165) and window.hit_rate == pytest.approx(0.41)
        assert window.evicted_tokens == 7 * 165
        young = windows.last(300, snapshot(300), 198.0)
        assert (young.prompts, young.covered_s) == (300, 198.0), "there is no more"

    def test_hit_rate_is_none_without_prompts(self) -> None:
        windows = RollingWindows()
        assert windows.last(60, snapshot(0), 5.0).hit_rate is None
        windows.add_snapshot(snapshot(3), 0.0)
        assert windows.last(60, snapshot(3), 5.0).hit_rate is None

    @pytest.mark.parametrize("seed", range(10))
    def test_window_snapshots_are_bounded_and_cover_all_windows(self, seed: int) -> None:
        rng = random.Random(seed)
        windows, now, noted = RollingWindows(), 0.0, []
        for count in range(2000):
            if windows.is_due(now):
                windows.add_snapshot(snapshot(count), now)
                noted.append((now, count))
            assert len(windows) <= RollingWindows.MAX_SNAPSHOTS
            for seconds in WINDOWS_S:
                window = windows.last(seconds, snapshot(count), now)
                then, before = next(((t, c) for t, c in reversed(noted) if t <= now - seconds), noted[0])
                assert (window.covered_s, window.prompts) == (now - then, count - before)
                if now > 1.1 * seconds + 30:
                    assert seconds <= window.covered_s < seconds + SLOT_S + 10
            now += rng.choice([0.01, 1.0, 10.0])


def window(percent: int, *, prompts: int = MIN_PROMPTS, covered: float = 300.0) -> WindowStats:
    hits = HitTokens(match=10 * percent)
    return WindowStats(300, covered_s=covered, prompts=prompts, query_tokens=1000 if prompts else 0, hits=hits)


class TestHitRateAlert:
    @pytest.fixture(autouse=True)
    def heard(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "baton.scheduler.cache_stats_collector")

    def test_alert_fires_once_per_excursion(self, caplog: pytest.LogCaptureFixture) -> None:
        alert, seen = HitRateAlert(0.5), []
        # It recovers at 55 %: half of the way would be flapping.
        for percent in (60, 49, 30, 50, 54, 49, 55, 54, 50, 49, 80):
            alert.judge_window(window(percent))
            seen.append(alert.active)
        assert seen == [False, True, True, True, True, True, False, False, False, True, False]
        assert [line.levelname for line in caplog.records] == ["WARNING", "INFO", "WARNING", "INFO"]
        assert "0.490 of 1000 prompt tokens in the last 300 s, less than --hit-rate-alert 0.5;" in caplog.messages[0]

    def test_alert_needs_a_minimum_of_prompts(self, caplog: pytest.LogCaptureFixture) -> None:
        alert = HitRateAlert(0.5)
        alert.judge_window(window(10, prompts=MIN_PROMPTS - 1))
        assert not alert.active
        alert.judge_window(window(10))
        alert.judge_window(window(90, prompts=MIN_PROMPTS - 1))
        assert alert.active
        alert.judge_window(window(0, prompts=0))
        assert not alert.active, "nobody asks any more"
        assert len(caplog.messages) == 1

    def test_alert_ignores_partial_windows(self, caplog: pytest.LogCaptureFixture) -> None:
        alert = HitRateAlert(0.5)
        alert.judge_window(window(0, covered=299.0))
        assert not alert.active and not caplog.messages

    @pytest.mark.parametrize("threshold", [0.9, 0.99])
    def test_alert_with_high_threshold_can_recover(self, threshold: float) -> None:
        alert = HitRateAlert(threshold)
        alert.judge_window(window(50))
        assert alert.active
        alert.judge_window(window(100))
        assert not alert.active

    def test_alert_is_off_at_zero_threshold(self, caplog: pytest.LogCaptureFixture) -> None:
        alert = HitRateAlert(0.0)
        alert.judge_window(window(0))
        assert not alert.active and not caplog.messages
