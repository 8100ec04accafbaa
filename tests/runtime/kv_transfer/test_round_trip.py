"""Byte for byte: from the device to the host, to a disk, to another host, and back to other slots of the device."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.memory_pool.kv_pool import KVShape, make_kv_pool, uniform_shapes
from baton.memory_pool.stores.disk_pool import DiskPool
from baton.memory_pool.stores.host_pool import HostPool
from baton.radix.tiers.block_orders import BlockRead, BlockWrite
from baton.radix.tiers.host_tier import TierCopy
from baton.runtime.kv_transfer.block_io import BlockIO
from baton.runtime.kv_transfer.thread_transfer import ThreadTransfers
from baton.runtime.kv_transfer.tier_io import BlocksEnded, TierIO

TOKENS, BLOCK = 256, 64
LATENTS = [KVShape(1, 12, 8, values_in_keys=True)] * 3


def finish(tiers: TierIO) -> None:
    give_up = time.monotonic() + 60
    while tiers.under_way and time.monotonic() < give_up:
        for ended in tiers.poll():
            if isinstance(ended, BlocksEnded):
                assert ended.blocks == (TOKENS // BLOCK if ended.fence == 3 else 1)
            else:
                assert ended.ok
        time.sleep(0.001)
    assert not tiers.under_way


def slots(page_size: int, seed: int) -> np.ndarray:
    """int32 [TOKENS]: whole pages of a pool twice as large, scattered."""
    pages = np.random.default_rng(seed).permutation(2 * TOKENS // page_size)[: TOKENS // page_size] + 1
    return (pages[:, None] * page_size + np.arange(page_size)).reshape(-1).astype(np.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("shapes", [uniform_shapes(3, 2, 8), LATENTS], ids=["heads", "latents"])
def test_kv_survives_round_trip_through_host_and_disk(
    shapes: list[KVShape], page_size: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    cpu = torch.device("cpu")
    device = make_kv_pool(num_tokens=2 * TOKENS, page_size=page_size, shapes=shapes, dtype=dtype, device=cpu)
    generator = torch.Generator().manual_seed(7)
    for layer in (*device.layers.k, *device.layers.v):
        layer.copy_(torch.randn(layer.shape, generator=generator).to(dtype))
    first, second = slots(page_size, 1), slots(page_size, 2)
    before = [layer[torch.from_numpy(first).long()].clone() for layer in (*device.layers.k, *device.layers.v)]
    keys = tuple(bytes([number]) * 20 for number in range(TOKENS // BLOCK))
    for store in (True, False):  # two servers, one folder
        host = HostPool(device, 2 * TOKENS)
        disk = DiskPool(tmp_path, 2**24, BLOCK * device.bytes_per_token, b"a model")
        transfers = ThreadTransfers(host, lambda: None)
        tiers = TierIO(transfers, page_size, {"disk": BlockIO(disk, host.pages_view, 2**24)})
        on_host = slots(page_size, 3 + store)
        if store:
            tiers.submit_orders([TierCopy(1, True, first, on_host)])
            finish(tiers)
            tiers.submit_orders(
                [BlockWrite("disk", 10 + n, key, on_host[n * BLOCK :][:BLOCK]) for n, key in enumerate(keys)]
            )
            finish(tiers)
            for layer in (*device.layers.k, *device.layers.v):
                layer.fill_(-1)
        else:
            tiers.submit_orders([BlockRead("disk", 3, keys, on_host, 60.0)])
            finish(tiers)
            tiers.submit_orders([TierCopy(2, False, second, on_host)])
            finish(tiers)
        assert tiers.close(60)
        disk.close()
    for layer, was in zip((*device.layers.k, *device.layers.v), before, strict=True):
        assert torch.equal(layer[torch.from_numpy(second).long()].view(torch.uint8), was.view(torch.uint8))
