"""Numba's recurrences against torch's: any sizes and types, rows of all kinds, several threads."""

from __future__ import annotations

import pytest
import torch

from baton.runtime.layers.states.torch_states import TORCH_STATES
from tests.doubles.state_steps import SCENES, Row
from tests.doubles.state_twins import (
    CONVOLUTIONS,
    DELTAS,
    SCANS,
    check_gated_delta,
    check_short_conv,
    check_ssd,
    numbers,
)

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


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("channels, taps, silu, has_bias, is_gated", CONVOLUTIONS)
def test_short_conv(rows, dtype, channels, taps, silu, has_bias, is_gated):
    check_short_conv(OPS[dtype], rows, dtype, channels, taps, silu, has_bias, is_gated, allowed=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads, by_channel", DELTAS, ids=str)
def test_gated_delta(rows, dtype, heads, by_channel):
    check_gated_delta(OPS[dtype], rows, dtype, heads, by_channel, allowed=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("heads", SCANS, ids=str)
def test_ssd(rows, dtype, heads):
    check_ssd(OPS[dtype], rows, dtype, heads, allowed=TOLERANCE[dtype])


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
