"""Attention of layers that keep latents (`MLAKVPool`), with keys and values made of them where that is less work.

    kept        = latent ‖ rotated key                     one head, of which the latent is the value, too
    absorbed    scores = (W_ukᵀ q_plain ‖ q_rotated) · kept, output = W_uv Σ weight × latent        by any backend
    expanded    k_h = W_uk,h latent ‖ rotated key, v_h = W_uv,h latent, then attention of each head     here

Absorbed weights read little and make nothing, which is what decodes need. But a pair of query and key takes 1088
products instead of 320 (with DeepSeek's sizes), so for a long extend it is cheaper to make keys and values first. Each
sequence is attended in the way that takes fewer products.

This file works on plain tensors and knows nothing of the model's weights.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F

from ..memory_pool.kv_pool import KVPool
from .backend import AttentionBackend, AttentionBatch, AttentionSpec, Reach, without_sequences
from .torch_native import run_or_index

SHORT_EXTEND = 32
"""New tokens up to which a sequence's weights are always absorbed: decodes, drafts and suffixes."""

BLOCK = 256
"""Most queries attended at once, which bounds the rows of a mask."""

EXPANDED = 1 << 24
"""Most numbers of keys and values that are made at once; this decides how many heads form a group."""


@dataclass(slots=True, frozen=True)
class LatentWeights:
    """How a layer's heads read latents."""

    to_latent: torch.Tensor
    """W_uk: [heads, plain, latent]"""
    to_values: torch.Tensor
    """W_uvᵀ: [heads, latent, value]"""


@dataclass(slots=True)
class _Long:
    """A sequence whose keys and values are expanded."""

    tokens: slice
    """Its tokens among those of the step."""
    prefix: int
    slots: slice | torch.Tensor


@dataclass(slots=True)
class _Split:
    """How the tokens of a step are divided between the two ways."""

    long: list[_Long]
    others: torch.Tensor | None
    """int64: tokens that the other backend attends; None: all. Empty: none."""


def attend_absorbed(
    run: Callable[[AttentionSpec, torch.Tensor], torch.Tensor],
    spec: AttentionSpec,
    q: torch.Tensor,
    weights: LatentWeights,
) -> torch.Tensor:
    """q: [tokens, heads, plain + rotated]; run: attends queries over what is kept, as `AttentionBackend.run`. Returns
    [tokens, heads, value]."""
    size, latent = weights.to_latent.shape[1], spec.value_size
    queries = q.new_empty(len(q), spec.num_heads, spec.head_dim)
    queries[..., :latent] = torch.bmm(q[..., :size].transpose(0, 1), weights.to_latent).transpose(0, 1)
    queries[..., latent:] = q[..., size:]
    return torch.bmm(run(spec, queries).transpose(0, 1), weights.to_values).transpose(0, 1)


class LatentBackend:
    """AttentionBackend that attends long extends of latents expanded, and leaves all else to another backend."""

    name: ClassVar[str] = "latent"

    def __init__(self, kv_pool: KVPool, inner: AttentionBackend) -> None:
        """inner: the backend for sequences with absorbed weights."""
        self._pool, self.inner = kv_pool, inner
        self._batch: AttentionBatch | None = None
        self._splits: dict[tuple[int, ...], _Split] = {}
        self._planned: _Split | None = None
        """The part of the batch that the other backend has planned; None if it has planned the whole batch."""

    def plan(self, batch: AttentionBatch) -> None:
        """See AttentionBackend.plan."""
        self._batch = batch
        self._splits.clear()
        self._planned = None
        self.inner.plan(batch)

    def run(self, spec: AttentionSpec, q: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """See AttentionBackend.run: attends queries over what is kept."""
        if self._planned is not None and self._batch is not None:
            self._planned = None
            self.inner.plan(self._batch)
        return self.inner.run(spec, q, sinks)

    def run_latent(self, spec: AttentionSpec, q: torch.Tensor, weights: LatentWeights) -> torch.Tensor:
        """q: [tokens, heads, plain + rotated] -> [tokens, heads, value]"""
        batch = self._batch
        if batch is None:
            raise RuntimeError("run before plan: call plan(batch) once per step")
        split = self._split_of(batch, spec, weights)
        if not split.long:
            return attend_absorbed(self.run, spec, q, weights)
        out = q.new_empty(len(q), spec.num_heads, weights.to_values.shape[2])
        others = split.others
        if others is not None and len(others):
            if self._planned is not split:
                self._planned = split
                self.inner.plan(_without_long(batch, split))
            out[others] = attend_absorbed(self.inner.run, spec, q[others], weights)
        for sequence in split.long:
            _attend_expanded(spec, sequence, q, self._pool.k[spec.layer_id], weights, out)
        return out

    def _split_of(self, batch: AttentionBatch, spec: AttentionSpec, weights: LatentWeights) -> _Split:
        """Made once per step and kind of layer."""
        key = (*weights.to_latent.shape, *weights.to_values.shape, spec.head_dim)
        if key not in self._splits:
            self._splits[key] = _split(batch, is_long(batch, spec, weights))
        return self._splits[key]


def is_long(batch: AttentionBatch, spec: AttentionSpec, weights: LatentWeights) -> np.ndarray:
    """bool [bs]: which sequences take fewer products expanded."""
    if spec.reach != Reach():
        return np.zeros(len(batch.extend_lens), dtype=bool)
    new, prefix = batch.extend_lens.astype(np.int64), batch.prefix_lens.astype(np.int64)
    pairs = new * prefix + new * (new + 1) // 2
    plain, latent, value = weights.to_latent.shape[1], spec.value_size, weights.to_values.shape[2]
    rotated = spec.head_dim - latent
    absorbed = new * latent * (plain + value) + pairs * (2 * latent + rotated)
    expanded = (prefix + new) * latent * (plain + value) + pairs * (plain + rotated + value)
    return (new > SHORT_EXTEND) & (expanded < absorbed)


def _split(batch: AttentionBatch, long: np.ndarray) -> _Split:
    new = batch.extend_lens.astype(np.int64)
    ends = np.cumsum(new)
    found = []
    for row in np.flatnonzero(long).tolist():
        prefix, end = int(batch.prefix_lens[row]), int(ends[row])
        slots = batch.req_to_token[int(batch.host_rows[row]), : prefix + int(new[row])]
        found.append(_Long(slice(end - int(new[row]), end), prefix, run_or_index(slots)))
    if not found:
        return _Split([], None)
    others = torch.from_numpy(np.flatnonzero(~np.repeat(long, new)))
    return _Split(found, others.to(batch.req_to_token.device))


def _without_long(batch: AttentionBatch, split: _Split) -> AttentionBatch:
    """The step without the sequences that are attended expanded."""
    ends = np.cumsum(batch.extend_lens.astype(np.int64))
    gone = np.isin(ends, [sequence.tokens.stop for sequence in split.long]) & (batch.extend_lens > 0)
    return without_sequences(batch, gone)


def _attend_expanded(
    spec: AttentionSpec,
    sequence: _Long,
    q: torch.Tensor,
    pool: torch.Tensor,
    weights: LatentWeights,
    out: torch.Tensor,
) -> None:
    """Write the sequence's rows of out. pool: [slots, 1, latent + rotated]."""
    latent, own = spec.value_size, q[sequence.tokens]
    kept = pool[sequence.slots] if isinstance(sequence.slots, slice) else pool.index_select(0, sequence.slots)
    kept = kept[:, 0]
    count, new, size = len(kept), len(own), own.shape[2]
    plain, value = weights.to_latent.shape[1], weights.to_values.shape[2]
    width = max(size, value)  # torch's fused kernels take keys and values of one width: zeros add nothing
    mask = _causal(min(BLOCK, new), count, q)
    heads_at_once = max(EXPANDED // (count * (size + width)), 1)
    for first in range(0, spec.num_heads, heads_at_once):
        heads = slice(first, min(first + heads_at_once, spec.num_heads))
        number = heads.stop - heads.start
        keys, values = (q.new_zeros(number, count, each) for each in (width, width))
        keys[..., :plain] = torch.matmul(kept[:, :latent], weights.to_latent[heads].transpose(1, 2))
        keys[..., plain:size] = kept[:, latent:]
        values[..., :value] = torch.matmul(kept[:, :latent], weights.to_values[heads])
        queries = F.pad(own[:, heads], (0, width - size)).transpose(0, 1)
        for begin in range(0, new, BLOCK):
            end = min(begin + BLOCK, new)
            stop = sequence.prefix + end
            found = F.scaled_dot_product_attention(
                queries[None, :, begin:end],
                keys[None, :, :stop],
                values[None, :, :stop],
                attn_mask=mask[len(mask) - (end - begin) :, count - stop :],
                scale=spec.scale,
            )
            at = sequence.tokens.start
            out[at + begin : at + end, heads] = found[0, ..., :value].transpose(0, 1)


def _causal(rows: int, keys: int, like: torch.Tensor) -> torch.Tensor:
    """[rows, keys] to add to the scores of the last ``rows`` queries: -inf where a key is later than its query. The
    mask of any block is the lower right corner."""
    hidden = torch.ones(rows, keys, dtype=torch.bool, device=like.device).triu(keys - rows + 1)
    return torch.zeros(rows, keys, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))
