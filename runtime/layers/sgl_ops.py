"""Layer operations of sglang-kernel, called by their registered names.

If FlashInfer is installed, the package's Python wrappers of the norms call it, and it compiles them on first use; the
registered operations are compiled already. The package has no KV store, so `rotate_and_store` puts its rotary embedding
between torch operations. It loads only with the torch it was built for; see probe.py.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

from ...memory_pool.kv_pool import KVLayers
from ...memory_pool.kv_pool import copy_kv as torch_copy_kv
from .ops import silu_and_mul as torch_silu_and_mul

NEXT_TO_COMPUTE = {"block_quota": 2, "num_warps_per_block": 32}
"""Blocks of a transfer to or from host memory. Two saturate the link and leave the other multiprocessors free."""
ALONE = {"block_quota": 512, "num_warps_per_block": 4}
"""Blocks of a copy that the step waits for."""


def load(device: torch.device) -> dict[str, Any]:
    """Name in ops.Ops -> function. Raises whatever the import raises: not installed, another torch, another card."""
    import_module("sgl_kernel")
    # Programmatic dependent launch, from Hopper on: a kernel's start overlaps the end of the previous kernel.
    overlap_launch = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {
        "rms_norm": partial(rms_norm, overlap_launch),
        "add_rms_norm": partial(add_rms_norm, overlap_launch),
        "silu_and_mul": silu_and_mul,
        "rotate_and_store": rotate_and_store,
        "copy_kv": partial(_transfer, ALONE),
        "transfer_kv": partial(_transfer, NEXT_TO_COMPUTE),
    }


def rms_norm(overlap_launch: bool, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See ops.RMSNormOp."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if len(x):
        torch.ops.sgl_kernel.rmsnorm.default(out, x.contiguous(), weight, eps, overlap_launch)
    return out


def add_rms_norm(
    overlap_launch: bool, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ops.AddRMSNormOp."""
    if len(x):
        torch.ops.sgl_kernel.fused_add_rmsnorm.default(x, residual, weight, eps, overlap_launch)
    return x, residual


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See ops.SiluAndMulOp."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    if size * gate_up.itemsize % 16:  # the kernel reads 16 bytes at a time
        return torch_silu_and_mul(gate_up)
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        torch.ops.sgl_kernel.silu_and_mul.default(out, gate_up)
    return out


def rotate_and_store(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    rotary_table: torch.Tensor,
    slots: torch.Tensor,
    k_pool: torch.Tensor,
    v_pool: torch.Tensor,
    norm_weight: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:
    """See ops.RotateAndStoreOp."""
    tokens, (_, kv_heads, head_dim) = len(qkv), k_pool.shape
    heads = qkv.unflatten(1, (-1, head_dim))
    qk, v = heads[:, :-kv_heads], heads[:, -kv_heads:]
    if norm_weight is not None:
        qk = F.rms_norm(qk, (head_dim,), None, eps) * norm_weight
    if tokens:
        flat = qk.flatten(1) if qk.is_contiguous() else qkv[:, : -kv_heads * head_dim]
        q, k = flat[:, : -kv_heads * head_dim], flat[:, -kv_heads * head_dim :]
        torch.ops.sgl_kernel.rotary_embedding.default(positions, q, k, head_dim, rotary_table, True)
        k_pool.index_copy_(0, slots, qk[:, -kv_heads:])
        v_pool.index_copy_(0, slots, v)
    return qk[:, :-kv_heads]


def _transfer(
    blocks: dict[str, int],
    source: KVLayers,
    target: KVLayers,
    source_slots: torch.Tensor,
    target_slots: torch.Tensor,
) -> None:
    """See ops.CopyKVOp. Host memory must be pinned: the kernel reads and writes it by its address."""
    layer = source.k[0]
    item_bytes = layer.stride(0) * layer.itemsize
    if item_bytes % 8:  # the kernel copies words of 8 bytes
        torch_copy_kv(source, target, source_slots, target_slots)
    elif len(source_slots):
        torch.ops.sgl_kernel.transfer_kv_all_layer.default(
            source.k_pointers,
            target.k_pointers,
            source.v_pointers,
            target.v_pointers,
            source_slots,
            target_slots,
            item_bytes,
            len(source.k),
            blocks["block_quota"],
            blocks["num_warps_per_block"],
        )
