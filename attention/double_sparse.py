"""DoubleSparse: a decode attends only to the tokens whose keys fit its query best in a few channels.

The idea is that of Yang et al. 2024, "Post-Training Sparse Attention with Double Sparsity".

    keys in the pool     [heavy channels | the other channels]     of each head, in an order that is found offline
    label                the first `channels` numbers of a key
    1. scores of all tokens by their labels                        reads channels / head_dim of the keys
    2. the `tokens` best of them, for each query head
    3. exact attention over these                                  reads their keys and values alone

The paper keeps labels in a cache of their own. Here the channels of keys and queries change places instead, which
changes no product of a query and a key: labels take no memory, and forks, beams, host copies, disks and other servers
carry them without code of their own.

Prompts, guesses that are verified, short sequences, and layers that see only a window or a chunk are attended in full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from ..memory_pool.kv_pool import KVPool
from ..memory_pool.kv_rows import is_quantized, read_rows, select_rows
from .backend import AttentionBackend, AttentionBatch, AttentionSpec, Reach, without_sequences

ScoreLabels = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]
"""See `score_labels`."""

FEW_THREADS = 4
"""Threads up to which numpy, on one core, chooses the best tokens faster than torch on all."""


@dataclass(slots=True, frozen=True)
class Sparsity:
    """The settings of sparse decodes, and the order of the channels."""

    channels: int
    """Numbers of a label."""
    tokens: int
    """Tokens that each query head attends to."""
    threshold: int
    """Shorter sequences are attended in full."""
    orders: Mapping[int, torch.Tensor]
    """By the pool's layer: int64 [kv_heads, head_dim], the channel that comes at each place; on the model's device."""

    @property
    def least_length(self) -> int:
        """Tokens from which sequences are attended sparsely: those that are no longer than the budget never are."""
        return max(self.threshold, self.tokens + 1)

    def describe(self) -> str:
        """One line for the log."""
        return (
            f"decodes of at least {self.least_length} tokens attend to {self.tokens} of them, chosen by "
            f"{self.channels} channels of each key, in {len(self.orders)} layers"
        )


def is_sparse_layer(spec: AttentionSpec) -> bool:
    """True for layers whose queries see all tokens; windows and chunks bound the others already."""
    return spec.reach == Reach()


class DoubleSparseBackend:
    """AttentionBackend that attends long decodes sparsely, and leaves all else to another backend."""

    name: ClassVar[str] = "double_sparse"

    def __init__(
        self, kv_pool: KVPool, inner: AttentionBackend, sparsity: Sparsity, score: ScoreLabels | None = None
    ) -> None:
        """score: see `score_labels`, which None stands for."""
        self._pool, self.inner, self._sparsity = kv_pool, inner, sparsity
        self._score = score or score_labels
        self._batch: AttentionBatch | None = None
        self._ordered: set[int] = set()
        """Layers whose new keys are already in order."""
        self._new_slots: torch.Tensor | None = None
        self._sequences: list[tuple[int, torch.Tensor]] = []
        """The sparse decodes: token of the step, slots."""
        self._others: torch.Tensor | None = None
        """int64: the tokens of the step that are attended in full."""
        self._rest: AttentionBatch | None = None
        self._is_rest_planned = False

    def plan(self, batch: AttentionBatch) -> None:
        """See AttentionBackend.plan."""
        self._batch = batch
        self._ordered.clear()
        self._new_slots = None
        lengths = batch.prefix_lens.astype(np.int64) + batch.extend_lens
        sparse = np.zeros(len(lengths), dtype=bool) if batch.decodes is None else batch.decodes
        sparse = sparse & (lengths >= self._sparsity.least_length)
        firsts = np.cumsum(batch.extend_lens.astype(np.int64)) - batch.extend_lens
        self._sequences = [
            (int(firsts[row]), batch.req_to_token[int(batch.host_rows[row]), : int(lengths[row])])
            for row in np.flatnonzero(sparse)
        ]
        self._rest = without_sequences(batch, sparse) if self._sequences else None
        if self._rest is not None:
            others = np.flatnonzero(~np.repeat(sparse, batch.extend_lens))
            self._others = torch.from_numpy(others).to(batch.req_to_token.device)
        self._is_rest_planned = False
        self.inner.plan(batch)

    def run(self, spec: AttentionSpec, q: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """See AttentionBackend.run. Puts the channels of the layer's new keys into their order first."""
        batch = self._batch
        if batch is None:
            raise RuntimeError("run before plan: call plan(batch) once per step")
        order = self._sparsity.orders.get(spec.layer_id)
        if order is None:
            self._plan_inner(None)
            return self.inner.run(spec, q, sinks)
        self._order_new_keys(batch, spec.layer_id, order)
        queries = reorder_queries(q, order)
        if self._rest is None or self._others is None:
            return self.inner.run(spec, queries, sinks)
        out = q.new_empty(len(q), spec.num_heads, spec.value_size)
        if len(self._others):
            self._plan_inner(self._rest)
            out[self._others] = self.inner.run(spec, queries[self._others], sinks)
        k, v = self._pool.k[spec.layer_id], self._pool.v[spec.layer_id]
        for token, slots in self._sequences:
            out[token] = attend_sparsely(spec, queries[token], k, v, slots, self._sparsity, sinks, self._score)
        return out

    def _plan_inner(self, rest: AttentionBatch | None) -> None:
        """Let the other backend plan the rest of the step, or None: all of it."""
        if self._batch is not None and self._is_rest_planned != (rest is not None):
            self.inner.plan(self._batch if rest is None else rest)
            self._is_rest_planned = rest is not None

    def _order_new_keys(self, batch: AttentionBatch, layer: int, order: torch.Tensor) -> None:
        if layer in self._ordered:  # layers that share their keys
            return
        self._ordered.add(layer)
        if self._new_slots is None:
            self._new_slots = new_slots(batch)
        keys, slots, size = self._pool.layers.k[layer], self._new_slots, order.shape[1]
        rows = keys.index_select(0, slots)
        rows[..., :size] = rows[..., :size].gather(2, order.expand(len(rows), -1, -1))  # a scale stays where it is
        keys.index_copy_(0, slots, rows)


def new_slots(batch: AttentionBatch) -> torch.Tensor:
    """int64: the slots of a step's new tokens, in their order."""
    lens = batch.extend_lens.astype(np.int64)
    starts = np.cumsum(lens) - lens
    positions = np.arange(int(lens.sum())) + np.repeat(batch.prefix_lens - starts, lens)
    rows = np.repeat(batch.host_rows.astype(np.int64), lens)
    device = batch.req_to_token.device
    return batch.req_to_token[torch.from_numpy(rows).to(device), torch.from_numpy(positions).to(device)].long()


def reorder_queries(q: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """q: [tokens, heads, head_dim]; order: [kv_heads, head_dim]. The same shape, contiguous."""
    tokens, heads, size = q.shape
    grouped = q.reshape(tokens, len(order), heads // len(order), size)
    return grouped.gather(3, order[None, :, None].expand(grouped.shape)).view(tokens, heads, size)


def score_labels(queries: torch.Tensor, k: torch.Tensor, slots: torch.Tensor, channels: int) -> torch.Tensor:
    """Products of queries and labels. queries: [kv_heads, group, head_dim] and k: a layer of the pool's, with
    their channels in order; slots: int [n], of the sequence. Returns float32 [kv_heads, group, n]: float16 would
    overflow, and bfloat16 would round many scores to the same."""
    if is_quantized(k.dtype):
        labels = read_rows(select_rows(k, slots), queries.shape[2], torch.float32)[..., :channels]
    else:
        labels = k[..., :channels].index_select(0, slots).float()
    return torch.matmul(queries[..., :channels].float(), labels.permute(1, 2, 0))


def best_tokens(scores: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [kv_heads, group, count]: the tokens with the largest scores (float32 [kv_heads, group, n]), in any order.
    NaN counts as largest. numpy takes a fifth of the time of torch's topk on one core, which shares rows among many."""
    if scores.device.type != "cpu" or torch.get_num_threads() > FEW_THREADS:
        return scores.topk(count, dim=2, sorted=False).indices
    return torch.from_numpy(np.argpartition(scores.numpy(), -count, axis=2)[..., -count:])


def attend_sparsely(
    spec: AttentionSpec,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    slots: torch.Tensor,
    sparsity: Sparsity,
    sinks: torch.Tensor | None = None,
    score: ScoreLabels = score_labels,
) -> torch.Tensor:
    """Attend from the newest token of a sequence to the tokens that its labels choose, itself always among them.

    q: [heads, head_dim] and k: [slots, kv_heads, head_dim], with their channels in order; v: [slots, kv_heads,
    value_size]; slots: int [n], of the sequence; score: see `score_labels`. Returns [heads, value_size].
    """
    heads, group = spec.num_kv_heads, spec.group
    queries = q.reshape(heads, group, -1)
    scores = score(queries, k, slots, sparsity.channels)
    if spec.scale < 0:
        scores = -scores
    scores[..., -1] = float("inf")
    chosen = best_tokens(scores, min(sparsity.tokens, len(slots)))
    head = torch.arange(heads, device=k.device)[:, None, None]
    rows = (slots[chosen].long() * heads + head).flatten()  # of the pool, one for each slot and head
    shape = heads * group, chosen.shape[2], -1
    keys = read_rows(select_rows(k.flatten(0, 1), rows), spec.head_dim, torch.float32).view(shape)
    weights = torch.matmul(keys, queries.float().reshape(heads * group, -1, 1))[..., 0] * spec.scale
    if spec.logit_cap is not None:
        weights = spec.logit_cap * torch.tanh(weights / spec.logit_cap)
    if sinks is not None:
        weights = torch.cat((weights, sinks.to(weights.dtype).unsqueeze(1)), dim=1)
    weights = weights.softmax(dim=1)[:, : chosen.shape[2]]
    values = read_rows(select_rows(v.flatten(0, 1), rows), spec.value_size, torch.float32).view(shape)
    return torch.matmul(weights.unsqueeze(1), values)[:, 0].to(q.dtype)
