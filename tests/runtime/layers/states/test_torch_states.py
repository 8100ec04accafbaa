"""The oracle of the recurrences against transformers' functions: every segment's state and every token's result."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.models.bamba import modeling_bamba
from transformers.models.jamba import modeling_jamba
from transformers.models.kimi_linear import modeling_kimi_linear
from transformers.models.qwen3_next import modeling_qwen3_next

from baton.runtime.layers.states.ops import DeltaHeads, SsdHeads
from baton.runtime.layers.states.torch_states import TORCH_STATES
from tests.doubles.state_steps import SCENES, TRASH, Row, make_step


@pytest.fixture(params=SCENES)
def rows(request) -> list[Row]:
    return SCENES[request.param]


def check(rows: list[Row], found: torch.Tensor, after: torch.Tensor, before: torch.Tensor, expected) -> None:
    """expected: (tokens, source's state [1, …]) of the first n tokens of a row -> (results [n, …], state)"""
    written, start = set(), 0
    for row in rows:
        for end, slot in row.cuts:
            results, state = expected(slice(start, start + end), before[row.source][None])
            torch.testing.assert_close(found[start : start + end], results, atol=2e-5, rtol=1e-4)
            if slot != TRASH:
                torch.testing.assert_close(after[slot], state, atol=2e-5, rtol=1e-4)
            written.add(slot)
        start += row.length
    for slot in set(range(len(after))) - written:
        assert torch.equal(after[slot], before[slot])


def plain(module: Any, name: str) -> Any:
    """A function of transformers' own, without the libraries that may replace it."""
    return getattr(module, name).__wrapped__


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("kernel, silu, has_bias, is_gated", [(4, True, True, False), (3, False, False, True)])
def test_short_conv(rows, kernel, silu, has_bias, is_gated):
    channels = 11
    states, before, tokens = make_step(rows, {"conv": (kernel - 1, channels)})
    x, one, other = torch.randn(3, tokens, channels)
    weight, bias = torch.randn(kernel, channels), torch.randn(channels) if has_bias else None
    conv = states.pool.layers[0]["conv"]
    gates = {"before": one, "after": other} if is_gated else {}
    wide = torch.randn(tokens, 3 * channels)
    wide[:, 4 : 4 + channels] = x  # a part of a projection
    found = TORCH_STATES.short_conv(wide[:, 4 : 4 + channels], weight, bias, conv, states, silu=silu, **gates)

    def expected(span: slice, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inputs = x[span] * one[span] if is_gated else x[span]
        window = torch.cat((source[0], inputs)).T[None]
        causal = plain(modeling_bamba, "causal_conv1d_fn")
        out = causal(window, weight.T.contiguous(), bias, "silu" if silu else None)[0].T[kernel - 1 :]
        return out * other[span] if is_gated else out, window[0].T[-(kernel - 1) :]

    check(rows, found, conv, before["conv"], expected)


@pytest.mark.parametrize("form", ["chunk", "recurrent", "scaled", "per channel"])
def test_gated_delta(rows, form):
    heads = DeltaHeads(2, 6, 8, 10, 2.0 if form == "scaled" else 1.0)
    by_channel = form == "per channel"
    states, before, tokens = make_step(rows, {"recurrent": (6, 8, 10)})
    width = 6 * 8 if by_channel else 6
    qkv, a, b = torch.randn(tokens, heads.channels), torch.randn(tokens, width), torch.randn(tokens, 6)
    rate, dt_bias = torch.rand(6) + 0.1, torch.randn(width)
    recurrent = states.pool.layers[0]["recurrent"]
    found = TORCH_STATES.gated_delta(qkv, a, b, rate, dt_bias, heads, recurrent, states)

    def expected(span: slice, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q, k, v = qkv[None, span].split((16, 16, 60), dim=-1)
        q, k, v = q.unflatten(-1, (2, 8)), k.unflatten(-1, (2, 8)), v.unflatten(-1, (6, 10))
        decay = -rate[:, None] * F.softplus(a[None, span] + dt_bias).unflatten(-1, (6, -1))
        beta = b[None, span].sigmoid() * heads.step_scale
        options = {"initial_state": source, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        if by_channel:
            rule = plain(modeling_kimi_linear, "recurrent_kimi_delta_attention")
            out, state = rule(*(each.repeat_interleave(3, 2) for each in (q, k)), v, decay, beta, **options)
        else:
            chunk, step = "torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"
            rule = plain(modeling_qwen3_next, step if form == "recurrent" else chunk)
            out, state = rule(q, k, v, decay[..., 0], beta, **options)
        return out[0].flatten(1), state[0]

    check(rows, found, recurrent, before["recurrent"], expected)


def test_ssd(rows):
    heads = SsdHeads(6, 5, 2, 12)
    states, before, tokens = make_step(rows, {"recurrent": (6, 5, 12)})
    xbc, dt = torch.randn(tokens, heads.channels), torch.randn(tokens, 6)
    rate, dt_bias, skip = torch.rand(6) + 0.1, torch.randn(6), torch.randn(6)
    recurrent = states.pool.layers[0]["recurrent"]
    found = TORCH_STATES.ssd(xbc, dt, rate, dt_bias, skip, heads, recurrent, states)

    def expected(span: slice, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, b, c = xbc[None, span].split((30, 24, 24), dim=-1)
        out, state = plain(modeling_bamba, "mamba2_chunk_scan")(
            x.unflatten(-1, (6, 5)),
            dt[None, span],
            -rate,
            b.unflatten(-1, (2, 12)),
            c.unflatten(-1, (2, 12)),
            chunk_size=32,
            D=skip,
            dt_bias=dt_bias,
            initial_states=source,
            dt_softplus=True,
            return_final_states=True,
        )
        return out[0].flatten(1), state[0]

    check(rows, found, recurrent, before["recurrent"], expected)


def test_ssd_bounds_its_steps_in_longer_segments_only():
    heads = SsdHeads(1, 4, 1, 4, limits=(0.5, 1.0))
    states, before, tokens = make_step([Row(2, 0, [(2, 1)]), Row(1, 0, [(1, 2)])], {"recurrent": (1, 4, 4)})
    xbc, dt = torch.ones(tokens, heads.channels), torch.tensor([[-9.0], [9.0], [-9.0]])
    recurrent = states.pool.layers[0]["recurrent"]
    found = TORCH_STATES.ssd(xbc, dt, torch.ones(1), torch.zeros(1), torch.zeros(1), heads, recurrent, states)
    least = float(F.softplus(torch.tensor(-9.0)))
    expected = torch.tensor([0.5, 1 + 0.5 * float(torch.tensor(-1.0).exp()), least]) * 4
    torch.testing.assert_close(found[:, 0], expected)
    assert before["recurrent"][0].abs().max() == 0


def test_selective_scan(rows):
    channels, size = 7, 5
    states, before, tokens = make_step(rows, {"recurrent": (channels, size)})
    x, dt = torch.randn(2, tokens, channels)
    b, c = torch.randn(2, tokens, size)
    rate, skip = torch.rand(channels, size) + 0.1, torch.randn(channels)
    recurrent = states.pool.layers[0]["recurrent"]
    found = TORCH_STATES.selective_scan(x, dt, rate, b, c, skip, recurrent, states)

    def expected(span: slice, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        state, out = source.clone(), []
        for token in range(span.start, span.stop):
            own = slice(token, token + 1)
            step = plain(modeling_jamba, "mamba_selective_state_update")
            out.append(step(state, x[own], dt[own], -rate, b[own], c[own], skip, dt_softplus=True))
        return torch.cat(out), state[0]

    check(rows, found, recurrent, before["recurrent"], expected)


@pytest.mark.parametrize("kind", ["before the norm", "behind it"])
def test_gated_norm(kind):
    y, z = torch.randn(2, 5, 24)
    if kind == "before the norm":
        norm, size = modeling_bamba.BambaRMSNormGated(24, 8, 1e-5), 8
    else:
        norm, size = modeling_qwen3_next.Qwen3NextRMSNormGated(8, 1e-5), 8
    norm.weight.data.normal_()
    found = TORCH_STATES.gated_norm(
        y, z, norm.weight.data.repeat(24 // len(norm.weight)), 1e-5, size, norms_first=kind == "behind it"
    )
    shape = (5, 24) if kind == "before the norm" else (15, 8)
    torch.testing.assert_close(found, norm(y.view(shape), z.view(shape)).view(5, 24).detach())
    torch.testing.assert_close(TORCH_STATES.silu_gate(y, z), y * F.silu(z))
    torch.testing.assert_close(TORCH_STATES.sigmoid_gate(y, z), y * z.sigmoid())
