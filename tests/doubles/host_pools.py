"""Pools of a device and its host full of known bytes, and what is in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from baton.memory_pool.kv_pool import MHAKVPool, uniform_shapes
from baton.memory_pool.stores.host_pool import HostPool

CPU = torch.device("cpu")
SMALL, LINES = (2, 3), (2, 64)
"""KV heads and their size: pieces of odd bytes, and pieces of whole cache lines."""


def device_pool(
    num_tokens: int = 64,
    page_size: int = 1,
    *,
    layers: int = 3,
    heads: tuple[int, int] = SMALL,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> MHAKVPool:
    """Every byte random: NaNs with payloads among them. The padding page too, so that a write there shows."""
    pool = MHAKVPool(
        num_tokens=num_tokens,
        page_size=page_size,
        shapes=uniform_shapes(layers, heads[0], heads[1]),
        dtype=dtype,
        device=device,
    )
    generator = torch.Generator().manual_seed(7)
    for tensor in (*pool.k, *pool.v):
        noise = torch.randint(0, 256, (tensor.nbytes,), generator=generator, dtype=torch.uint8)
        tensor.view(torch.uint8).view(-1).copy_(noise)
    return pool


def host_pool(pool: MHAKVPool, num_tokens: int, **options: Any) -> HostPool:
    """Guard bytes everywhere."""
    host = HostPool(pool, num_tokens, **options)
    host.pages_view[:] = 0xA5
    return host


def device_bytes(pool: MHAKVPool) -> np.ndarray:
    """A copy: uint8 [pages, layers, 2, page bytes of K or V], as the host has it, made without the code under test."""
    parts = [torch.stack([layer.cpu().view(torch.uint8) for layer in layers]) for layers in (pool.k, pool.v)]
    slots = torch.stack(parts).flatten(3)  # [2, layers, slots, bytes]
    return slots.unflatten(2, (-1, pool.page_size)).permute(2, 1, 0, 3, 4).flatten(3).clone().numpy()


def host_bytes(host: HostPool) -> np.ndarray:
    return host.pages_view.reshape(host.num_pages, host.num_layers, 2, -1).copy()


def slots_of(pages: np.ndarray, page_size: int, dtype: Any = np.int32) -> np.ndarray:
    return (pages[:, None] * page_size + np.arange(page_size)).ravel().astype(dtype)


def some_pages(rng: np.random.Generator, usable: int, count: int) -> np.ndarray:
    return rng.permutation(usable)[:count] + 1
