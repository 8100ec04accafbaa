"""The stores of blocks behind the host, from the settings; and the fingerprint that keeps models apart."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from dataclasses import dataclass
from pathlib import Path

import xxhash

from ...memory_pool.stores.block_store import BlockStore
from ...memory_pool.stores.disk_pool import DiskPool
from ...memory_pool.stores.host_pool import HostPool
from ...memory_pool.stores.pool_folder import DiskPoolError
from ...memory_pool.stores.redis_link import RemoteStoreError
from ...memory_pool.stores.remote_store import RemoteStore
from ..checkpoint.model_files import ModelLoadError
from ..config import TierConfig
from ..model_config import ModelConfig

logger = logging.getLogger(__name__)

LEAST_BLOCK_TOKENS = 64
"""Smaller pages share a block: a file of one token would be mostly header, and most of the time opening it."""

GB = 2**30


@dataclass(frozen=True)
class Stores:
    """The stores behind the host, fastest first, and the fingerprint and size of their blocks."""

    by_name: dict[str, BlockStore]
    fingerprint: bytes
    block_tokens: int

    def close(self) -> None:
        """Give up what they hold open; no thread may use them any more."""
        for store in self.by_name.values():
            store.close()


def open_stores(config: TierConfig, host_pool: HostPool, model: bytes) -> Stores | None:
    """The stores that the settings name; None for none. Raises ModelLoadError if one cannot be used.

    model: `model_fingerprint`.
    """
    block_tokens = max(host_pool.page_size, LEAST_BLOCK_TOKENS)
    layout = f"{host_pool.dtype} page {host_pool.page_size} block {block_tokens} layers {host_pool.num_layers}"
    fingerprint, block_bytes = model + layout.encode(), block_tokens * host_pool.bytes_per_token
    stores: dict[str, BlockStore] = {}
    if config.disk_cache_path:
        stores["disk"] = _open_disk(config, block_bytes, fingerprint)
    if config.remote_cache_url:
        try:
            stores["remote"] = _open_remote(config, block_bytes, fingerprint)
        except ModelLoadError:
            Stores(stores, fingerprint, block_tokens).close()
            raise
    return Stores(stores, fingerprint, block_tokens) if stores else None


def _open_disk(config: TierConfig, block_bytes: int, fingerprint: bytes) -> DiskPool:
    capacity = int(config.disk_cache_gb * GB)
    try:
        pool = DiskPool(config.disk_cache_path, capacity, block_bytes, fingerprint)
    except DiskPoolError as error:
        raise ModelLoadError(f"--disk-cache-path {config.disk_cache_path}: {error}") from error
    logger.info(
        "disk KV cache in %s: %.2f of %.2f GiB used, %d blocks of %.2f MiB",
        config.disk_cache_path, pool.used_bytes / GB, capacity / GB, len(pool), block_bytes / 2**20,
    )  # fmt: skip
    return pool


def _open_remote(config: TierConfig, block_bytes: int, fingerprint: bytes) -> RemoteStore:
    url = config.remote_cache_url
    if url.startswith("env:"):
        url = os.environ.get(url.removeprefix("env:"), "")
        if not url:
            raise ModelLoadError(f"--remote-cache-url {config.remote_cache_url}: the environment has no such variable")
    try:
        store = RemoteStore(url, block_bytes, fingerprint, ttl_s=config.remote_cache_ttl or None)
        found = store.connect(time.monotonic())
    except RemoteStoreError as error:
        raise ModelLoadError(f"--remote-cache-url: {error}") from error
    logger.info("remote KV cache at %s%s", store.address, "" if found else ", which is not there yet")
    return store


def model_fingerprint(folder: Path, config: ModelConfig, *, dummy_device: str = "") -> bytes:
    """Hash of everything that determines the KV except its layout: every byte of the weights, and how they are used.
    Reads all weight files, at the speed of memory where they have just been loaded.

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
