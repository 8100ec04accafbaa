"""Attention for the beams of a search: many sequences that begin with the same slots and have one new token each.

The prefix's keys are read once for all of them, and the queries become the rows of one large product:

    scores  =  [ q · prefix keysᵀ (one product) | q · own tail keysᵀ (batched) ]     [kv_heads, beams × group, keys]
    out     =  softmax(scores)[prefix] · prefix values  +  softmax(scores)[tail] · own tail values

This is cascade attention (Juravsky et al. 2024, "Hydragen"; Ye et al. 2024, "Cascade Inference"), but with one softmax
over both parts instead of a merge by log-sum-exp. The numbers are the same, and no kernel has to return its sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .backend import AttentionBatch, AttentionSpec, SharedPrefix
from .slots import gather, run_or_index

SCORES = 1 << 18
"""Scores computed at once: as many as fit in a core's cache."""
MIN_SAVED_KEYS = 768
"""If sharing saves fewer key reads than this, a plain tile is as fast."""


@dataclass(slots=True)
class SharedTile:
    """One group of ``count`` sequences, planned."""

    queries: slice
    """Rows of the step's tokens."""
    count: int
    prefix: slice | torch.Tensor
    """Slots."""
    prefix_len: int
    tails: torch.Tensor
    """int32 [count × tail_len]: slots."""
    tail_len: int

    @property
    def keys(self) -> int:
        """Keys that are gathered."""
        return self.prefix_len + self.count * self.tail_len


def saves_keys(batch: AttentionBatch, shared: SharedPrefix, window: int | None) -> bool:
    """Is sharing worthwhile, and does every query see the whole prefix?"""
    length = int(batch.prefix_lens[shared.first]) + 1
    return (shared.count - 1) * shared.length >= MIN_SAVED_KEYS and (window is None or length <= window)


def plan_shared(batch: AttentionBatch, shared: SharedPrefix, first_token: int) -> SharedTile:
    """first_token: row of the step's tokens where the group begins."""
    members = slice(shared.first, shared.first + shared.count)
    rows = batch.host_rows[members].astype(np.int64)
    length = int(batch.prefix_lens[shared.first]) + 1
    table_rows = torch.from_numpy(rows).to(batch.req_to_token.device)
    return SharedTile(
        queries=slice(first_token, first_token + shared.count),
        count=shared.count,
        prefix=run_or_index(batch.req_to_token[int(rows[0]), : shared.length], any_order=True),
        prefix_len=shared.length,
        tails=batch.req_to_token[table_rows, shared.length : length].reshape(-1),
        tail_len=length - shared.length,
    )


def attend_shared(
    spec: AttentionSpec,
    tile: SharedTile,
    q: torch.Tensor,
    pools: tuple[torch.Tensor, torch.Tensor],
    buffers: tuple[torch.Tensor, torch.Tensor],
    out: torch.Tensor,
) -> None:
    """Attend the group's queries and write them to out. q, out: [tokens, num_heads, head_dim]; pools: keys and values,
    [slots, kv_heads, head_dim]; buffers: for ``tile.keys`` of them."""
    n, kv_heads, head_dim = tile.count, spec.num_kv_heads, spec.head_dim
    group = spec.num_heads // kv_heads
    prefix, tails = [], []
    for pool, buffer in zip(pools, buffers):
        # Compute in float32: half precision would round the scores, which a fused kernel keeps in float32.
        prefix.append(gather(pool, tile.prefix, buffer).float().transpose(0, 1))
        own = gather(pool, tile.tails, buffer[tile.prefix_len :]).float()
        tails.append(own.view(n, tile.tail_len, kv_heads, head_dim).transpose(1, 2))
    queries = (q[tile.queries].float() * spec.scale).view(n, kv_heads, group, head_dim)
    results = out[tile.queries].view(n, kv_heads, group, head_dim)
    at_once = max(1, SCORES // (spec.num_heads * (tile.prefix_len + tile.tail_len)))
    for start in range(0, n, at_once):
        part = slice(start, start + at_once)
        own = queries[part]
        rows = own.transpose(0, 1).reshape(kv_heads, -1, head_dim)
        tail_scores = torch.matmul(own, tails[0][part].transpose(-1, -2)).transpose(0, 1)
        scores = [torch.bmm(rows, prefix[0].transpose(1, 2)), tail_scores.reshape(kv_heads, -1, tile.tail_len)]
        weights, tail_weights = torch.cat(scores, -1).softmax(-1).split([tile.prefix_len, tile.tail_len], dim=-1)
        found = torch.bmm(weights, prefix[1]).view(kv_heads, -1, group, head_dim).transpose(0, 1)
        tail_weights = tail_weights.reshape(kv_heads, -1, group, tile.tail_len).transpose(0, 1)
        results[part] = found + torch.matmul(tail_weights, tails[1][part])
