"""The host tier's memory, from the settings: how much of it, and which policy they mean."""

from __future__ import annotations

import logging

import torch

from ...memory_pool.kv_pool import MHAKVPool
from ...memory_pool.stores.host_pool import HostPool
from ...radix.tiers.host_tier import HostPolicy
from ..config import TierConfig
from ..kv_transfer.kernel_copies import choose_copies
from ..layers.ops import CopyKVOp
from .host_cache_sizing import plan_host_tokens
from .memory_sizing import available_memory

logger = logging.getLogger(__name__)

HOST_POLICIES = {
    "write_through": HostPolicy(),
    "write_through_selective": HostPolicy(min_hits=1),
    "write_back": HostPolicy(write_back=True),
}
"""By the names of --host-write-policy."""


def make_host_pool(config: TierConfig, device_pool: MHAKVPool, transfer: CopyKVOp) -> HostPool | None:
    """Memory for what leaves the device; None if the settings ask for none. Raises HostCacheError (a ModelLoadError) if
    the machine does not have it. transfer: the device's own copies to and from such memory."""
    # A KV pool on a CPU takes its memory only as it is used, so what is available still contains all of it.
    promised = device_pool.num_slots * device_pool.bytes_per_token if device_pool.device.type == "cpu" else 0
    num_tokens = plan_host_tokens(
        config.host_cache_gb,
        config.host_cache_ratio,
        device_pool.num_tokens,
        device_pool.bytes_per_token,
        device_pool.page_size,
        available_memory(torch.device("cpu")) - promised,
    )
    if not num_tokens:
        return None
    pool = HostPool(device_pool, num_tokens, copy_pages=choose_copies(transfer, device_pool))
    tokens, size = device_pool.num_tokens, device_pool.bytes_per_token
    logger.info(
        "tiers: device KV pool: %d tokens × %d bytes = %.2f GiB; %s, %s",
        tokens,
        size,
        tokens * size / 2**30,
        pool.describe(),
        config.host_write_policy,
    )
    if num_tokens < tokens and config.host_write_policy == "write_through":
        logger.warning(
            "the host cache holds %d tokens, fewer than the KV pool (%d): it has lost most of what the pool loses; "
            "make it several times as large, or keep the memory",
            num_tokens,
            tokens,
        )
    return pool
