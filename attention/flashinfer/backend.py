"""Paged attention on CUDA devices through FlashInfer (Ye et al. 2025, "FlashInfer: Efficient and Customizable Attention
Engine for LLM Inference Serving").

    plan   once per step, on the host: `paging` makes the arrays, and the library divides the work. The device gathers
           page numbers from its copy of req_to_token. Nothing waits for the device.
    run    once per layer: launches the kernels

The kernels depend on the step:

    one query per sequence           decode on tensor cores
    the same, beams over prefixes    prefixes by a prefill kernel, tails by decode, merged by their log-sum-exp
    more queries                     prefill: FA2 for short extends, FA3 for long ones where the card has it (Hopper)

In a graph (`open_graph`) the arrays go to fixed buffers, and sizes are those of the shape. Layers of one kind (window,
heads, scale and soft cap) share a plan. The library is passed in: `library.py` loads the real one, tests pass a double.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import ClassVar, Protocol

import numpy as np
import torch

from ...memory_pool.kv_pool import KVPool
from .. import paging
from ..backend import AttentionBatch, AttentionSpec, GraphKind, GraphShape
from .kernel import Arena, FlashInferLibrary, Kernel

FA3_QUERIES = 128
"""Use FA3 from this mean number of queries per sequence. Measured on an H200: at 8, FA2 takes 65 µs and FA3 87; at
8192, FA3 does 535 TFLOP/s and FA2 315. The exact crossing point was not measured."""

SHARED_KEYS = 1 << 16
"""Read prefixes apart if that saves this many keys. Measured on an H200 (32 / 8 heads): one group of 32 beams over 700
tokens (22 k) gains nothing; 16 such groups (350 k) take a third of the time."""

ROWS_PER_GROUP = 8
"""A graph for shared prefixes has room for one group per this many rows. The more room, the longer a plan takes."""


_Kind = tuple[int | None, int, int, int, float, float | None]
"""Window, heads, KV heads, head size, scale and soft cap: what layers have in common that share a plan."""


def _kind(spec: AttentionSpec) -> _Kind:
    return spec.sliding_window, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.scale, spec.logit_cap


class FlashInferBackend:
    """GraphBackend over a KVPool of float16 or bfloat16. Layers may differ, see `_kind`; sinks are refused in
    `library.check_supported`."""

    name: ClassVar[str] = "flashinfer"

    def __init__(
        self,
        kv_pool: KVPool,
        specs: Sequence[AttentionSpec],
        library: FlashInferLibrary,
        build_kv_indices: Callable[..., None],
        *,
        max_graph_pages: int = 1 << 23,
    ) -> None:
        """specs: the model's layers. build_kv_indices: kv_indices.build_kv_indices or its Triton kernel.
        max_graph_pages: the most page numbers that a step in a graph may need in all."""
        self._arena = Arena(kv_pool, library, build_kv_indices, max_graph_pages)
        self._kinds = {_kind(spec): spec for spec in specs}
        self._copied = _CopyFence(kv_pool.device)
        self._eager = {kind: self._parts(kind, None) for kind in GraphKind}
        self._long = self._parts(GraphKind.EXTEND, None, fa3=True) if library.has_fa3 else self._eager[GraphKind.EXTEND]
        self._planned = self._eager[GraphKind.DECODE]

    def plan(self, batch: AttentionBatch) -> None:
        """See AttentionBackend.plan."""
        kind = self.graph_kind(batch)
        is_long = kind is GraphKind.EXTEND and batch.extend_lens.mean() >= FA3_QUERIES
        self._planned = self._long if is_long else self._eager[kind]
        self._copied.plan_all(self._planned.values(), batch)

    def run(self, spec: AttentionSpec, q: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """See AttentionBackend.run."""
        return self._planned[_kind(spec)].run(q, spec.layer_id)

    def graph_kind(self, batch: AttentionBatch) -> GraphKind:
        """See GraphBackend.graph_kind."""
        if not (batch.extend_lens == 1).all():
            return GraphKind.EXTEND
        groups = paging.useful_groups(batch, None, self._arena.pool.page_size)
        return GraphKind.SHARED if paging.saved_keys(groups) >= SHARED_KEYS else GraphKind.DECODE

    def fits_graph(self, batch: AttentionBatch, shape: GraphShape) -> bool:
        """See GraphBackend.fits_graph."""
        page_size = self._arena.pool.page_size
        if shape.kind is GraphKind.SHARED:
            groups = paging.useful_groups(batch, None, page_size)
            sequences, _ = paging.prefixes(batch, groups, page_size)
            if len(sequences) + 1 > _max_prefixes(shape):  # one more for the padding
                return False
        lengths = batch.prefix_lens.astype(np.int64) + batch.extend_lens
        pages = int((-(-lengths // page_size)).sum())
        return pages + shape.tokens <= self._arena.max_graph_pages  # padding reads at most one page per token

    def open_graph(self, shape: GraphShape) -> FlashInferGraph:
        """See GraphBackend.open_graph."""
        return FlashInferGraph(self._parts(shape.kind, shape), self._copied)

    def _parts(self, kind: GraphKind, shape: GraphShape | None, *, fa3: bool = False) -> dict[_Kind, _Part]:
        """How the layers of each kind attend. shape: that of a graph, or None."""
        return {each: self._part(spec, kind, shape, fa3) for each, spec in self._kinds.items()}

    def _part(self, spec: AttentionSpec, kind: GraphKind, shape: GraphShape | None, fa3: bool) -> _Part:
        def kernel(role: str, window: int | None, causal: bool | None, count: int | None) -> Kernel:
            return Kernel(self._arena, spec, f"{role} {name}", window, causal=causal, fa3=fa3, count=count)

        window, name = spec.sliding_window, str(_kind(spec))
        count = None if shape is None else shape.sequences
        if kind is GraphKind.DECODE:
            return _Flat(window, kernel("flat", window, None, count))
        if kind is GraphKind.EXTEND:
            return _Flat(window, kernel("flat", window, True, count))
        # Prefixes are read apart only if all queries see them whole, so no window is needed here.
        prefix = kernel("prefix", None, False, None if shape is None else _max_prefixes(shape))
        mask = None if shape is None else torch.zeros(shape.tokens, dtype=torch.uint8, device=self._arena.pool.device)
        return _Shared(window, prefix, kernel("tail", window, None, count), mask, self._arena)


class FlashInferGraph:
    """GraphAttention of one captured forward."""

    def __init__(self, parts: dict[_Kind, _Part], copied: _CopyFence) -> None:
        self._parts = parts
        self._copied = copied

    def plan(self, batch: AttentionBatch) -> None:
        """See AttentionBackend.plan; the batch is padded to the shape."""
        self._copied.plan_all(self._parts.values(), batch)

    def run(self, spec: AttentionSpec, q: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """See AttentionBackend.run."""
        return self._parts[_kind(spec)].run(q, spec.layer_id)

    def freeze(self) -> None:
        """See GraphAttention.freeze."""
        for part in self._parts.values():
            part.freeze()


class _CopyFence:
    """Protects the pinned memory in which the library plans, and from which it copies without waiting. The copies of
    the last plan must be over before the next plan writes there; they nearly always are."""

    def __init__(self, device: torch.device) -> None:
        self._done = torch.cuda.Event() if device.type == "cuda" else None

    def plan_all(self, parts: Iterable[_Part], batch: AttentionBatch) -> None:
        if self._done is not None:
            self._done.synchronize()
        for part in parts:
            part.plan_part(batch)
        if self._done is not None:
            self._done.record()


class _Part(Protocol):
    """How the layers of one kind attend in a step."""

    def plan_part(self, batch: AttentionBatch) -> None: ...

    def run(self, q: torch.Tensor, layer_id: int) -> torch.Tensor: ...

    def freeze(self) -> None: ...


class _Flat:
    """Every sequence reads all that it sees."""

    def __init__(self, window: int | None, kernel: Kernel) -> None:
        self._window = window
        self._kernel = kernel

    def plan_part(self, batch: AttentionBatch) -> None:
        self._kernel.plan_sequences(batch, paging.whole(batch, self._window, self._kernel.page_size))

    def run(self, q: torch.Tensor, layer_id: int) -> torch.Tensor:
        return self._kernel.run(q, layer_id)

    def freeze(self) -> None:
        self._kernel.freeze()


class _Shared:
    """Each group's prefix is read once, each row's tail by itself; their results are merged."""

    def __init__(
        self, window: int | None, prefix: Kernel, tail: Kernel, mask: torch.Tensor | None, arena: Arena
    ) -> None:
        """mask: a graph's fixed buffer, uint8 [rows]; None without a graph."""
        self._window = window
        self._prefix = prefix
        self._tail = tail
        self._mask = mask
        self._is_fixed = mask is not None
        self._arena = arena

    def plan_part(self, batch: AttentionBatch) -> None:
        page_size = self._arena.pool.page_size
        groups = paging.useful_groups(batch, self._window, page_size)
        sequences, grouped = paging.prefixes(batch, groups, page_size)
        self._prefix.plan_sequences(batch, sequences)
        self._tail.plan_sequences(batch, paging.tails(batch, groups, self._window, page_size))
        mask = torch.from_numpy(grouped.view(np.uint8))
        if self._arena.pool.device.type == "cuda":
            mask = mask.pin_memory()
        if self._is_fixed and self._mask is not None:
            self._mask.copy_(mask, non_blocking=True)
        else:
            self._mask = mask.to(self._arena.pool.device, non_blocking=True)

    def run(self, q: torch.Tensor, layer_id: int) -> torch.Tensor:
        out, lse = self._tail.run_with_lse(q, layer_id)
        prefix, prefix_lse = self._prefix.run_with_lse(q, layer_id)
        self._arena.library.merge_state_in_place(out, lse, prefix, prefix_lse, mask=self._mask)
        return out

    def freeze(self) -> None:
        self._prefix.freeze()
        self._tail.freeze()


def _max_prefixes(shape: GraphShape) -> int:
    """The most sequences of the prefix part: groups, and the rows before, between and after them."""
    return 2 + shape.tokens // ROWS_PER_GROUP
