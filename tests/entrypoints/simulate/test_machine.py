"""Pools of simulated machines: from a card, from a trace, and from sizes that were asked for."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from baton.entrypoints.simulate.cost_model import CARDS, MODELS, Card, CostError, ModelSizes, dense_model
from baton.entrypoints.simulate.machine import WantedPools, add_host, one_pool, plan_pools, with_recorded_bytes
from baton.runtime.pool_sizes import PoolSizes
from baton.scheduler.config import SchedulerConfig

MIB, GIB = 2**20, 2**30
CARD = Card("a", memory=10 * GIB, bandwidth=1, flops=1, host_bandwidth=1)
PLAIN = msgspec.structs.replace(MODELS["llama-3.2-1b"], weight_bytes=GIB, bytes_per_token=64 * 1024)
HYBRID = msgspec.structs.replace(PLAIN, bytes_per_state=2 * MIB)
WINDOWED = msgspec.structs.replace(PLAIN, bytes_per_window_token=320 * 1024, window=512)
CONFIG = SchedulerConfig(context_length=8192, max_running_requests=8, max_leased_requests=8)


def pools(model: ModelSizes, config: SchedulerConfig = CONFIG, **wanted: Any) -> PoolSizes:
    return plan_pools(CARD, model, config, WantedPools(**wanted))


def test_pool_size_is_memory_left_by_weights() -> None:
    left = (10 * GIB * 9 // 10 - GIB) // (64 * 1024)
    assert pools(PLAIN) == PoolSizes(tokens=left - 1, page_size=1, bytes_per_token=64 * 1024)  # one is padding
    assert pools(PLAIN, tokens=70_000_001).tokens == 70_000_001
    pages = SchedulerConfig(context_length=8192, page_size=16)
    assert pools(PLAIN, pages).tokens == (left // 16 - 1) * 16 and pools(PLAIN, pages, tokens=1000).tokens == 992
    with pytest.raises(CostError, match=r"qwen2\.5-32b has 65\.\d GB of weights; .* Choose a larger card or a smaller"):
        plan_pools(CARDS["L40S"], MODELS["qwen2.5-32b"], CONFIG, WantedPools())


def test_states_take_their_share_of_the_card() -> None:
    found = pools(HYBRID)
    assert found.states == int(8 * GIB * 0.05) // (2 * MIB) and found.bytes_per_state == 2 * MIB
    assert found.tokens == pools(PLAIN).tokens - (found.states + 2) * 32
    asked = pools(HYBRID, states=1000)
    assert (asked.states, asked.tokens) == (1000, pools(PLAIN).tokens - 1002 * 32)
    assert pools(HYBRID, tokens=5000, states=7) == PoolSizes(
        tokens=5000, page_size=1, bytes_per_token=64 * 1024, states=7, bytes_per_state=2 * MIB
    )
    assert pools(HYBRID, tokens=5000).states == found.states
    assert pools(PLAIN, states=9).states == 9  # of no known size
    with pytest.raises(CostError, match=r"recurrent states of 2\.1 MB: not enough.*lower .*--max-states"):
        pools(HYBRID, states=5000)


def test_windows_get_a_pool_of_their_own() -> None:
    found = pools(WINDOWED)
    assert (found.window, found.bytes_per_token, found.bytes_per_window_token) == (512, 64 * 1024, 320 * 1024)
    assert found.window_tokens == 16 * (2690 - 2048) + 2048  # each row's windows, and one chunk
    assert found.tokens * 64 * 1024 + found.window_tokens * 320 * 1024 == pytest.approx(8 * GIB, rel=0.01)
    half = pools(WINDOWED, tokens=40_000, window_ratio=0.5)
    assert (half.tokens, half.window_tokens) == (40_000, 20_000)
    assert pools(PLAIN, tokens=40_000, window=100).window_tokens == 16 * (100 + 2 * 25 + 2) + 2048


def test_one_pool_serves_all_layers_where_two_are_no_better() -> None:
    assert pools(WINDOWED, tokens=2000) == PoolSizes(tokens=2000, page_size=1, bytes_per_token=384 * 1024)
    asks: list[dict[str, Any]] = [{"window": 512}, {"window_ratio": 0.2}]
    for asked in asks:
        with pytest.raises(CostError, match=r"a window of 512 tokens needs a pool of 2690 tokens or more, .* of 2000;"):
            pools(WINDOWED, tokens=2000, **asked)


RECORDED = PoolSizes(
    tokens=6000, page_size=16, bytes_per_token=100, states=40, bytes_per_state=9000, host_tokens=12_000, host_states=80
)


def test_a_trace_has_the_sizes_unless_others_are_asked_for() -> None:
    model = with_recorded_bytes(MODELS["llama-3.1-8b"], RECORDED)
    config = SchedulerConfig(context_length=8192, page_size=16)
    without_host = msgspec.structs.replace(RECORDED, host_tokens=0, host_states=0)
    assert pools(model, config, recorded=RECORDED) == without_host
    assert add_host(pools(model, config, recorded=RECORDED), 0.0, RECORDED) == RECORDED
    fewer = pools(model, config, recorded=RECORDED, states=10, tokens=3200)
    assert (fewer.tokens, fewer.states, fewer.bytes_per_state) == (3200, 10, 9000)
    assert add_host(fewer, 0.0, RECORDED).host_states == 20

    windows = PoolSizes(
        tokens=6000, page_size=1, bytes_per_token=100, window=64, window_tokens=2500, bytes_per_window_token=50
    )
    model = with_recorded_bytes(MODELS["llama-3.1-8b"], windows)
    assert pools(model, recorded=windows) == windows
    assert pools(model, recorded=windows, window_ratio=0.5).window_tokens == 3000


def test_the_host_has_as_many_states_for_its_tokens_as_the_card() -> None:
    size = 1000 * 100 + 20 * 5000
    found = add_host(
        PoolSizes(tokens=1000, page_size=1, bytes_per_token=100, states=20, bytes_per_state=5000), 3 * size / 1e9, None
    )
    assert (found.host_tokens, found.host_states) == (3000, 60)
    plain = add_host(PoolSizes(tokens=1000, page_size=16, bytes_per_token=100), 250_000 / 1e9, None)
    assert (plain.host_tokens, plain.host_states) == (2496, 0)


def test_with_a_host_tier_all_layers_share_the_memory_of_both_pools() -> None:
    two = PoolSizes(
        tokens=1000, page_size=16, bytes_per_token=100, window=64, window_tokens=300, bytes_per_window_token=50
    )
    assert one_pool(two) == PoolSizes(tokens=(100_000 + 15_000) // 150 // 16 * 16, page_size=16, bytes_per_token=150)
    assert one_pool(RECORDED) is RECORDED


def test_dense_models_have_no_states_or_windows() -> None:
    model = dense_model("tiny", 2, 8, 4, 2, 2, 10, 100)
    assert model.weights_read(1) == model.weights_read(9) == model.read_bytes
    assert not (model.window or model.bytes_per_state or model.has_latents)
