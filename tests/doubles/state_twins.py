"""Operations of layers with states against torch's: the same numbers and states, in any dtype."""

from __future__ import annotations

from collections.abc import Callable

import torch

from baton.runtime.layers.states.ops import DeltaHeads, SsdHeads, StateOps
from baton.runtime.layers.states.state_batch import StateBatch
from baton.runtime.layers.states.torch_states import TORCH_STATES
from tests.doubles.state_steps import Row, make_step

Layer = dict[str, torch.Tensor]
Run = Callable[[StateOps, int, torch.dtype, Layer, StateBatch], torch.Tensor]

CONVOLUTIONS = [(150, 4, True, True, False), (70, 3, False, False, True), (11, 2, True, False, False)]
"""channels, taps, silu, has_bias, is_gated"""
DELTAS = [
    (DeltaHeads(2, 4, 32, 48), True),
    (DeltaHeads(1, 3, 7, 11, step_scale=2.0), False),
    (DeltaHeads(1, 1, 128, 128), False),
]
"""heads, by_channel"""
SCANS = [SsdHeads(4, 64, 2, 128), SsdHeads(3, 7, 1, 21, limits=(0.3, 1.5)), SsdHeads(2, 64, 1, 256)]


def numbers(*size: int, dtype: torch.dtype) -> torch.Tensor:
    """Random ones that ``dtype`` holds, in a part of wider rows."""
    wide = torch.randn(*size[:-1], size[-1] + 5).to(dtype)
    return wide[..., 2 : 2 + size[-1]]


def check_twin(
    ops: StateOps,
    rows: list[Row],
    shape: dict[str, tuple[int, ...]],
    dtype: torch.dtype,
    run: Run,
    *,
    allowed: float,
    state_dtype: torch.dtype = torch.float32,
) -> None:
    """The oracle computes in float32 from the same numbers. allowed: absolute and relative error."""
    results = []
    for each, kind in ((ops, dtype), (TORCH_STATES, torch.float32)):
        torch.manual_seed(1)
        states, _, tokens = make_step(rows, shape, state_dtype)
        layer = states.pool.layers[0]
        if kind == torch.float32:
            layer = {name: tensor.float() for name, tensor in layer.items()}
        found = run(each, tokens, kind, layer, states).float()
        results.append((found, {name: tensor.float() for name, tensor in layer.items()}))
    (found, after), (expected, wanted) = results
    torch.testing.assert_close(found, expected, atol=allowed, rtol=allowed)
    for name, tensor in after.items():
        torch.testing.assert_close(tensor[:-1], wanted[name][:-1], atol=allowed, rtol=allowed)


def check_short_conv(
    ops: StateOps,
    rows: list[Row],
    dtype: torch.dtype,
    channels: int,
    taps: int,
    silu: bool,
    has_bias: bool,
    is_gated: bool,
    *,
    allowed: float,
) -> None:
    def run(each: StateOps, tokens: int, kind: torch.dtype, layer: Layer, states: StateBatch) -> torch.Tensor:
        x, one, other = numbers(3, tokens, channels, dtype=dtype).to(kind)
        weight = torch.randn(taps, channels).to(dtype).to(kind)
        bias = torch.randn(channels).to(dtype).to(kind) if has_bias else None
        gates = {"before": one, "after": other} if is_gated else {}
        return each.short_conv(x, weight, bias, layer["conv"], states, silu=silu, **gates)

    check_twin(ops, rows, {"conv": (taps - 1, channels)}, dtype, run, allowed=allowed, state_dtype=dtype)


def check_gated_delta(
    ops: StateOps, rows: list[Row], dtype: torch.dtype, heads: DeltaHeads, by_channel: bool, *, allowed: float
) -> None:
    width = heads.value_heads * (heads.key_size if by_channel else 1)

    def run(each: StateOps, tokens: int, kind: torch.dtype, layer: Layer, states: StateBatch) -> torch.Tensor:
        qkv, a = numbers(tokens, heads.channels, dtype=dtype), numbers(tokens, width, dtype=dtype)
        b = numbers(tokens, heads.value_heads, dtype=dtype)
        rate, dt_bias = torch.rand(heads.value_heads) + 0.1, torch.randn(width)
        return each.gated_delta(qkv.to(kind), a.to(kind), b.to(kind), rate, dt_bias, heads, layer["recurrent"], states)

    shape = {"recurrent": (heads.value_heads, heads.key_size, heads.value_size)}
    check_twin(ops, rows, shape, dtype, run, allowed=allowed)


def check_ssd(ops: StateOps, rows: list[Row], dtype: torch.dtype, heads: SsdHeads, *, allowed: float) -> None:
    def run(each: StateOps, tokens: int, kind: torch.dtype, layer: Layer, states: StateBatch) -> torch.Tensor:
        xbc, dt = numbers(tokens, heads.channels, dtype=dtype), 20 * numbers(tokens, heads.heads, dtype=dtype)
        rate, dt_bias, skip = torch.rand(heads.heads) + 0.1, torch.randn(heads.heads), torch.randn(heads.heads)
        args = (0.2 * xbc).to(kind), dt.to(kind), rate, dt_bias, skip
        return each.ssd(*args, heads, layer["recurrent"], states)

    shape = {"recurrent": (heads.heads, heads.head_size, heads.state_size)}
    check_twin(ops, rows, shape, dtype, run, allowed=allowed)
