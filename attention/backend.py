"""What an attention backend is: plan once per batch on the host, run once per layer.

The shape of the protocol follows FlashInfer's plan/run split, so that a GPU backend needs no device sync per layer.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
import torch

from .graph_shape import GraphKind, GraphShape


@dataclass(slots=True, frozen=True)
class AttentionSpec:
    """What one attention layer is. ``sliding_window``: tokens a query sees including itself; None sees all."""

    layer_id: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None


@dataclass(slots=True, frozen=True)
class SharedPrefix:
    """Sequences ``first`` to ``first + count`` of a step have the same slots in their first ``length`` positions, one
    new token each, and are equally long."""

    first: int
    count: int
    length: int


@dataclass(slots=True)
class AttentionBatch:
    """One step as attention sees it; ``bs`` sequences, ``tokens`` new tokens in sequence order. A sequence without a
    new token, and one over the padding row, is padding: a graph wants them.

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
    """A row of req_to_token that names nothing but the padding slot."""
    shared: list[SharedPrefix] = field(default_factory=list)
    """Groups that a backend may read the prefix once for; disjoint, and it may ignore them."""


class AttentionBackend(Protocol):
    """Owns no KV: it reads the pool it was given, and writes nothing there."""

    def plan(self, batch: AttentionBatch) -> None:
        """Prepare everything the layers of one forward share. Called once before `run`."""
        ...

    def run(self, spec: AttentionSpec, q: torch.Tensor) -> torch.Tensor:
        """Attend causally over prefix + new tokens; K and V of the new tokens are in the pool already.

        q: [tokens, num_heads, head_dim], heads and coordinates contiguous, rows possibly strided. Returns
        [tokens, num_heads, head_dim], contiguous.
        """
        ...


class GraphAttention(AttentionBackend, Protocol):
    """Attention of one forward of fixed shape: `run` is captured once, `plan` goes before each replay."""

    def freeze(self) -> None:
        """The forward has been captured: nothing may move."""
        ...


@runtime_checkable
class GraphBackend(AttentionBackend, Protocol):
    """A backend whose steps can be captured. Their batches are padded to the shape, with sequences over the padding
    row; those may have one new token, none, or what is missing."""

    def graph_kind(self, batch: AttentionBatch) -> GraphKind:
        """What kind of graph would compute this step (not padded)."""
        ...

    def fits_graph(self, batch: AttentionBatch, shape: GraphShape) -> bool:
        """Do the shape's buffers hold this step? Numbers of tokens and sequences are not looked at."""
        ...

    def open_graph(self, shape: GraphShape) -> GraphAttention:
        """Buffers for one shape. Open the largest shape first: memory that all use is grown by it."""
        ...
