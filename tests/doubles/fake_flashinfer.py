"""The parts of flashinfer that the backend uses, computed by torch on a CPU.

As strict as the real ones about shapes, dtypes and sizes, and stricter where a mistake would only show on a GPU: host
arrays must be on the host, kernels read the buffers they were given (as a captured graph does), and a workspace that
another plan has written since is noticed. Calls are recorded, so that a test can hold them against the real signatures.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch

from baton.attention.flashinfer.kernel import FlashInferLibrary

plan_numbers = itertools.count(1)


class FakeFlashInfer:
    """One library, with the calls made to it."""

    def __init__(self, *, workspace_per_row: int = 0, has_fa3: bool = True) -> None:
        """workspace_per_row: bytes of the float workspace that a plan needs for each of its rows."""
        self.calls: list[tuple[str, tuple, dict[str, Any]]] = []
        fake = self

        class Prefill(_PrefillWrapper):
            library = fake
            bytes_per_row = workspace_per_row

        class Decode(_DecodeWrapper):
            library = fake
            bytes_per_row = workspace_per_row

        self.library = FlashInferLibrary(
            prefill=Prefill,
            decode=Decode,
            fast_decode_plan=self._fast_decode_plan,
            merge_state_in_place=self._merge_state_in_place,
            has_fa3=has_fa3,
        )

    def used(self, name: str) -> int:
        return sum(call[0] == name for call in self.calls)

    def _fast_decode_plan(self, wrapper: _DecodeWrapper, *args: Any, **kwargs: Any) -> None:
        self.calls.append(("fast_decode_plan", (wrapper, *args), dict(kwargs)))
        indptr, indices, last_page_len, *heads = args
        host = kwargs.pop("global_override_indptr_cpu")
        assert wrapper.planned, "a first real plan makes what this one uses"
        assert wrapper.use_cuda_graph and host.device.type == "cpu"
        assert indptr.data_ptr() == wrapper.kv_indptr.data_ptr(), "it copies nothing: the buffers must be filled"
        torch.testing.assert_close(wrapper.kv_indptr, host)
        torch.testing.assert_close(wrapper.last_page_len, last_page_len)
        assert indices.data_ptr() == wrapper.indices.data_ptr()
        wrapper.finish_plan(torch.arange(len(host)), heads, causal=False, **kwargs)

    def _merge_state_in_place(self, v, s, v_other, s_other, mask=None) -> None:
        self.calls.append(("merge_state_in_place", (v, s, v_other, s_other), {"mask": mask}))
        assert s.dtype == s_other.dtype == torch.float32 and mask is not None and mask.dtype == torch.uint8
        assert v.is_contiguous() and v_other.is_contiguous() and len(mask) == len(v)
        most = torch.maximum(s, s_other)
        weight, other = torch.exp2(s - most), torch.exp2(s_other - most)
        merged = (v * weight[..., None] + v_other * other[..., None]) / (weight + other)[..., None]
        where = mask.bool()
        v[where] = merged[where].to(v.dtype)


class _Wrapper:
    library: FakeFlashInfer
    bytes_per_row = 0
    name: str
    qo_indptr: Any
    kv_indptr: Any
    indices: Any
    last_page_len: Any

    def __init__(self, float_workspace: torch.Tensor, kv_layout: str = "NHD", **kwargs: Any) -> None:
        self.library.calls.append((f"{self.name}.__init__", (float_workspace, kv_layout), dict(kwargs)))
        assert kv_layout == "NHD" and kwargs.pop("backend") in ("fa2", "fa3")
        self.float_workspace = float_workspace
        self.int_workspace = torch.zeros(8, dtype=torch.uint8)
        self.use_cuda_graph = kwargs.pop("use_cuda_graph", False)
        self.planned = False
        self.take_buffers(kwargs)

    def take_buffers(self, buffers: dict[str, Any]) -> None:
        raise NotImplementedError

    def reset_workspace_buffer(self, float_workspace: torch.Tensor, int_workspace: torch.Tensor) -> None:
        self.library.calls.append((f"{self.name}.reset_workspace_buffer", (self, float_workspace, int_workspace), {}))
        self.float_workspace, self.int_workspace = float_workspace, int_workspace

    def fill(self, kv_indptr, indices, last_page_len) -> None:
        assert kv_indptr.device.type == last_page_len.device.type == "cpu"
        assert kv_indptr.dtype == indices.dtype == last_page_len.dtype == torch.int32
        assert len(last_page_len) == len(kv_indptr) - 1 and len(indices) == int(kv_indptr[-1])
        if self.use_cuda_graph:
            assert len(kv_indptr) == len(self.kv_indptr), "the batch size of a graph is fixed"
            self.kv_indptr.copy_(kv_indptr)
            self.last_page_len.copy_(last_page_len)
            self.indices[: len(indices)].copy_(indices)
        else:
            self.kv_indptr, self.indices, self.last_page_len = kv_indptr, indices, last_page_len

    def finish_plan(
        self, qo_indptr, heads, *, causal, sm_scale, window_left, q_data_type, kv_data_type, logits_soft_cap=None
    ) -> None:
        rows = int(qo_indptr[-1])
        if self.name == "decode":
            self.qo_indptr = qo_indptr
        if rows * self.bytes_per_row > len(self.float_workspace):
            raise RuntimeError("Buffer overflow when allocating memory. Increase the workspace buffer size.")
        assert q_data_type == kv_data_type
        self.heads, self.causal, self.scale, self.window_left = heads, causal, sm_scale, window_left
        self.logits_soft_cap = logits_soft_cap
        self.rows = rows
        self.planned = True
        self.number = next(plan_numbers)
        self.int_workspace[:8] = torch.tensor([self.number]).view(torch.uint8)

    def run(self, q, paged_kv_cache, *, out, return_lse=False):
        self.library.calls.append(
            (f"{self.name}.run", (self, q, paged_kv_cache), {"out": out, "return_lse": return_lse})
        )
        assert int(self.int_workspace[:8].view(torch.int64)) == self.number, "another plan wrote this workspace since"
        assert q.shape[0] == self.rows and out.shape == q.shape and out.is_contiguous() and q.stride(-1) == 1
        k_cache, v_cache = paged_kv_cache
        num_heads, num_kv_heads, head_dim, page_size = self.heads
        assert k_cache.shape[1:] == (page_size, num_kv_heads, head_dim) and q.shape[1:] == (num_heads, head_dim)
        lse = torch.full(q.shape[:2], -math.inf)
        for i in range(len(self.kv_indptr) - 1):
            first, last = int(self.qo_indptr[i]), int(self.qo_indptr[i + 1])
            pages = self.indices[int(self.kv_indptr[i]) : int(self.kv_indptr[i + 1])].long()
            length = (len(pages) - 1) * page_size + int(self.last_page_len[i])
            if last == first:
                continue
            assert 0 < int(self.last_page_len[i]) <= page_size
            k, v = (cache[pages].flatten(0, 1)[:length] for cache in (k_cache, v_cache))
            out[first:last], lse[first:last] = self.attend(q[first:last], k, v)
        return (out, lse) if return_lse else out

    def attend(self, q, k, v):
        queries, keys, group = len(q), len(k), q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, dim=1).float() for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q.float(), k) * self.scale
        if self.logits_soft_cap is not None:
            scores = self.logits_soft_cap * torch.tanh(scores / self.logits_soft_cap)
        position = torch.arange(queries).unsqueeze(1) + keys - queries
        visible = torch.ones(queries, keys, dtype=torch.bool)
        if self.causal:
            visible &= torch.arange(keys) <= position
        if self.window_left >= 0:
            visible &= torch.arange(keys) >= position - self.window_left
        scores = scores.masked_fill(~visible, -math.inf)
        found = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(q.dtype)
        return found, (scores.logsumexp(-1) / math.log(2)).transpose(0, 1)


class _PrefillWrapper(_Wrapper):
    """BatchPrefillWithPagedKVCacheWrapper"""

    name = "prefill"

    def take_buffers(self, buffers: dict[str, Any]) -> None:
        self.qo_indptr = buffers.pop("qo_indptr_buf", None)
        self.kv_indptr = buffers.pop("paged_kv_indptr_buf", None)
        self.indices = buffers.pop("paged_kv_indices_buf", None)
        self.last_page_len = buffers.pop("paged_kv_last_page_len_buf", None)
        self.max_rows: int | None = None
        assert not buffers

    def plan(self, qo_indptr, kv_indptr, indices, last_page_len, *heads: int, causal=False, **kwargs: Any) -> None:
        call = (self, qo_indptr, kv_indptr, indices, last_page_len, *heads)
        self.library.calls.append((f"{self.name}.plan", call, kwargs | {"causal": causal}))
        most = kwargs.pop("max_token_per_sequence")
        assert qo_indptr.dtype == torch.int32 and most == int(qo_indptr.diff().max())
        rows = int(qo_indptr[-1])
        if self.use_cuda_graph:
            self.max_rows = self.max_rows or rows
            assert rows <= self.max_rows and len(qo_indptr) == len(self.qo_indptr)
            self.qo_indptr.copy_(qo_indptr)
        else:
            self.qo_indptr = qo_indptr
        self.fill(kv_indptr, indices, last_page_len)
        self.finish_plan(qo_indptr, list(heads), causal=causal, **kwargs)


class _DecodeWrapper(_Wrapper):
    """BatchDecodeWithPagedKVCacheWrapper"""

    name = "decode"

    def take_buffers(self, buffers: dict[str, Any]) -> None:
        assert buffers.pop("use_tensor_cores")
        self.kv_indptr = buffers.pop("paged_kv_indptr_buffer", None)
        self.indices = buffers.pop("paged_kv_indices_buffer", None)
        self.last_page_len = buffers.pop("paged_kv_last_page_len_buffer", None)
        assert not buffers

    def plan(self, indptr, indices, last_page_len, *heads: int, **kwargs: Any) -> None:
        self.library.calls.append((f"{self.name}.plan", (self, indptr, indices, last_page_len, *heads), dict(kwargs)))
        self.fill(indptr, indices, last_page_len)
        self.finish_plan(torch.arange(len(indptr)), list(heads), causal=False, **kwargs)
