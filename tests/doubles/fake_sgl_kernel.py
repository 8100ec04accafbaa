"""An importable `sgl_kernel` whose registered operations run on the CPU, in torch.

Schemas are those of sglang-kernel 0.4.4, so that a wrong order or type of arguments fails as it would there; and it
refuses what the kernels refuse (types of indices, contiguity), or would read past.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

SCHEMAS = {
    "rmsnorm": "(Tensor! output, Tensor input, Tensor weight, float eps, bool enable_pdl) -> ()",
    "fused_add_rmsnorm": "(Tensor! input, Tensor! residual, Tensor weight, float eps, bool enable_pdl) -> ()",
    "silu_and_mul": "(Tensor! out, Tensor input) -> ()",
    "rotary_embedding": "(Tensor positions, Tensor! query, Tensor!? key, int head_size, Tensor cos_sin_cache, "
    "bool is_neox) -> ()",
    "transfer_kv_all_layer": "(Tensor src_k_layers, Tensor dst_k_layers, Tensor src_v_layers, Tensor dst_v_layers, "
    "Tensor src_indices, Tensor dst_indices, int item_size, int num_layers, int block_quota, int num_warps_per_block)"
    " -> ()",
}


class FakeSglKernel:
    """Registered while the context is open. ``changes``: name -> another function in its place, None for no such op."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **changes: Callable[..., Any] | None) -> None:
        self.calls: list[str] = []
        self._patch = monkeypatch
        self._changes = changes

    def __enter__(self) -> FakeSglKernel:
        if "sgl_kernel" in sys.modules:
            pytest.skip("the real sglang-kernel is loaded, and has registered its operations")
        self._patch.setitem(sys.modules, "sgl_kernel", ModuleType("sgl_kernel"))
        self._library = torch.library.Library("sgl_kernel", "FRAGMENT")
        for name, schema in SCHEMAS.items():
            run = self._changes.get(name, globals()[name])
            if run is not None:
                self._library.define(name + schema)
                self._library.impl(name, self._counted(name, run), "CPU")
        return self

    def __exit__(self, *_: object) -> None:
        self._library._destroy()

    def _counted(self, name: str, run: Callable[..., Any]) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            self.calls.append(name)
            run(*arguments)

        return call


def rmsnorm(output: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, enable_pdl: bool) -> None:
    assert x.is_contiguous() and output.shape == x.shape and output.dtype == x.dtype
    output.copy_(F.rms_norm(x, weight.shape, weight, eps))


def fused_add_rmsnorm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, enable_pdl: bool
) -> None:
    assert x.is_contiguous() and residual.is_contiguous()
    residual.add_(x)
    x.copy_(F.rms_norm(residual, weight.shape, weight, eps))


def silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
    assert x.is_contiguous() and x.shape[1] // 2 * x.itemsize % 16 == 0
    gate, up = x.chunk(2, dim=-1)
    out.copy_(F.silu(gate) * up)


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    """query, key [tokens, heads × head_size], rows possibly strided."""
    assert is_neox and positions.dtype == torch.int64 and cos_sin_cache.is_contiguous()
    assert cos_sin_cache.dtype == query.dtype == key.dtype and query.stride(1) == key.stride(1) == 1
    cos, sin = cos_sin_cache[positions].unsqueeze(1).chunk(2, dim=-1)
    for flat in (query, key):
        heads = flat.view(len(flat), -1, head_size)
        left, right = (half.clone() for half in heads.chunk(2, dim=-1))
        heads.copy_(torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1))


def transfer_kv_all_layer(
    source_k: torch.Tensor,
    target_k: torch.Tensor,
    source_v: torch.Tensor,
    target_v: torch.Tensor,
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
    item_size: int,
    num_layers: int,
    block_quota: int,
    num_warps_per_block: int,
) -> None:
    """By address, like the kernel."""
    tables = (source_k, target_k, source_v, target_v)
    assert all(table.dtype == torch.uint64 and len(table) == num_layers for table in tables)
    assert source_slots.dtype == target_slots.dtype == torch.int64 and len(source_slots) == len(target_slots) > 0
    assert item_size % 8 == 0
    for sources, targets in ((source_k, target_k), (source_v, target_v)):
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            for first, second in zip(source_slots.tolist(), target_slots.tolist(), strict=True):
                ctypes.memmove(target + second * item_size, source + first * item_size, item_size)
