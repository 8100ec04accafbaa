"""Numba's operations against torch's: any sizes and types, few tokens and many, one thread and several."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.runtime.layers.op_libraries import Trial, tolerance
from baton.runtime.layers.ops import TORCH_OPS, OpShape

pytest.importorskip("numba")

from baton.attention.numba_paged.team import Team
from baton.runtime.layers.numba_ops.operations import ONE_THREAD, load

CPU = torch.device("cpu")
FLOAT, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16
USUAL = OpShape(512, 1376, num_heads=8, num_kv_heads=4, head_dim=64, qk_norm=False, eps=1e-5)
ODD = OpShape(13, 41, num_heads=3, num_kv_heads=1, head_dim=6, qk_norm=True, eps=1e-3)
NARROW = OpShape(96, 24, num_heads=2, num_kv_heads=2, head_dim=40, qk_norm=True, eps=1e-6)
SEVERAL_THREADS = ONE_THREAD // USUAL.hidden_size + 7


@pytest.mark.parametrize("dtype", [FLOAT, BRAIN, HALF])
@pytest.mark.parametrize(
    ("shape", "tokens"), [(USUAL, 1), (USUAL, SEVERAL_THREADS), (ODD, 1), (ODD, 19), (NARROW, 8), (NARROW, 9)]
)
def test_numba_ops_match_torch(shape: OpShape, tokens: int, dtype: torch.dtype) -> None:
    trial, allowed = Trial(shape, tokens, dtype), tolerance(dtype)
    for name, op in load(shape, dtype, Team()).items():
        for found, expected in zip(trial.found(name, op, CPU), trial.expected(name), strict=True):
            assert torch.allclose(found, expected, atol=allowed, rtol=allowed), name


@pytest.mark.parametrize("compiled_for", [False, True])
def test_layers_with_and_without_norms_share_an_operation(compiled_for: bool) -> None:
    """Llama 4 norms q and k where it rotates them."""
    op = load(replace(USUAL, qk_norm=compiled_for), FLOAT, Team())["rotate_and_store"]
    for norms in (True, False, True):
        trial = Trial(replace(USUAL, qk_norm=norms), 5, FLOAT)
        found, expected = trial.found("rotate_and_store", op, CPU), trial.expected("rotate_and_store")
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@settings(max_examples=3, deadline=None)  # each compiles all operations
@given(
    hidden=st.integers(1, 70),
    half=st.integers(1, 36),
    heads=st.integers(1, 4),
    group=st.integers(1, 3),
    norms=st.booleans(),
    tokens=st.integers(1, 40),
    seed=st.integers(0, 1 << 20),
)
def test_random_sizes_match_reference(
    hidden: int, half: int, heads: int, group: int, norms: bool, tokens: int, seed: int
) -> None:
    shape = OpShape(hidden, hidden + 5, heads * group, heads, 2 * half, norms, 1e-5)
    trial, allowed = Trial(shape, tokens, FLOAT, seed), tolerance(FLOAT)
    for name, op in load(shape, FLOAT, Team()).items():
        for found, expected in zip(trial.found(name, op, CPU), trial.expected(name), strict=True):
            assert torch.allclose(found, expected, atol=allowed, rtol=allowed), name


@pytest.mark.parametrize("dtype", [FLOAT, BRAIN])
def test_silu_handles_extreme_and_nan_gates(dtype: torch.dtype) -> None:
    gates = torch.tensor([-1e30, -200.0, -90.0, -20.0, -0.0, 0.0, 20.0, 90.0, 1e30, float("nan"), float("inf")])
    gate_up = torch.cat((gates, torch.ones_like(gates))).to(dtype).unsqueeze(0)
    shape = OpShape(16, len(gates), 1, 1, 2, False, 1e-5)
    found = load(shape, dtype, Team())["silu_and_mul"](gate_up)
    expected = TORCH_OPS.silu_and_mul(gate_up.clone())
    assert found[0].isnan().tolist() == expected[0].isnan().tolist() and found[0].isnan().sum() == 1
    torch.testing.assert_close(found, expected, equal_nan=True, atol=1e-30, rtol=tolerance(dtype))


def test_bfloat16_rounds_to_even_and_keeps_nan() -> None:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(1)).to(BRAIN)
    residual = torch.randn(64, 32, generator=torch.Generator().manual_seed(2)).to(BRAIN)
    residual[3, 5], residual[4, 6] = float("nan"), float("inf")
    shape = OpShape(32, 16, 1, 1, 2, False, 1e-5)
    norm = load(shape, BRAIN, Team())["add_rms_norm"]
    _, total = norm(x.clone(), residual.clone(), torch.ones(32, dtype=BRAIN), 1e-5)
    assert torch.equal(total.nan_to_num(7.0), (x + residual).nan_to_num(7.0)) and bool(total[3, 5].isnan())


def test_numba_ops_accept_zero_tokens() -> None:
    for name, op in load(USUAL, FLOAT, Team()).items():
        if name == "rms_norm":
            assert op(torch.empty(0, 512), torch.ones(512), 1e-5).shape == (0, 512)
        if name == "silu_and_mul":
            assert op(torch.empty(0, 2752)).shape == (0, 1376)


def test_dtype_without_kernels_is_refused() -> None:
    with pytest.raises(TypeError, match="float64"):
        load(USUAL, torch.float64, Team())
