"""Which layers have a pool of their own, and that each part of a step gets the table of its pool."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from baton.attention.backend import AttentionBatch, AttentionSpec
from baton.attention.torch_native import TorchNativeBackend
from baton.attention.windowed import open_windowed, window_layers
from baton.memory_pool.kv_pool import KVShape, WindowedKVPool, make_kv_pool


def spec(layer: int, window: int | None = None, chunk: int | None = None) -> AttentionSpec:
    return AttentionSpec(layer, 2, 1, 8, 0.4, sliding_window=window, chunk=chunk)


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        ([], (0, set())),
        ([spec(0), spec(1)], (0, set())),
        ([spec(0, 8), spec(1), spec(2, 32), spec(3, 16)], (32, {0, 2, 3})),
        ([spec(0, 8), spec(1, 8)], (8, {0, 1})),
        ([spec(0), spec(1, None, 64), spec(2, 100, 50)], (64, {1, 2})),
        ([spec(0, 8), spec(1), spec(0, 30)], (30, {0})),
        ([spec(0, 8), spec(1), spec(0)], (0, set())),
        ([spec(0), spec(1), spec(0, 8)], (0, set())),
    ],
)
def test_window_layers(specs: list[AttentionSpec], expected: Any) -> None:
    assert window_layers(specs) == expected


def test_windows_of_two_lengths_are_attended_over_their_own_slots() -> None:
    """As over one pool for all layers. What is behind the longest window is anything: its slots are others' by now."""
    specs = [spec(0, 5), spec(1), spec(2, 12), spec(3, 1)]
    rng, length, new = torch.Generator().manual_seed(3), 40, 4
    shape, device = [KVShape(1, 8, 8)], torch.device("cpu")

    def pool(layers: int, tokens: int):
        return make_kv_pool(num_tokens=tokens, page_size=1, shapes=shape * layers, dtype=torch.float32, device=device)

    one, two = pool(4, 64), WindowedKVPool(pool(1, 64), pool(3, 24), frozenset([0, 2, 3]))
    slots = torch.randperm(64, generator=rng)[:length] + 1
    kept = torch.randperm(24, generator=rng)[: 12 + new - 1] + 1
    beside = torch.zeros(length, dtype=torch.int64)
    beside[-len(kept) :] = kept
    for layer in range(4):
        for ours, theirs in ((one.k[layer], two.k[layer]), (one.v[layer], two.v[layer])):
            values = torch.randn(length, 1, 8, generator=rng)
            ours[slots] = values
            theirs.fill_(torch.nan)
            theirs[beside if layer != 1 else slots] = values
            if layer != 1:
                theirs[0] = torch.nan
    batch = AttentionBatch(
        torch.stack([slots, torch.zeros_like(slots)]).int(),
        np.zeros(1, dtype=np.int32),
        np.array([length - new], dtype=np.int32),
        np.array([new], dtype=np.int32),
        pad_row=1,
        req_to_window=torch.stack([beside, torch.zeros_like(beside)]).int(),
    )
    alone, parts = TorchNativeBackend(one), open_windowed(lambda _: TorchNativeBackend(two), specs, two.window_layers)
    alone.plan(batch)
    parts.plan(batch)
    for each in specs:
        q = torch.randn(new, 2, 8, generator=rng)
        torch.testing.assert_close(parts.run(each, q), alone.run(each, q))
