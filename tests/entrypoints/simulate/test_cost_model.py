"""Step costs, against cases worked out by hand, and against measurements of real machines."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from baton.entrypoints.simulate.cost_model import (
    CARDS,
    MODELS,
    Card,
    CostError,
    Efficiency,
    Linear,
    Roofline,
    StepSize,
    dense_model,
    fill_by_computing_s,
    read_cost_file,
)
from baton.entrypoints.simulate.machine import WantedPools, plan_pools
from baton.scheduler.config import SchedulerConfig

TINY = dense_model("tiny", layers=2, hidden=8, heads=4, kv_heads=2, head_dim=2, intermediate=10, vocabulary=100)
# A layer: 8 × 2 × (2 × 4 + 2 × 2) = 192 of attention, 3 × 8 × 10 = 240 of MLP; the head: 800.
PLAIN = Efficiency(compute=1.0, memory=1.0, host_step_s=0.0, host_row_s=0.0)


def test_model_sizes_match_hand_computed_values() -> None:
    assert TINY.body_parameters == 2 * (192 + 240)
    assert TINY.weight_bytes == 2 * (864 + 2 * 800)
    assert TINY.bytes_per_token == 2 * 2 * 2 * 2 * 2


def test_roofline_step_time_matches_hand_computed_values() -> None:
    step = StepSize(prompt_tokens=3, decode_rows=2, context=20, attended=15, prompt_rows=1)
    flops = 2 * (864 * 5 + 800 * 3 + 2 * 2 * 4 * 2 * 15)
    read = 2 * (864 + 800) + 32 * 20
    slow_to_compute = Roofline(Card("a", 1e9, bandwidth=1e9, flops=100.0, host_bandwidth=64.0), TINY, PLAIN)
    assert slow_to_compute.step_s(step) == pytest.approx(flops / 100)
    slow_to_read = Roofline(Card("a", 1e9, bandwidth=10.0, flops=1e12, host_bandwidth=64.0), TINY, PLAIN)
    assert slow_to_read.step_s(step) == pytest.approx(read / 10)
    assert slow_to_read.load_s(6) == slow_to_read.store_s(6) == pytest.approx(6 * 32 / 64)
    half = Efficiency(compute=0.5, memory=0.25, host_step_s=1.0, host_row_s=0.5)
    assert Roofline(slow_to_compute.card, TINY, half).step_s(step) == pytest.approx(flops / 50 + 1.0 + 3 * 0.5)
    assert Roofline(slow_to_read.card, TINY, half).step_s(step) == pytest.approx(read / 2.5 + 1.0 + 3 * 0.5)


def test_states_windows_and_experts_are_read_as_hand_computed() -> None:
    """Each row reads a state and writes one; layers with a window read what they see; two tokens choose experts."""
    more = {"bytes_per_state": 1000, "bytes_per_window_token": 8, "window": 4, "window_pair_products": 16}
    model = msgspec.structs.replace(TINY, **more, expert_bytes=4000, expert_share=0.5)
    step = StepSize(0, 2, context=20, attended=20, window_context=8, window_attended=8)
    reads = Roofline(Card("a", 1e9, bandwidth=10.0, flops=1e12, host_bandwidth=64.0), model, PLAIN)
    assert reads.step_s(step) == pytest.approx((2 * 1664 + 3000 + 32 * 20 + 8 * 8 + 2 * 2 * 1000) / 10)
    computes = Roofline(Card("a", 1e9, bandwidth=1e9, flops=100.0, host_bandwidth=64.0), model, PLAIN)
    assert computes.step_s(step) == pytest.approx(2 * (864 * 2 + 800 * 2 + 32 * 20 + 16 * 8) / 100)
    assert computes.load_s(6, 2) == computes.store_s(6, 2) == pytest.approx((6 * (32 + 8) + 2 * 1000) / 64)
    assert computes.window == 4


def test_llama_8b_sizes_are_known() -> None:
    model = MODELS["llama-3.1-8b"]
    assert model.weight_bytes == pytest.approx(16.06e9, rel=1e-3)
    assert model.bytes_per_token == 131072


@pytest.mark.parametrize(
    ("card", "by_computing", "from_host"), [("RTX6000", 9, 0.3), ("A100-40", 12, 1.1), ("H200", 21, 2.2)]
)
def test_fill_times_match_the_design_document(card: str, by_computing: float, from_host: float) -> None:
    model = MODELS["llama-3.1-8b"]
    cost, pool = Roofline(CARDS[card], model), plan_pools(CARDS[card], model, SchedulerConfig(), WantedPools()).tokens
    assert fill_by_computing_s(cost, pool) == pytest.approx(by_computing, rel=0.15)
    assert cost.load_s(pool) == pytest.approx(from_host, rel=0.5)


def test_decode_step_times_match_h200_measurements() -> None:
    cost = Roofline(CARDS["H200"], MODELS["llama-3.1-8b"])
    for rows, measured in ((1, 5.0e-3), (16, 6.4e-3), (64, 8.68e-3)):
        assert cost.step_s(StepSize(0, rows, 1056 * rows, 1056 * rows)) == pytest.approx(measured, rel=0.1)


def test_cost_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    figures = {"fixed_s": 1, "prompt_token_s": 0.5, "decode_row_s": 0.25, "context_token_s": 0.125, "layers": 4}
    path.write_text(json.dumps(figures | {"load_token_s": 0.1, "store_token_s": 0.2}))
    cost = read_cost_file(path)
    assert cost == Linear(**figures | {"fixed_s": 1, "load_token_s": 0.1, "store_token_s": 0.2})
    assert cost.step_s(StepSize(prompt_tokens=2, decode_rows=4, context=8, attended=99)) == 1 + 1 + 1 + 1
    assert cost.load_s(10) == 1.0 and cost.store_s(10) == 2.0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fixed_s": -1}, "fixed_s is -1"),
        ({"fixed_s": True}, "fixed_s is True"),
        ({"fixed": 1}, "unknown field 'fixed'"),
        ({"layers": 1.5}, "layers is 1.5"),
        ({"layers": 0}, "layers is 0"),
        ({"fixed_s": 0, "decode_row_s": 0}, "would take no time"),
    ],
)
def test_invalid_cost_values_are_refused(tmp_path: Path, change: dict[str, float], said: str) -> None:
    path = tmp_path / "costs.json"
    figures = {"fixed_s": 1, "prompt_token_s": 1, "decode_row_s": 1, "context_token_s": 1}
    path.write_text(json.dumps(figures | change))
    with pytest.raises(CostError, match=said):
        read_cost_file(path)


@pytest.mark.parametrize(("text", "said"), [("{", "JSON object"), ("[]", "not list"), ('{"fixed_s": 1}', "missing")])
def test_malformed_cost_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(CostError, match=said):
        read_cost_file(path)
