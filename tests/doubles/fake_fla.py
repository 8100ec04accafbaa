"""Importable `fla` and `causal_conv1d` whose functions run on the CPU, in torch and token by token.

Signatures and shapes are those of flash-linear-attention 0.6 and causal-conv1d 1.7; what these refuse, or would read
past, is refused here.

Transformers does not find them: a modelling file that is first imported during such a test would keep them for good.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.integrations import hub_kernels

Tensor = torch.Tensor


def install(monkeypatch: pytest.MonkeyPatch, *, with_conv1d: bool = True, **changes: Callable[..., Any]) -> list[str]:
    """Make both importable for a test; returns the names of the functions as they are called. changes: functions in the
    place of these."""
    calls: list[str] = []

    def counted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(function.__name__)
            return changes.get(function.__name__, function)(*args, **kwargs)

        return call

    functions = {
        "fla.modules.causal_conv1d": [causal_conv1d],
        "fla.ops.gated_delta_rule": [chunk_gated_delta_rule, fused_recurrent_gated_delta_rule],
        "fla.ops.kda": [chunk_kda, fused_recurrent_kda],
        "fla.ops.simple_gla": [chunk_simple_gla, fused_recurrent_simple_gla],
    }
    for name in ("fla", "fla.modules", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    if with_conv1d:
        functions["causal_conv1d"] = [causal_conv1d_update]
    else:
        monkeypatch.setitem(sys.modules, "causal_conv1d", None)
    for name, own in functions.items():
        module = ModuleType(name)
        for function in own:
            setattr(module, function.__name__, counted(function))
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(hub_kernels, "importlib", SimpleNamespace(import_module=_import_other))
    return calls


def _import_other(name: str, package: str | None = None) -> ModuleType:
    if name.partition(".")[0] in ("fla", "causal_conv1d"):
        raise ImportError(name)
    return importlib.import_module(name, package)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    activation: str | None = None,
    backend: str = "triton",
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """x: [1, T, D]; weight: [D, W]; initial_state: [N, D, W]."""
    segments = _segments(x, cu_seqlens, cu_seqlens_cpu)
    width = weight.shape[1]
    assert residual is None and backend == "triton" and output_final_state and activation in (None, "silu", "swish")
    assert initial_state is not None and initial_state.shape == (len(segments), x.shape[2], width)
    out, states = torch.empty_like(x), []
    for number, own in enumerate(segments):
        window = torch.cat((initial_state[number], x[0, own].t()), dim=1)
        total = F.conv1d(window[None, :, 1:].float(), weight[:, None].float(), groups=len(weight))[0]
        total = total if bias is None else total + bias[:, None].float()
        out[0, own] = (total if activation is None else F.silu(total)).t().to(x.dtype)
        states.append(window[:, -width:])
    return out, torch.stack(states)


def causal_conv1d_update(
    x: Tensor, conv_state: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None
) -> Tensor:
    """x: [N, D]; conv_state: [N, D, W - 1], written."""
    assert x.stride(1) == 1 and conv_state.stride(1) == 1 and activation in (None, "silu", "swish")
    assert conv_state.shape == (*x.shape, weight.shape[1] - 1)
    window = torch.cat((conv_state, x[..., None]), dim=2)
    conv_state.copy_(window[..., 1:])
    total = (window.float() * weight.float()).sum(2)
    total = total if bias is None else total + bias.float()
    return (total if activation is None else F.silu(total)).to(x.dtype)


def fused_recurrent_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """g: [1, T, value_heads]"""
    assert g.dim() == 3
    return _delta_rule(q, k, v, g[..., None], beta, cu_seqlens, None, **options)


def chunk_gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, cu_seqlens_cpu: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    assert g.dim() == 3
    return _delta_rule(q, k, v, g[..., None], beta, cu_seqlens, cu_seqlens_cpu, **options)


def fused_recurrent_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """g: [1, T, value_heads, key_size]"""
    assert g.shape[3] == q.shape[3]
    return _delta_rule(q, k, v, g, beta, cu_seqlens, None, **options)


def chunk_kda(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor, cu_seqlens_cpu: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    assert g.shape[3] == q.shape[3]
    return _delta_rule(q, k, v, g, beta, cu_seqlens, cu_seqlens_cpu, **options)


def fused_recurrent_simple_gla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    return _linear_attention(q, k, v, g, None, **options)


def chunk_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, cu_seqlens_cpu: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    return _linear_attention(q, k, v, g, cu_seqlens_cpu, **options)


def _segments(x: Tensor, bounds: Tensor | None, host_bounds: Tensor | None) -> list[slice]:
    assert bounds is not None and bounds.dtype == torch.int64 and len(x) == 1
    assert host_bounds is None or torch.equal(bounds, host_bounds)
    assert bounds[0] == 0 and bounds[-1] == x.shape[1]
    return [slice(*pair) for pair in zip(bounds[:-1].tolist(), bounds[1:].tolist())]


def _delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    host_bounds: Tensor | None,
    *,
    scale: float,
    initial_state: Tensor,
    output_final_state: bool,
    use_qk_l2norm_in_kernel: bool,
) -> tuple[Tensor, Tensor]:
    """q, k: [1, T, H, K]; v: [1, T, HV, V]; beta: [1, T, HV]; initial_state: float32 [N, HV, K, V]."""
    segments, repeats = _segments(v, cu_seqlens, host_bounds), v.shape[2] // q.shape[2]
    assert output_final_state and use_qk_l2norm_in_kernel and beta.shape == v.shape[:3] == g.shape[:3]
    assert initial_state.dtype == torch.float32
    assert initial_state.shape == (len(segments), v.shape[2], q.shape[3], v.shape[3])
    unit = [each * torch.rsqrt((each * each).sum(-1, keepdim=True) + 1e-6) for each in (q.float(), k.float())]
    queries, keys = (each[0].repeat_interleave(repeats, 1) for each in unit)
    out, after = torch.empty_like(v), initial_state.clone()
    for number, own in enumerate(segments):
        for token in range(own.start, own.stop):
            state = after[number] * g[0, token].float().exp()[:, :, None]
            key = keys[token]
            change = (v[0, token].float() - torch.einsum("hk,hkv->hv", key, state)) * beta[0, token, :, None].float()
            after[number] = state + key[:, :, None] * change[:, None]
            out[0, token] = scale * torch.einsum("hk,hkv->hv", queries[token], after[number])
    return out, after


def _linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    host_bounds: Tensor | None,
    *,
    cu_seqlens: Tensor,
    scale: float,
    initial_state: Tensor,
    output_final_state: bool,
    state_v_first: bool,
) -> tuple[Tensor, Tensor]:
    """q, k: [1, T, H, K]; v: [1, T, H, V]; g: [1, T, H]; initial_state: [N, H, V, K]."""
    segments = _segments(v, cu_seqlens, host_bounds)
    assert output_final_state and state_v_first and q.shape[:3] == k.shape[:3] == v.shape[:3] == g.shape
    assert initial_state.shape == (len(segments), v.shape[2], v.shape[3], q.shape[3])
    out, after = torch.empty_like(v), initial_state.clone()
    for number, own in enumerate(segments):
        for token in range(own.start, own.stop):
            fresh = v[0, token].float()[:, :, None] * k[0, token].float()[:, None]
            after[number] = after[number] * g[0, token].float().exp()[:, None, None] + fresh
            out[0, token] = scale * torch.einsum("hvk,hk->hv", after[number], q[0, token].float())
    return out, after
