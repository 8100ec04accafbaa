"""Numba's recurrences against torch's: any sizes and types, rows of all kinds, several threads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from baton.runtime.layers.states.ops import DeltaHeads, SsdHeads, StateOps
from baton.runtime.layers.states.torch_states import TORCH_STATES
from tests.doubles.state_steps import SCENES, Row, make_step

pytest.importorskip("numba")

from baton.attention.numba_paged.team import Team
from baton.runtime.layers.states import numba_states

FLOAT, BRAIN, HALF = torch.float32, torch.bfloat16, torch.float16
TOLERANCE = {FLOAT: 1e-4, BRAIN: 2e-2, HALF: 3e-3}
OPS = {dtype: numba_states.load(dtype, Team()) for dtype in TOLERANCE}


@pytest.fixture(params=SCENES)
def rows(request) -> list[Row]:
    return SCENES[request.param]


@pytest.fixture(autouse=True)
def _several_threads(monkeypatch) -> None:
    monkeypatch.setattr(numba_states, "ONE_THREAD", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)


def numbers(*size: int, dtype: torch.dtype) -> torch.Tensor:
    """Random ones that ``dtype`` holds, in a part of wider rows."""
    wide = torch.randn(*size[:-1], size[-1] + 5).to(dtype)
    return wide[..., 2 : 2 + size[-1]]


def check_twin(
    rows: list[Row],
    shape: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
    run: Callable[[StateOps, int, torch.dtype, dict, object], torch.Tensor],
    state_dtype: torch.dtype = FLOAT,
) -> None:
    """The oracle computes in float32 from the same numbers."""
    results = []
    for ops, kind in ((OPS[dtype], dtype), (TORCH_STATES, FLOAT)):
        torch.manual_seed(1)
        states, _, tokens = make_step(rows, shape, dtype if state_dtype != FLOAT else FLOAT)
        layer = states.pool.layers[0]
        if kind == FLOAT:
            layer = {name: tensor.float() for name, tensor in layer.items()}
        results.append((run(ops, tokens, kind, layer, states).float(), {name: t.float() for name, t in layer.items()}))
    (found, after), (expected, wanted) = results
    allowed = TOLERANCE[dtype]
    torch.testing.assert_close(found, expected, atol=allowed, rtol=allowed)
    for name, tensor in after.items():
        torch.testing.assert_close(tensor[:-1], wanted[name][:-1], atol=allowed, rtol=allowed)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "channels, taps, silu, has_bias, is_gated",
    [(150, 4, True, True, False), (70, 3, False, False, True), (11, 2, True, False, False)],
)
def test_short_conv(rows, dtype, channels, taps, silu, has_bias, is_gated):
    def run(ops, tokens, kind, layer, states):
        x, one, other = numbers(3, tokens, channels, dtype=dtype).to(kind)
        weight = torch.randn(taps, channels).to(dtype).to(kind)
        bias = torch.randn(channels).to(dtype).to(kind) if has_bias else None
        gates = {"before": one, "after": other} if is_gated else {}
        return ops.short_conv(x, weight, bias, layer["conv"], states, silu=silu, **gates)

    check_twin(rows, {"conv": (taps - 1, channels)}, dtype, run, state_dtype=dtype)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "heads, by_channel",
    [
        (DeltaHeads(2, 4, 32, 48), True),
        (DeltaHeads(1, 3, 7, 11, step_scale=2.0), False),
        (DeltaHeads(1, 1, 128, 128), False),
    ],
    ids=str,
)
def test_gated_delta(rows, dtype, heads, by_channel):
    width = heads.value_heads * (heads.key_size if by_channel else 1)

    def run(ops, tokens, kind, layer, states):
        qkv, a = numbers(tokens, heads.channels, dtype=dtype), numbers(tokens, width, dtype=dtype)
        b = numbers(tokens, heads.value_heads, dtype=dtype)
        rate, dt_bias = torch.rand(heads.value_heads) + 0.1, torch.randn(width)
        return ops.gated_delta(qkv.to(kind), a.to(kind), b.to(kind), rate, dt_bias, heads, layer["recurrent"], states)

    check_twin(rows, {"recurrent": (heads.value_heads, heads.key_size, heads.value_size)}, dtype, run)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    "heads", [SsdHeads(4, 64, 2, 128), SsdHeads(3, 7, 1, 21, limits=(0.3, 1.5)), SsdHeads(2, 64, 1, 256)], ids=str
)
def test_ssd(rows, dtype, heads):
    def run(ops, tokens, kind, layer, states):
        xbc, dt = numbers(tokens, heads.channels, dtype=dtype), 20 * numbers(tokens, heads.heads, dtype=dtype)
        rate, dt_bias, skip = torch.rand(heads.heads) + 0.1, torch.randn(heads.heads), torch.randn(heads.heads)
        args = (0.2 * xbc).to(kind), dt.to(kind), rate, dt_bias, skip
        return ops.ssd(*args, heads, layer["recurrent"], states)

    check_twin(rows, {"recurrent": (heads.heads, heads.head_size, heads.state_size)}, dtype, run)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width, size", [(96, 32), (35, 7), (33, 33)])
@pytest.mark.parametrize("tokens", [1, 9])
def test_gates_and_norms(dtype, width, size, tokens):
    torch.manual_seed(0)
    y, z, weight = (
        numbers(tokens, width, dtype=dtype),
        numbers(tokens, width, dtype=dtype),
        torch.randn(width).to(dtype),
    )
    ops, allowed = OPS[dtype], TOLERANCE[dtype]
    for norms_first in (False, True):
        found = ops.gated_norm(y, z, weight, 1e-5, size, norms_first=norms_first)
        args = y.float(), z.float(), weight.float(), 1e-5, size
        expected = TORCH_STATES.gated_norm(*args, norms_first=norms_first)
        torch.testing.assert_close(found.float(), expected, atol=allowed, rtol=allowed)
    for name in ("silu_gate", "sigmoid_gate"):
        found, expected = getattr(ops, name)(y, z), getattr(TORCH_STATES, name)(y.float(), z.float())
        torch.testing.assert_close(found.float(), expected, atol=allowed, rtol=allowed)
