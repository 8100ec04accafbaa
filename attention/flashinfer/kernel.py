"""A FlashInfer wrapper with the buffers it plans into, and the memory that all wrappers of a backend share.

Only public parts of the library are used: the two wrappers for paged KV, their plan and run, and `fast_decode_plan`,
which skips plan's work in Python if buffers are fixed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ...memory_pool.kv_pool import KVPool
from ..backend import AttentionBatch, AttentionSpec
from ..paging import PagedSequences

WORKSPACE_BYTES = 256 << 20
"""Initial size; doubled when a plan needs more."""

INT_WORKSPACE_BYTES = 8 << 20
"""The size that the library itself uses."""


@dataclass(slots=True, frozen=True)
class FlashInferLibrary:
    """The parts of flashinfer (0.6.12) that are used."""

    prefill: type[Any]
    """BatchPrefillWithPagedKVCacheWrapper"""
    decode: type[Any]
    """BatchDecodeWithPagedKVCacheWrapper"""
    fast_decode_plan: Callable[..., None]
    """A faster plan of ``decode``; needs an ordinary plan first."""
    merge_state_in_place: Callable[..., None]
    has_fa3: bool
    """The card runs FA3."""


class Arena:
    """The pool, and the memory that wrappers use one after the other."""

    def __init__(
        self,
        pool: KVPool,
        library: FlashInferLibrary,
        build_kv_indices: Callable[..., None],
        max_graph_pages: int,
    ) -> None:
        """build_kv_indices: kv_indices.build_kv_indices or its Triton kernel. max_graph_pages: the most page numbers of
        one step in a graph."""
        self.pool = pool
        self.library = library
        self.build_kv_indices = build_kv_indices
        self.max_graph_pages = max_graph_pages
        self.workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
        self._int_workspaces: dict[str, torch.Tensor] = {}
        self._graph_indices: dict[str, torch.Tensor] = {}
        # The paged view of a layer's slots, [pages, page_size, kv_heads, head_dim].
        self.pages = [
            tuple(slots.unflatten(0, (-1, pool.page_size)) for slots in layer) for layer in zip(pool.k, pool.v)
        ]

    def int_workspace(self, role: str) -> torch.Tensor:
        """The buffer of a role, shared by steps of all shapes, as steps run one after the other on the device."""
        return self._kept(self._int_workspaces, role, INT_WORKSPACE_BYTES, torch.uint8)

    def graph_indices(self, role: str) -> torch.Tensor:
        """The buffer for page numbers of graphs, shared likewise."""
        return self._kept(self._graph_indices, role, self.max_graph_pages, torch.int32)

    def grow_workspace(self) -> None:
        """Replace the workspace by one of twice its size; wrappers that hold the old one keep it."""
        self.workspace = torch.zeros(2 * len(self.workspace), dtype=torch.uint8, device=self.pool.device)

    def _kept(self, buffers: dict[str, torch.Tensor], role: str, size: int, dtype: torch.dtype) -> torch.Tensor:
        if role not in buffers:
            buffers[role] = torch.zeros(size, dtype=dtype, device=self.pool.device)
        return buffers[role]


class Kernel:
    """Paged attention of some sequences. ``run`` attends as the last ``plan`` prepared it."""

    def __init__(
        self,
        arena: Arena,
        spec: AttentionSpec,
        role: str,
        window: int | None,
        *,
        causal: bool | None,
        fa3: bool,
        count: int | None,
    ) -> None:
        """spec: that of any layer that it serves. role: a name, unique among the kernels of one step. window: how many
        tokens a query sees, which need not be the spec's. causal: whether a prefill is causal; None means a decode, one
        query per sequence. count: sequences of a graph; None without a graph."""
        self._arena = arena
        self._spec = spec
        self._role = role
        self._causal = causal
        self._backend = "fa3" if fa3 else "fa2"
        self._options = {
            "sm_scale": spec.scale,
            "window_left": -1 if window is None else window - 1,
            "q_data_type": arena.pool.dtype,
            "kv_data_type": arena.pool.dtype,
        }
        if spec.logit_cap is not None:
            self._options["logits_soft_cap"] = spec.logit_cap
        self._count = count
        self._fixed = None if count is None else torch.zeros(5 * count + 2, dtype=torch.int32, device=arena.pool.device)
        self._wrapper: Any = None
        self._frozen = False

    def plan_sequences(self, batch: AttentionBatch, sequences: PagedSequences) -> None:
        """Upload the arrays, gather page numbers, let the library divide the work. Nothing waits for the device."""
        if self._count is not None:
            sequences = sequences.padded(self._count, batch.pad_row)
        host = _Arrays.on_host(sequences, self._arena.pool.device)
        if self._fixed is None:
            device = _Arrays(host.packed.to(self._arena.pool.device, non_blocking=True), len(sequences))
            indices = torch.empty(host.num_pages, dtype=torch.int32, device=self._arena.pool.device)
        else:
            self._fixed.copy_(host.packed, non_blocking=True)
            device = _Arrays(self._fixed, len(sequences))
            indices = self._arena.graph_indices(self._role)[: host.num_pages]
        self._arena.build_kv_indices(
            batch.req_to_token,
            device.rows,
            device.starts,
            device.kv_indptr,
            indices,
            page_size=sequences.page_size,
            most_pages=int(sequences.num_pages.max()),
        )
        while True:
            try:
                self._plan_wrapper(host, device, indices, int(sequences.queries.max()))
                return
            except Exception as error:
                # A captured graph keeps its workspace's address, and no later plan needs more than its first one.
                if self._frozen or "workspace buffer" not in str(error):
                    raise
            self._arena.grow_workspace()
            self._wrapper = None

    @property
    def page_size(self) -> int:
        return self._arena.pool.page_size

    def run(self, q: torch.Tensor, layer_id: int) -> torch.Tensor:
        """q [tokens, heads, head_dim] -> the same shape, contiguous."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        return self._wrapper.run(q, self._arena.pages[layer_id], out=out)

    def run_with_lse(self, q: torch.Tensor, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """`run`, and the log-sum-exp (base 2) of the scores, float32 [tokens, heads]."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        return self._wrapper.run(q, self._arena.pages[layer_id], out=out, return_lse=True)

    def freeze(self) -> None:
        """A graph has been captured: from now on its buffers must not move."""
        self._frozen = True

    def _plan_wrapper(self, host: _Arrays, device: _Arrays, indices: torch.Tensor, most_queries: int) -> None:
        spec, page_size = self._spec, self._arena.pool.page_size
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim, page_size)
        is_first = self._wrapper is None
        if is_first:
            self._wrapper = self._make_prefill() if self._causal is not None else self._make_decode()
        if self._causal is not None:
            self._wrapper.plan(
                host.qo_indptr,
                host.kv_indptr,
                indices,
                host.last_page_lens,
                *heads,
                causal=self._causal,
                max_token_per_sequence=most_queries,
                **self._options,
            )
        elif is_first or self._fixed is None:
            self._wrapper.plan(host.kv_indptr, indices, host.last_page_lens, *heads, **self._options)
        else:  # the buffers are filled already
            self._arena.library.fast_decode_plan(
                self._wrapper,
                device.kv_indptr,
                indices,
                host.last_page_lens,
                *heads,
                global_override_indptr_cpu=host.kv_indptr,
                **self._options,
            )

    def _make_prefill(self) -> Any:
        buffers: dict[str, Any] = {}
        if self._fixed is not None and self._count is not None:
            fixed = _Arrays(self._fixed, self._count)
            buffers = {
                "use_cuda_graph": True,
                "qo_indptr_buf": fixed.qo_indptr,
                "paged_kv_indptr_buf": fixed.kv_indptr,
                "paged_kv_indices_buf": self._arena.graph_indices(self._role),
                "paged_kv_last_page_len_buf": fixed.last_page_lens,
            }
        wrapper = self._arena.library.prefill(self._arena.workspace, "NHD", backend=self._backend, **buffers)
        wrapper.reset_workspace_buffer(self._arena.workspace, self._arena.int_workspace(self._role))
        return wrapper

    def _make_decode(self) -> Any:
        buffers: dict[str, Any] = {}
        if self._fixed is not None and self._count is not None:
            fixed = _Arrays(self._fixed, self._count)
            buffers = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": fixed.kv_indptr,
                "paged_kv_indices_buffer": self._arena.graph_indices(self._role),
                "paged_kv_last_page_len_buffer": fixed.last_page_lens,
            }
        wrapper = self._arena.library.decode(
            self._arena.workspace, "NHD", use_tensor_cores=True, backend=self._backend, **buffers
        )
        wrapper.reset_workspace_buffer(self._arena.workspace, self._arena.int_workspace(self._role))
        return wrapper


class _Arrays:
    """qo_indptr, kv_indptr [count + 1], last_page_lens, rows, starts [count], views of one int32 tensor."""

    __slots__ = ("kv_indptr", "last_page_lens", "num_pages", "packed", "qo_indptr", "rows", "starts")

    def __init__(self, packed: torch.Tensor, count: int, num_pages: int = -1) -> None:
        """num_pages: of all sequences together; -1 if unknown."""
        self.packed = packed
        self.num_pages = num_pages
        parts = packed.split([count + 1, count + 1, count, count, count])
        self.qo_indptr, self.kv_indptr, self.last_page_lens, self.rows, self.starts = parts

    @classmethod
    def on_host(cls, sequences: PagedSequences, device: torch.device) -> _Arrays:
        """In pinned memory if the device is a GPU, so that the copy does not block."""
        kv_indptr = sequences.kv_indptr
        parts = [sequences.qo_indptr, kv_indptr, sequences.last_page_lens, sequences.rows, sequences.starts]
        packed = torch.from_numpy(np.concatenate(parts, dtype=np.int32, casting="same_kind"))
        if device.type == "cuda":
            packed = packed.pin_memory()
        return cls(packed, len(sequences), int(kv_indptr[-1]))
