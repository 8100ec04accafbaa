"""The host pool of a worker, and what its operator is told of it."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from baton.attention.double_sparse import Sparsity
from baton.memory_pool.allocator import Allocator
from baton.memory_pool.kv_pool import make_kv_pool, uniform_shapes
from baton.memory_pool.state_pool import StatePool, StateTensor
from baton.memory_pool.stores.host_pool import HostPool
from baton.memory_pool.stores.host_state_pool import HostStatePool
from baton.runtime.checkpoint.hf_config import load_model_config
from baton.runtime.config import TierConfig
from baton.runtime.tier_setup import Stores, make_host_pool, model_fingerprint, open_stores
from tests.doubles.host_pools import device_pool


@pytest.mark.parametrize(
    ("ratio", "policy", "is_small"),
    [(0.5, "write_through", True), (1.0, "write_through", False), (0.5, "write_back", False)],
)
def test_host_cache_smaller_than_pool_is_warned_about(
    ratio: float, policy: Any, is_small: bool, caplog: pytest.LogCaptureFixture
) -> None:
    unused: Any = None
    with caplog.at_level(logging.INFO):
        pool = make_host_pool(TierConfig(host_cache_ratio=ratio, host_write_policy=policy), device_pool(), unused)
    assert pool is not None and pool.num_tokens == 64 * ratio
    warning = "the host cache holds 32 tokens, fewer than the KV pool (64)"
    assert any(record.message.startswith(warning) for record in caplog.records) is is_small


def test_first_tokens_find_memory_and_the_rest_takes_none() -> None:
    """Pools of 256 MiB. The first tokens, of the device and of the host, are written where memory is already."""
    unused: Any = None
    shapes, cpu = uniform_shapes(2, 1, 64), torch.device("cpu")
    device = make_kv_pool(num_tokens=2**18, page_size=1, shapes=shapes, dtype=torch.float32, device=cpu)
    before = psutil.Process().memory_info().rss
    host = make_host_pool(TierConfig(host_cache_ratio=1.0), device, unused)
    assert host is not None and host.bytes_per_token * host.num_tokens == 256 * 2**20
    ready = psutil.Process().memory_info().rss
    assert ready - before < 160 * 2**20
    slots = Allocator(2**18).alloc_extend(np.array([0]), np.array([2**15]), np.array([0]))  # 32 MiB of either pool
    assert slots is not None
    host.store(slots, slots)
    host.load(slots, slots)
    assert psutil.Process().memory_info().rss - ready < 8 * 2**20


def test_blocks_of_sparse_decodes_are_kept_apart() -> None:
    """Their keys have another order, and their values depend on what decodes left out."""
    toy = Path(__file__).parents[2] / "examples" / "toy_model"
    config = load_model_config(toy, context_length=0)
    order = torch.arange(32).repeat(2, 1)
    sparsity = Sparsity(channels=8, tokens=256, threshold=4096, orders={0: order, 1: order})
    others = [
        None,
        sparsity,
        replace(sparsity, orders={0: order.flip(1), 1: order}),
        replace(sparsity, orders={0: order, 1: order.flip(0).flip(1)}),
        replace(sparsity, channels=9),
        replace(sparsity, tokens=257),
        replace(sparsity, threshold=4097),
    ]
    found = {model_fingerprint(toy, config, dummy_device="cpu", sparsity=other) for other in others}
    assert len(found) == len(others)
    assert found == {model_fingerprint(toy, config, dummy_device="cpu", sparsity=other) for other in others}


def test_fingerprint_tells_weights_in_few_bits_apart() -> None:
    """A server with --quantization does not read the KV that one without it has left on disk."""
    toy = Path(__file__).parents[2] / "examples" / "toy_model"
    config = load_model_config(toy, context_length=0)
    kinds = ("", "int8, inputs rounded", "int8", "int4, inputs rounded", "auto")
    assert len({model_fingerprint(toy, config, few_bits=kind) for kind in kinds}) == len(kinds)


def stores_of(folder: Path, shape: tuple[int, ...] = (30, 40), kv_tokens: int = 256) -> Stores:
    """The disk's stores of a model with recurrent states."""
    device = make_kv_pool(
        num_tokens=kv_tokens,
        page_size=16,
        shapes=uniform_shapes(2, 1, 8),
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    states = StatePool(8, [{"recurrent": StateTensor(shape, torch.float32)}], torch.device("cpu"))
    config = TierConfig(host_cache_ratio=1.0, disk_cache_path=str(folder), disk_cache_gb=0.01)
    host = HostPool(device, kv_tokens)
    stores = open_stores(config, host, b"model", HostStatePool(states, 8))
    assert stores is not None
    stores.close()
    return stores


def sizes(stores: Stores) -> tuple[int, int]:
    """Bytes of the disk for blocks, and for snapshots."""
    blocks, snapshots = stores.by_name["disk"].size(), stores.snapshots["disk"].size()
    assert blocks is not None and snapshots is not None
    return blocks.total_bytes, snapshots.total_bytes


def test_disk_is_shared_out_as_the_host_is(tmp_path: Path) -> None:
    total = int(0.01 * 2**30)
    kv, states = 256 * 2 * 2 * 8 * 4, 8 * 1200 * 4
    blocks, snapshots = sizes(stores_of(tmp_path))
    assert abs(blocks - total * kv / (kv + states)) < 2 and total - 2 <= blocks + snapshots <= total
    assert abs(sizes(stores_of(tmp_path, (1,)))[1] - total / 10) < 2, "however small a state is"
    assert abs(sizes(stores_of(tmp_path, (300, 400), 64))[0] - total / 10) < 2, "and a token"


def test_snapshot_has_room_for_all_but_a_page_of_a_block(tmp_path: Path) -> None:
    stores = stores_of(tmp_path)
    page = 16 * 2 * 2 * 8 * 4
    assert stores.by_name["disk"].block_bytes == 4 * page
    assert stores.snapshots["disk"].block_bytes == 1200 * 4 + 3 * page


def test_states_of_another_shape_are_kept_apart(tmp_path: Path) -> None:
    fingerprints = {stores_of(tmp_path, shape).fingerprint for shape in ((30, 40), (40, 30), (30, 40))}
    assert len(fingerprints) == 2 and len(list(tmp_path.iterdir())) == 4, "a folder each, for blocks and snapshots"
