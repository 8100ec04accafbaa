"""The host pool of a worker, and what its operator is told of it."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.attention.double_sparse import Sparsity
from baton.runtime.checkpoint.hf_config import load_model_config
from baton.runtime.config import TierConfig
from baton.runtime.tier_setup import make_host_pool, model_fingerprint
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
