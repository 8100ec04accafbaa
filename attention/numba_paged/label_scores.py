"""Scores of labels, the first numbers of keys, for sparse decodes (`attention/double_sparse.py`), read in place.

A block of tokens is scored for all heads before the next one, since a token's heads lie side by side in the pool.
"""

from __future__ import annotations

from typing import Any

import torch

from ...memory_pool.kv_rows import is_quantized, quantize, read_rows
from ..backend import AttentionSpec
from ..double_sparse import score_labels
from .compiling import KernelFunction, kernel_builder
from .kinds import BLOCK, KINDS, kept_bytes
from .team import Call, Team

NEXT, BLOCKS, LENGTH, QUERIES, KEYS, KEY_STEP, SLOTS, OUT = range(8)
"""Indices of the kernel's arguments. The step is bytes from slot to slot."""
ARGUMENTS = 8

AT_ONCE = 4
"""Blocks that a thread takes."""


@kernel_builder
def label_kernel(channels: int, head_dim: int, kv_heads: int, group: int, kind_name: str) -> KernelFunction:
    from .operations import fetch_add, peek, score

    kind = KINDS.index(kind_name)
    row = kept_bytes(head_dim, kind_name)
    fetched, fetches = 0, 1  # no values; the labels of the next block

    def kernel(a: Any) -> None:
        blocks, length, step = peek(a + 8 * BLOCKS), peek(a + 8 * LENGTH), peek(a + 8 * KEY_STEP)
        queries, keys, out = peek(a + 8 * QUERIES), peek(a + 8 * KEYS), peek(a + 8 * OUT)
        while True:
            first = fetch_add(a + 8 * NEXT, AT_ONCE)
            if first >= blocks:
                return
            for block in range(first, min(first + AT_ONCE, blocks)):
                slots = peek(a + 8 * SLOTS) + 4 * BLOCK * block
                count = min(length - BLOCK * block, BLOCK)
                ahead = slots + 4 * BLOCK if length >= BLOCK * (block + 2) else slots
                for head in range(kv_heads):
                    score(
                        channels, head_dim, fetched, group, kind, fetches,
                        queries + 4 * head * group * channels, keys + head * row, keys,
                        slots, ahead, count, step, step, out + 4 * BLOCK * group * (head * blocks + block),
                    )  # fmt: skip

    return kernel


class LabelScores:
    """Called as `double_sparse.score_labels`."""

    def __init__(self, team: Team) -> None:
        self._team = team
        self._calls: dict[tuple[Any, ...], Call] = {}

    def probe(
        self, spec: AttentionSpec, channels: int, dtype: torch.dtype, kv_dtype: torch.dtype | None = None
    ) -> None:
        """Compile the kernel for layers of this shape and compare it with torch. kv_dtype: of the pool; None:
        ``dtype``. Raises RuntimeError if they differ, and whatever compiled code may raise."""
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randn(200, spec.num_kv_heads, spec.head_dim, generator=generator)
        kv_dtype = kv_dtype or dtype
        k = quantize(numbers, kv_dtype).view(kv_dtype) if is_quantized(kv_dtype) else numbers.to(kv_dtype)
        queries = torch.randn(spec.num_kv_heads, spec.group, spec.head_dim, generator=generator).to(dtype)
        slots = torch.randperm(len(k), generator=generator)[:150].int()
        found = self(queries, k, slots, channels)
        expected = score_labels(queries.float(), read_rows(k, spec.head_dim, torch.float32), slots, channels)
        if not torch.allclose(found, expected, atol=1e-3, rtol=1e-3):
            raise RuntimeError(f"scores differ from torch's by up to {(found - expected).abs().max():.3g}")

    def __call__(self, queries: torch.Tensor, k: torch.Tensor, slots: torch.Tensor, channels: int) -> torch.Tensor:
        """queries: [kv_heads, group, head_dim]; k: a layer of the pool's, contiguous; slots: int32 [n],
        contiguous. Returns float32 [kv_heads, group, n]."""
        kv_heads, group, head_dim = queries.shape
        key = channels, head_dim, kv_heads, group, str(k.dtype).removeprefix("torch.")
        if key not in self._calls:
            self._calls[key] = Call(label_kernel(*key), ARGUMENTS)
        call, length = self._calls[key], len(slots)
        near = queries[..., :channels].float().contiguous()
        blocks = -(-length // BLOCK)
        out = torch.empty(kv_heads, blocks, group, BLOCK)
        a = call.arguments
        a[NEXT], a[BLOCKS], a[LENGTH], a[QUERIES], a[KEYS] = 0, blocks, length, near.data_ptr(), k.data_ptr()
        a[KEY_STEP], a[SLOTS], a[OUT] = k.stride(0) * k.element_size(), slots.data_ptr(), out.data_ptr()
        self._team.run(call, min(torch.get_num_threads(), -(-blocks // AT_ONCE)))
        return out.transpose(1, 2).reshape(kv_heads, group, blocks * BLOCK)[..., :length]
