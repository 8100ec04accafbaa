"""Rotary position embedding (Su et al. 2021, RoFormer), in the half-split form of the Hugging Face checkpoints.

Coordinate i of a head's left half and coordinate i of its right half turn together:
    left' = left * cos - right * sin        right' = right * cos + left * sin
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from ..model_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """float32 [head_dim / 2]: the angle per position, scaling included."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / rope.theta**exponents
    if rope.rope_type == "default":
        return frequencies
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type != "llama3":
        raise ValueError(f"rope type {rope.rope_type!r}: use default, linear or llama3")
    # Llama 3.1: `turns` = how often a pair turns within the original context.
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
    ramp = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    ramp = ramp.clamp(0.0, 1.0)
    return (1 - ramp) * frequencies / rope.factor + ramp * frequencies


class RotaryEmbedding:
    """A precomputed table for positions below max_positions, in the model's dtype as in the reference implementation.

    table: [max_positions, head_dim], contiguous; a row is [cos, sin] of the head_dim / 2 angles.
    """

    def __init__(
        self, rope: RopeConfig, head_dim: int, max_positions: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        positions = torch.arange(max_positions, dtype=torch.float32)
        angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
        self.table = torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype=dtype, device=device)


def apply_rotary(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, head_dim], rows of the table [tokens, head_dim] -> rotated, the same shape as x."""
    cos, sin = rows.unsqueeze(1).chunk(2, dim=-1)
    left, right = x.chunk(2, dim=-1)
    turned = torch.addcmul(left * cos, right, sin, value=-1), torch.addcmul(right * cos, left, sin)
    return torch.cat(turned, dim=-1)


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
    _, kv_heads, head_dim = k_pool.shape
    heads = qkv.unflatten(1, (-1, head_dim))
    qk, v = heads[:, :-kv_heads], heads[:, -kv_heads:]
    if norm_weight is not None:
        qk = F.rms_norm(qk, (head_dim,), None, eps) * norm_weight
    qk = apply_rotary(qk, rotary_table.index_select(0, positions))
    k_pool.index_copy_(0, slots, qk[:, -kv_heads:])
    v_pool.index_copy_(0, slots, v)
    return qk[:, :-kv_heads]
