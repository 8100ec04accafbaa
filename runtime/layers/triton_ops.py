"""Layer operations as Triton kernels (Tillet et al. 2019); `ops.Ops` says what each does.

`rotate_and_store` is one kernel in place of about ten torch operations: the norm of each head of q and k, the rotation,
and the scattered writes to the KV pool. All arithmetic is done in float32 and rounded once. The kernels also run on CPU
tensors in Triton's interpreter, where tests compare them with their torch twins.

Import this file only to use Triton: CPU-only machines need not have it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ...memory_pool.kv_pool import KVLayers
from ...memory_pool.kv_pool import copy_kv as torch_copy_kv

HEADS_AT_ONCE = 8
"""Heads of one token that one program handles."""
SILU_BLOCK = 1024
WORD_BLOCK = 256
"""Words of 8 bytes that a program copies per iteration."""

# These are slices of larger tensors. Without this, Triton would recompile a kernel when their alignment changes.
INPUT_SLICES = ["positions", "slots"]
COPY_SLICES = ["source_k", "source_v", "target_k", "target_v", "source_slots", "target_slots"]


@triton.jit
def _rms_norm_kernel(x, residual, weight, out, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr):
    """Norm one row. With ADDS, residual becomes x + residual, and the sum is normed. out may be x."""
    row = tl.program_id(0).to(tl.int64) * SIZE
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    values = tl.load(x + row + column, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        values += tl.load(residual + row + column, mask=inside, other=0.0).to(tl.float32)
        # Norm the sum as it is stored, that is rounded, like the torch twin.
        total = values.to(residual.dtype.element_ty)
        tl.store(residual + row + column, total, mask=inside)
        values = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, axis=0) / SIZE + eps)
    weights = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + column, values * scale * weights, mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See ops.RMSNormOp."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm_rows(x.contiguous(), None, weight, out, eps)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ops.AddRMSNormOp."""
    _norm_rows(x, residual, weight, x, eps)
    return x, residual


def _norm_rows(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, out: torch.Tensor, eps: float
) -> None:
    rows, size = x.shape
    if rows:
        block = triton.next_power_of_2(size)
        _launch(
            _rms_norm_kernel,
            (rows,),
            (x, x if residual is None else residual, weight, out, eps),
            SIZE=size,
            BLOCK=block,
            ADDS=residual is not None,
            num_warps=min(max(block // 512, 1), 16),
        )


@triton.jit
def _silu_and_mul_kernel(gate_up, out, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    gate = tl.load(gate_up + row * 2 * SIZE + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * SIZE + SIZE + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * SIZE + column, gate * tl.sigmoid(gate) * up, mask=inside)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See ops.SiluAndMulOp."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, size, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        grid = (rows, -(-size // SILU_BLOCK))
        _launch(_silu_and_mul_kernel, grid, (gate_up, out), SIZE=size, BLOCK=SILU_BLOCK)
    return out


@triton.jit(do_not_specialize_on_alignment=INPUT_SLICES)
def _rotate_and_store_kernel(
    qkv,
    positions,
    rotary_table,
    slots,
    k_pool,
    v_pool,
    norm_weight,
    q_out,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
):
    """Handles HEAD_BLOCK heads of one token, as left and right halves, [HEAD_BLOCK, HALF_BLOCK] each."""
    HALF: tl.constexpr = HEAD_DIM // 2
    ALL_HEADS: tl.constexpr = HEADS + 2 * KV_HEADS
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK))[:, None]
    column = tl.arange(0, HALF_BLOCK)[None, :]
    at = head * HEAD_DIM + column
    is_q = head < HEADS
    is_qk = head < HEADS + KV_HEADS
    inside = (head < ALL_HEADS) & (column < HALF)

    source = qkv + token * (ALL_HEADS * HEAD_DIM) + at
    left = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    right = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    x, y = left, right
    if HAS_NORM:
        squares = tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)
        scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        weighted = is_qk & (column < HALF)
        x = x * scale * tl.load(norm_weight + at, mask=weighted, other=0.0).to(tl.float32)
        y = y * scale * tl.load(norm_weight + at + HALF, mask=weighted, other=0.0).to(tl.float32)
    angle = rotary_table + tl.load(positions + token) * HEAD_DIM + column
    cos = tl.load(angle, mask=column < HALF, other=0.0).to(tl.float32)
    sin = tl.load(angle + HALF, mask=column < HALF, other=0.0).to(tl.float32)
    # v goes through unchanged.
    new_left = tl.where(is_qk, x * cos - y * sin, left)
    new_right = tl.where(is_qk, y * cos + x * sin, right)

    q_to = q_out + token * (HEADS * HEAD_DIM) + at
    tl.store(q_to, new_left, mask=inside & is_q)
    tl.store(q_to + HALF, new_right, mask=inside & is_q)
    slot = tl.load(slots + token).to(tl.int64) * (KV_HEADS * HEAD_DIM)
    k_to = k_pool + slot + (at - HEADS * HEAD_DIM)
    is_k = inside & is_qk & (head >= HEADS)
    tl.store(k_to, new_left, mask=is_k)
    tl.store(k_to + HALF, new_right, mask=is_k)
    v_to = v_pool + slot + (at - (HEADS + KV_HEADS) * HEAD_DIM)
    is_v = inside & (head >= HEADS + KV_HEADS)
    tl.store(v_to, new_left, mask=is_v)
    tl.store(v_to + HALF, new_right, mask=is_v)


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
    """See ops.RotateAndStoreOp. The q returned is contiguous."""
    qkv = qkv.contiguous()
    tokens, (_, kv_heads, head_dim) = len(qkv), k_pool.shape
    all_heads = qkv.shape[1] // head_dim
    heads = all_heads - 2 * kv_heads
    q = torch.empty(tokens, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if tokens:
        _launch(
            _rotate_and_store_kernel,
            (tokens, -(-all_heads // HEADS_AT_ONCE)),
            (
                qkv,
                positions,
                rotary_table,
                slots,
                k_pool,
                v_pool,
                qkv if norm_weight is None else norm_weight,
                q,
                eps,
            ),
            HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            HEAD_BLOCK=HEADS_AT_ONCE,
            HALF_BLOCK=triton.next_power_of_2(head_dim // 2),
            HAS_NORM=norm_weight is not None,
        )
    return q


@triton.jit(do_not_specialize_on_alignment=COPY_SLICES)
def _copy_kv_kernel(
    source_k,
    source_v,
    target_k,
    target_v,
    source_slots,
    target_slots,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies K and V of one slot and layer, WORDS words of 8 bytes each. The first four: int64 tables of addresses."""
    item, layer = tl.program_id(0), tl.program_id(1)
    from_slot = tl.load(source_slots + item).to(tl.int64) * WORDS
    to_slot = tl.load(target_slots + item).to(tl.int64) * WORDS
    k_from = tl.load(source_k + layer).to(tl.pointer_type(tl.int64)) + from_slot
    v_from = tl.load(source_v + layer).to(tl.pointer_type(tl.int64)) + from_slot
    k_to = tl.load(target_k + layer).to(tl.pointer_type(tl.int64)) + to_slot
    v_to = tl.load(target_v + layer).to(tl.pointer_type(tl.int64)) + to_slot
    for start in range(0, WORDS, BLOCK):
        word = start + tl.arange(0, BLOCK)
        inside = word < WORDS
        k = tl.load(k_from + word, mask=inside)
        v = tl.load(v_from + word, mask=inside)
        tl.store(k_to + word, k, mask=inside)
        tl.store(v_to + word, v, mask=inside)


def copy_kv(source: KVLayers, target: KVLayers, source_slots: torch.Tensor, target_slots: torch.Tensor) -> None:
    """See ops.CopyKVOp."""
    layer = source.k[0]
    item_bytes = layer.stride(0) * layer.itemsize
    if item_bytes % 8:
        torch_copy_kv(source, target, source_slots, target_slots)
    elif len(source_slots):
        tables = (source.k_pointers, source.v_pointers, target.k_pointers, target.v_pointers)
        _launch(
            _copy_kv_kernel,
            (len(source_slots), len(source.k)),
            (*(table.view(torch.int64) for table in tables), source_slots, target_slots),
            WORDS=item_bytes // 8,
            BLOCK=WORD_BLOCK,
        )


def _launch(kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], **constants: Any) -> None:
    """kernel[grid](...). The one untyped call, as type checkers do not know what `triton.jit` makes of a function."""
    kernel[grid](*arguments, **constants)
