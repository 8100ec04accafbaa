"""Attention over ragged batches with scattered slots, and what must come out."""

from __future__ import annotations

import numpy as np
import torch

from baton.attention.backend import AttentionBackend, AttentionBatch, AttentionSpec, SharedPrefix, kv_shapes
from baton.attention.torch_native import TorchNativeBackend
from baton.memory_pool.kv_pool import make_kv_pool

CPU = torch.device("cpu")
HEAD_DIM = 8
MAX_CONTEXT = 700


class Scene:
    """A pool whose every slot holds NaN unless a sequence owns it, so that no stray read goes unseen.

    Page 0 is zero as in a real pool: it may be read under a mask.
    """

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        *,
        heads=4,
        kv_heads=2,
        window=None,
        page_size=1,
        seed=0,
        layout="scattered",
        shared: tuple[SharedPrefix, ...] = (),
        head_dim=HEAD_DIM,
        value_dim=0,
        logit_cap: float | None = None,
        has_sinks=False,
        chunk: int | None = None,
        values_in_keys=False,
        dtype=torch.float32,
    ):
        """lengths: (prefix, new tokens) of each sequence. layout of its slots: scattered, ascending or descending."""
        rng = np.random.default_rng(seed)
        self.seed = seed
        scale = head_dim**-0.5
        self.spec = AttentionSpec(
            0, heads, kv_heads, head_dim, scale, window, value_dim, logit_cap, has_sinks, chunk, values_in_keys
        )
        self.prefix_lens = np.array([prefix for prefix, _ in lengths], dtype=np.int32)
        self.extend_lens = np.array([new for _, new in lengths], dtype=np.int32)
        totals = self.prefix_lens + self.extend_lens
        num_pages = int(sum(-(-total // page_size) for total in totals)) + 3
        self.pool = make_kv_pool(
            num_tokens=num_pages * page_size,
            page_size=page_size,
            shapes=kv_shapes([self.spec]),
            dtype=dtype,
            device=CPU,
        )
        for tensor in (*self.pool.layers.k, *self.pool.layers.v):
            tensor[page_size:] = float("nan")
        ascending = np.arange(1, num_pages + 1)
        pages = {"ascending": ascending, "descending": ascending[::-1], "scattered": rng.permutation(ascending)}[layout]
        num_rows = len(lengths) + 2
        self.req_to_token = rng.integers(
            1, num_pages * page_size, (num_rows + 1, max(MAX_CONTEXT, int(totals.max(initial=0))))
        ).astype(np.int32)
        self.req_to_token[-1] = 0  # padding
        self.rows = rng.permutation(num_rows)[: len(lengths)].astype(np.int32)
        generator = torch.Generator().manual_seed(seed)
        self.k, self.v, slots, taken = [], [], [], 0
        for row, total in zip(self.rows, totals, strict=True):
            count = -(-int(total) // page_size)
            own = (pages[taken : taken + count, None] * page_size + np.arange(page_size)).ravel()[:total]
            taken += count
            self.req_to_token[row, :total] = own
            slots.append(own)
            self.k.append(torch.randn(int(total), kv_heads, head_dim, generator=generator).to(dtype))
            self.v.append(torch.randn(int(total), kv_heads, self.spec.value_size, generator=generator).to(dtype))
        self.shared = list(shared)
        for group in shared:
            first, part = group.first, slice(group.length)
            for other in range(first + 1, first + group.count):
                for owned in (slots, self.k, self.v):
                    owned[other][part] = owned[first][part]
                self.req_to_token[self.rows[other], part] = slots[first][part]
        if values_in_keys:
            self.v = [k[..., : self.spec.value_size] for k in self.k]
        for own, k, v in zip(slots, self.k, self.v, strict=True):
            self.pool.k[0][own] = k
            if not values_in_keys:
                self.pool.v[0][own] = v
        self.q = torch.randn(int(self.extend_lens.sum()), heads, head_dim, generator=generator).to(dtype)
        self.sinks = torch.randn(heads, generator=generator) if has_sinks else None

    def batch(self) -> AttentionBatch:
        return AttentionBatch(
            req_to_token=torch.from_numpy(self.req_to_token),
            host_rows=self.rows,
            prefix_lens=self.prefix_lens,
            extend_lens=self.extend_lens,
            pad_row=len(self.req_to_token) - 1,
            shared=self.shared,
        )

    def run(self, backend: AttentionBackend | None = None) -> torch.Tensor:
        backend = backend or TorchNativeBackend(self.pool)
        backend.plan(self.batch())
        return backend.run(self.spec, self.q, self.sinks)

    def expected(self) -> torch.Tensor:
        """One query at a time, in float64."""
        group, rows, token = self.spec.num_heads // self.spec.num_kv_heads, [], 0
        window, chunk = self.spec.sliding_window or 10**9, self.spec.chunk or 10**9
        for k, v, prefix, new in zip(self.k, self.v, self.prefix_lens, self.extend_lens, strict=True):
            for position in range(int(prefix), int(prefix + new)):
                low = max(0, position - window + 1, position // chunk * chunk)
                seen_k = k[low : position + 1].double().repeat_interleave(group, dim=1)
                seen_v = v[low : position + 1].double().repeat_interleave(group, dim=1)
                scores = torch.einsum("hd,nhd->hn", self.q[token].double(), seen_k) * self.spec.scale
                if (cap := self.spec.logit_cap) is not None:
                    scores = cap * torch.tanh(scores / cap)
                if self.sinks is not None:
                    scores = torch.cat((scores, self.sinks.double().unsqueeze(-1)), dim=-1)
                weights = scores.softmax(-1)[:, : len(seen_v)]
                rows.append(torch.einsum("hn,nhd->hd", weights, seen_v))
                token += 1
        return torch.stack(rows).float()

    def check(self) -> None:
        torch.testing.assert_close(
            self.run(), self.expected(), atol=2e-6, rtol=1e-5, msg=lambda m: f"{m}\nseed {self.seed}"
        )
