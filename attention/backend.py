"""The protocol of attention backends: plan once per batch on the host, then run once per layer.

It follows FlashInfer's plan/run split, so that a GPU backend needs no device sync per layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
import torch

from ..memory_pool.kv_pool import KVShape


@dataclass(slots=True, frozen=True)
class Reach:
    """How far back the queries of a layer see: ``window`` tokens, themselves included, and not beyond the beginning of
    their chunk, a multiple of ``chunk``. None: all."""

    window: int | None = None
    chunk: int | None = None

    @property
    def most(self) -> int | None:
        """The most tokens that a query sees, itself included; None: all."""
        return min((limit for limit in (self.window, self.chunk) if limit is not None), default=None)

    def first_keys(self, positions: np.ndarray) -> np.ndarray:
        """int64, as positions: the first position that a query at each of them sees.

        >>> Reach(window=3, chunk=4).first_keys(np.array([1, 3, 4, 7]))
        array([0, 1, 4, 5])
        """
        first = np.zeros(positions.shape, dtype=np.int64)
        if self.window is not None:
            np.maximum(first, positions - self.window + 1, out=first)
        if self.chunk is not None:
            np.maximum(first, positions // self.chunk * self.chunk, out=first)
        return first


@dataclass(slots=True, frozen=True)
class AttentionSpec:
    """One attention layer: the shape of its heads, and how scores become weights.

    score  = scale × q · k, then logit_cap × tanh(score / logit_cap) where there is a cap
    weight = exp(score) / (Σ exp(scores) + exp(sink) where there are sinks)
    """

    layer_id: int
    """The pool's layer that is read; layers that share their K and V have the same."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Numbers of a head of q and k."""
    scale: float
    sliding_window: int | None = None
    """How many tokens a query sees, including itself; None: all."""
    value_dim: int = 0
    """Numbers of a head of v and of the output; 0: head_dim."""
    logit_cap: float | None = None
    """Soft cap of the scores (Gemma 2); None: no cap."""
    has_sinks: bool = False
    """Each head has a learned score that takes a share of the weights and no value (gpt-oss); see `run`."""
    chunk: int | None = None
    """A query sees no token of an earlier chunk of so many positions (Llama 4); None: all."""
    values_in_keys: bool = False
    """A value is the first ``value_dim`` numbers of its key, and the pool keeps it once (latent attention)."""

    @property
    def value_size(self) -> int:
        """Numbers of a head of v and of the output."""
        return self.value_dim or self.head_dim

    @property
    def reach(self) -> Reach:
        """How far back a query sees."""
        return Reach(self.sliding_window, self.chunk)

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads


def kv_shapes(specs: Sequence[AttentionSpec]) -> list[KVShape]:
    """What each of the pool's layers keeps. specs: of all attention layers; those of one ``layer_id`` are alike."""
    by_layer = {
        spec.layer_id: KVShape(spec.num_kv_heads, spec.head_dim, spec.value_size, spec.values_in_keys) for spec in specs
    }
    return [by_layer[layer] for layer in range(len(by_layer))]


@dataclass(slots=True, frozen=True)
class SharedPrefix:
    """Sequences ``first`` to ``first + count - 1`` of a step have the same slots in their first ``length`` positions.
    They are equally long, and each has one new token."""

    first: int
    count: int
    length: int


@dataclass(slots=True)
class AttentionBatch:
    """One step as attention sees it: ``bs`` sequences, ``tokens`` new tokens in sequence order. A sequence without a
    new token, or over the padding row, is padding; graphs need it.

    Host arrays are for planning without a device sync, device tensors for the kernels.
    """

    req_to_token: torch.Tensor
    """Device mirror, int32 [rows, max_context]."""
    host_rows: np.ndarray
    """int32 [bs], host: row of req_to_token."""
    prefix_lens: np.ndarray
    """int32 [bs], host."""
    extend_lens: np.ndarray
    """int32 [bs], host; all 1 in a decode step."""
    pad_row: int
    """A row of req_to_token filled with the padding slot."""
    shared: list[SharedPrefix] = field(default_factory=list)
    """Disjoint groups; a backend may read each one's prefix once, or ignore them."""
    decodes: np.ndarray | None = None
    """bool [bs], host: True for sequences with one new token that is output, not prompt. None: all False. Only sparse
    attention reads it."""
    req_to_window: torch.Tensor | None = None
    """Like req_to_token, for layers with a window that have a pool of their own; see windowed.py."""


def without_sequences(batch: AttentionBatch, gone: np.ndarray) -> AttentionBatch:
    """The step without some of its sequences. gone: bool [bs]."""
    before = np.concatenate(([0], np.cumsum(gone)))
    shared = []
    for group in batch.shared:
        first, end = group.first, group.first + group.count
        left = group.count - int(before[end] - before[first])
        if left:
            shared.append(SharedPrefix(first - int(before[first]), left, group.length))
    return replace(
        batch,
        host_rows=batch.host_rows[~gone],
        prefix_lens=batch.prefix_lens[~gone],
        extend_lens=batch.extend_lens[~gone],
        shared=shared,
        decodes=None if batch.decodes is None else batch.decodes[~gone],
    )


class AttentionBackend(Protocol):
    """Computes attention. Owns no KV: it reads the pool it was given, and writes nothing there; only
    `DoubleSparseBackend` changes the order of the numbers in new keys."""

    name: ClassVar[str]
    """As --attention-backend has it."""

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare everything that the layers of one forward share. Called once, before `run`."""
        ...

    def run(self, spec: AttentionSpec, q: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """Attend causally over prefix and new tokens; their K and V are in the pool already.

        q: [tokens, num_heads, head_dim], heads and coordinates contiguous, rows possibly strided. sinks: float32
        [num_heads], where the spec has them. Returns [tokens, num_heads, value_size], contiguous.
        """
        ...


class GraphKind(Enum):
    """The steps that a captured graph can run."""

    DECODE = "decode"
    """One query per sequence."""
    EXTEND = "extend"
    """Any number of queries per sequence."""
    SHARED = "shared prefixes"
    """One query per sequence; groups of them read their common prefix once."""


@dataclass(slots=True, frozen=True)
class GraphShape:
    """The fixed sizes of a forward that is captured once and replayed (a CUDA graph). Steps are padded to exactly
    ``tokens`` queries and ``sequences`` sequences."""

    kind: GraphKind
    tokens: int
    sequences: int

    def __str__(self) -> str:
        return f"{self.kind.value} {self.tokens}" + (f" × {self.sequences}" if self.kind is GraphKind.EXTEND else "")


class GraphAttention(AttentionBackend, Protocol):
    """Attention of one forward of fixed shape: `run` is captured once, and `plan` is called before each replay."""

    def freeze(self) -> None:
        """Called after the capture: from now on no buffer may move."""
        ...


@runtime_checkable
class GraphBackend(AttentionBackend, Protocol):
    """A backend with steps that can be captured. Their batches are padded to the shape with sequences over the padding
    row; such a sequence may have one new token, none, or all that are missing."""

    def graph_kind(self, batch: AttentionBatch) -> GraphKind:
        """The kind of graph that would compute this step (not padded)."""
        ...

    def fits_graph(self, batch: AttentionBatch, shape: GraphShape) -> bool:
        """True if the shape's buffers hold this step. Does not compare the numbers of tokens and sequences."""
        ...

    def open_graph(self, shape: GraphShape) -> GraphAttention:
        """Make the buffers for one shape. Open the largest shape first: it sets the size of the shared memory."""
        ...
