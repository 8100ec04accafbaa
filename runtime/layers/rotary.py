"""Rotary position embedding (Su et al. 2021, RoFormer), in the half-split form of the Hugging Face checkpoints.

Coordinate i of a head's left half and coordinate i of its right half turn together:
    left' = left * cos - right * sin        right' = right * cos + left * sin

Every model is computed in this form. Where a checkpoint pairs coordinates otherwise (neighbours; or only the first
ones, and the rest not at all), the outputs of its q and k projections are reordered when it has been loaded
(`head_order`): scores are sums over coordinates, so their order does not matter as long as q and k share it. Pairs
that do not turn have the angle 0.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from ...memory_pool.kv_rows import store_rows
from ..model_config import PositionScale, RopeConfig


def rotated_size(rope: RopeConfig, head_dim: int) -> int:
    """How many coordinates of a head are rotated."""
    return int(head_dim * rope.partial)


def inverse_frequencies(rope: RopeConfig, size: int) -> torch.Tensor:
    """float32 [size / 2]: the angle per position of heads with ``size`` rotated coordinates, scaling included."""
    exponents = torch.arange(0, size, 2, dtype=torch.int64).to(torch.float32) / size
    frequencies = 1.0 / rope.theta**exponents
    if rope.rope_type == "default":
        return frequencies
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "longrope":  # Ding et al. 2024
        return 1.0 / (torch.tensor(rope.factors, dtype=torch.float32) * rope.theta**exponents)
    if rope.rope_type == "llama3":  # `turns` = how often a pair turns within the original context
        turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)
        kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    elif rope.rope_type == "yarn":
        kept = _yarn_share(rope, size)
    else:
        raise ValueError(f"rope type {rope.rope_type!r}: use default, linear, llama3, longrope or yarn")
    kept = kept.clamp(0.0, 1.0)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


def _yarn_share(rope: RopeConfig, size: int) -> torch.Tensor:
    """float32 [size / 2]: how much of each frequency is kept (Peng et al. 2023, YaRN): all of the fast pairs, nothing
    of the slow ones."""

    def pair_that_turns(times: float) -> float:
        return (
            size * math.log(rope.original_max_position_embeddings / (times * 2 * math.pi)) / (2 * math.log(rope.theta))
        )

    first, last = pair_that_turns(rope.beta_fast), pair_that_turns(rope.beta_slow)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    if first == last:
        last += 0.001
    return 1 - ((torch.arange(size // 2, dtype=torch.float32) - first) / (last - first)).clamp(0.0, 1.0)


def head_order(rope: RopeConfig | None, head_dim: int, *, is_interleaved: bool) -> torch.Tensor | None:
    """int64 [head_dim]: the checkpoint's coordinate for each coordinate of a head as the layers compute it, so that
    pairs lie half a head apart; None if that is the checkpoint's own order."""
    if rope is None:
        return None
    size = rotated_size(rope, head_dim)
    if size == head_dim and not is_interleaved:
        return None
    rotated, rest = torch.arange(size), torch.arange(size, head_dim)
    sides = rotated.view(-1, 2).T if is_interleaved else rotated.view(2, -1)
    others = rest.view(2, -1)
    return torch.cat((sides[0], others[0], sides[1], others[1]))


class RotaryEmbedding:
    """A precomputed table for positions below max_positions, in the model's dtype as in the reference implementation.

    table: [max_positions, head_dim], contiguous; a row is [cos, sin] of the head_dim / 2 angles.
    """

    def __init__(
        self, rope: RopeConfig | None, head_dim: int, max_positions: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """rope: None rotates nothing."""
        cos, sin = torch.ones(max_positions, head_dim // 2), torch.zeros(max_positions, head_dim // 2)
        if rope is not None:
            size = rotated_size(rope, head_dim)
            positions = torch.arange(max_positions, dtype=torch.float32)
            angles = torch.outer(positions, inverse_frequencies(rope, size))
            cos[:, : size // 2] = angles.cos() * rope.attention_factor
            sin[:, : size // 2] = angles.sin() * rope.attention_factor
        self.table = torch.cat((cos, sin), dim=-1).to(dtype=dtype, device=device)


def apply_rotary(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """x [tokens, heads, head_dim], rows of the table [tokens, head_dim] -> rotated, the same shape as x."""
    cos, sin = rows.unsqueeze(1).chunk(2, dim=-1)
    left, right = x.chunk(2, dim=-1)
    turned = torch.addcmul(left * cos, right, sin, value=-1), torch.addcmul(right * cos, left, sin)
    return torch.cat(turned, dim=-1)


def scaled_by_position(q: torch.Tensor, positions: torch.Tensor, by: PositionScale) -> torch.Tensor:
    """q: [tokens, heads, numbers]; positions: int64 [tokens] (Nakanishi 2025, "Scalable-Softmax")."""
    scale = 1 + by.beta * torch.log1p(((positions + by.offset) // by.length).float())
    return q * scale.to(q.dtype)[:, None, None]


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
    kv_heads, head_dim = k_pool.shape[1], rotary_table.shape[1]
    heads = qkv.unflatten(1, (-1, head_dim))
    qk, v = heads[:, :-kv_heads], heads[:, -kv_heads:]
    if norm_weight is not None:
        qk = F.rms_norm(qk, (head_dim,), None, eps) * norm_weight
    qk = apply_rotary(qk, rotary_table.index_select(0, positions))
    store_rows(k_pool, slots, qk[:, -kv_heads:])
    store_rows(v_pool, slots, v)
    return qk[:, :-kv_heads]
