"""The K and V of every token, per layer, indexed by slot.

    k[layer], v[layer]: [num_slots, num_kv_heads, head_dim]

    page   0                1                2
    slot   0 … page_size-1  page_size …      …        page 0 is padding: never handed out, may be read under a mask

Which slot belongs to which token is the business of req_to_token and the allocator; this file only holds numbers.
It is the one file of memory_pool that imports torch.
"""

from __future__ import annotations

import torch


class MHAKVPool:
    """K/V tensors of multi-head and grouped-query attention, allocated once.

    Pages that were never written read as zeros: attention multiplies masked keys by zero, and 0 x NaN would be NaN.
    Raises MemoryError where the device cannot hold the pool.
    """

    def __init__(
        self,
        *,
        num_tokens: int,
        page_size: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """num_tokens: usable tokens, a positive multiple of page_size; the padding page comes on top."""
        if num_tokens < page_size or num_tokens % page_size:
            raise ValueError(f"KV pool of {num_tokens} tokens: use a positive multiple of the page size ({page_size})")
        self.num_tokens = num_tokens
        self.num_slots = num_tokens + page_size
        self.dtype = dtype
        self.device = device
        self.bytes_per_token = kv_bytes_per_token(
            num_layers=num_layers, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype
        )
        shape = (self.num_slots, num_kv_heads, head_dim)
        try:
            self.k = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
            self.v = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        except RuntimeError as error:  # torch.OutOfMemoryError on a GPU, a plain RuntimeError of the CPU allocator
            raise MemoryError(f"cannot allocate the {self.describe()} on {device}; lower --max-total-tokens") from error

    def describe(self) -> str:
        """One line for the start-up log: tokens x bytes per token = size."""
        size = self.num_tokens * self.bytes_per_token / 2**30
        return f"KV pool: {self.num_tokens} tokens × {self.bytes_per_token} bytes = {size:.2f} GiB"

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """In all layers copy slots source to slots target (int64 [n]; no target twice). All sources are read before
        any target is written, so the two may overlap."""
        for tensor in (*self.k, *self.v):
            tensor.index_copy_(0, target, tensor.index_select(0, source))


def kv_bytes_per_token(*, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Bytes that K and V of one token take over all layers."""
    return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize
