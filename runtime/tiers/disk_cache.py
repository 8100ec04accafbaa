"""The disk tier's folder, from the settings; and the fingerprint that keeps the KV of one model from another's."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ...memory_pool.tiers.disk_pool import DiskPool
from ...memory_pool.tiers.host_pool import HostPool
from ...memory_pool.tiers.pool_folder import DiskPoolError
from ..checkpoint.model_files import ModelLoadError
from ..config import TierConfig
from ..model_config import ModelConfig

logger = logging.getLogger(__name__)

LEAST_BLOCK_TOKENS = 64
"""Smaller pages share a block: a file of one token would be mostly header, and most of the time opening it."""

GB = 2**30


@dataclass(frozen=True)
class DiskCache:
    """What the disk tier needs: its blocks, and how they are named."""

    pool: DiskPool
    fingerprint: bytes
    block_tokens: int


def open_disk_cache(config: TierConfig, host_pool: HostPool | None, model: bytes) -> DiskCache | None:
    """The folder of --disk-cache-path; None if the settings name none. Raises ModelLoadError if it cannot be used.

    model: `model_fingerprint`.
    """
    if not config.disk_cache_path:
        return None
    assert host_pool is not None, "the settings were checked: blocks go through the host"
    block_tokens = max(host_pool.page_size, LEAST_BLOCK_TOKENS)
    layout = f"{host_pool.dtype} page {host_pool.page_size} block {block_tokens} layers {host_pool.num_layers}"
    fingerprint = model + layout.encode()
    capacity = int(config.disk_cache_gb * GB)
    try:
        pool = DiskPool(config.disk_cache_path, capacity, block_tokens * host_pool.bytes_per_token, fingerprint)
    except DiskPoolError as error:
        raise ModelLoadError(f"--disk-cache-path {config.disk_cache_path}: {error}") from error
    logger.info(
        "disk KV cache in %s: %.2f of %.2f GiB used, %d blocks of %d tokens",
        config.disk_cache_path, pool.used_bytes / GB, capacity / GB, len(pool), block_tokens,
    )  # fmt: skip
    return DiskCache(pool, fingerprint, block_tokens)


def model_fingerprint(folder: Path, config: ModelConfig, *, dummy_device: str = "") -> bytes:
    """What must be equal for two servers' KV to be the same, but for its layout: every byte of the weights, and how
    they are used. Reads all weight files, at the speed of memory where they have just been loaded.

    dummy_device: the device that drew random weights; then the files do not count.
    """
    # Lengths say which tokens there may be, not what their KV is.
    digest = xxhash.xxh3_128(repr(dataclasses.replace(config, context_length=0)).encode())
    if dummy_device:
        digest.update(f"dummy weights of {dummy_device}".encode())
        return digest.digest()
    for file in sorted(folder.glob("*.safetensors")):
        digest.update(file.name.encode())
        with file.open("rb") as data:
            while piece := data.read(2**24):
                digest.update(piece)
    return digest.digest()
