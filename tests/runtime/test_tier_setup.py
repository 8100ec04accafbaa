"""The host pool of a worker, and what its operator is told of it."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from baton.runtime.config import TierConfig
from baton.runtime.tier_setup import make_host_pool
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
