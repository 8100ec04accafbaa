"""Creates the host tier's pool from the settings: its size, checked against the machine's memory, and its policy."""

from __future__ import annotations

import logging
import math

import torch

from ...memory_pool.kv_pool import MHAKVPool
from ...memory_pool.stores.host_pool import HostPool
from ...radix.tiers.host_tier import HostPolicy
from ..checkpoint.model_files import ModelLoadError
from ..config import TierConfig
from ..kv_transfer.kernel_copies import choose_copies
from ..layers.ops import CopyKVOp
from .memory_sizing import available_memory

GB = 2**30


class HostCacheError(ModelLoadError):
    """The host cache cannot be had as asked; the message says which flag to change."""


def plan_host_tokens(
    cache_gb: float,
    cache_ratio: float,
    device_tokens: int,
    bytes_per_token: int,
    page_size: int,
    available_bytes: int,
) -> int:
    """Usable tokens of the host pool, a multiple of page_size; 0 where neither flag asks for one.

    cache_gb: GiB of host memory for it, the padding page included. cache_ratio: its tokens by those of the device's
    pool, device_tokens; its padding page comes on top. 0: not asked for.
    available_bytes: what the host can still give (`memory_sizing.available_memory`) after all that was promised before:
    a KV pool on a CPU takes its memory only as it is used, so its size must be subtracted.
    """
    for flag, value in (("--host-cache-gb", cache_gb), ("--host-cache-ratio", cache_ratio)):
        if not 0 <= value < math.inf:  # false for NaN too
            raise HostCacheError(f"{flag} is {value}; use a number from 0 (no host cache) up")
    if not cache_gb and not cache_ratio:
        return 0
    if cache_gb and cache_ratio:
        raise HostCacheError(
            f"--host-cache-gb {cache_gb} and --host-cache-ratio {cache_ratio} both size the host cache; set one of them"
        )
    asked = f"--host-cache-gb {cache_gb}" if cache_gb else f"--host-cache-ratio {cache_ratio}"
    if cache_gb:
        pages = int(cache_gb * GB) // bytes_per_token // page_size - 1  # one is the padding page
    else:
        pages = int(cache_ratio * device_tokens) // page_size
    if pages < 1:
        padded = f" and the padding page, together {_gib(2 * page_size * bytes_per_token)}" if cache_gb else ""
        raise HostCacheError(
            f"{asked} is less than one page ({page_size} tokens × {bytes_per_token} bytes){padded}; raise it"
        )
    tokens = pages * page_size
    if tokens + page_size > 2**31:
        raise HostCacheError(f"{asked} makes {tokens} tokens, too many for int32 slot numbers; lower it")
    needed = (tokens + page_size) * bytes_per_token
    if needed > available_bytes:
        raise HostCacheError(f"{asked} needs {_gib(needed)} of host memory, but {_lower(available_bytes, asked)}")
    return tokens


def _lower(available: int, asked: str) -> str:
    there = f"{_gib(max(available, 0))} can still be had (a container's limit counts)"
    return f"{there}; lower {asked.split()[0]}, or the device's pool where it is in the same memory"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.2f} MiB"


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
