"""Creates the tiers below the device from the settings: the pool in host memory, the stores of blocks behind it, and
the fingerprint that keeps the blocks of different models apart."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import xxhash

from ..attention.double_sparse import Sparsity
from ..memory_pool.kv_pool import KVPool
from ..memory_pool.state_pool import StatePool
from ..memory_pool.stores.block_store import BlockStore
from ..memory_pool.stores.disk_pool import DiskPool
from ..memory_pool.stores.host_pool import HostPool
from ..memory_pool.stores.host_state_pool import HostStatePool, SnapshotPages
from ..memory_pool.stores.pool_folder import DiskPoolError
from ..memory_pool.stores.redis_link import RemoteStoreError
from ..memory_pool.stores.remote_store import RemoteStore
from ..radix.tiers.host_tier import HostPolicy
from .checkpoint.model_files import ModelLoadError
from .config import TierConfig
from .kv_transfer.kernel_copies import choose_copies
from .layers.ops import CopyKVOp
from .model_config import ServedConfig
from .runner.memory_sizing import available_memory

logger = logging.getLogger(__name__)

GB = 2**30

HOST_POLICIES = {
    "write_through": HostPolicy(),
    "write_through_selective": HostPolicy(min_hits=1),
    "write_back": HostPolicy(write_back=True),
}
"""Policies by their names in --host-write-policy."""

TOUCHED_BYTES = 64 << 20
"""Bytes of either pool that are written at start: `_touch_first_used`."""

LEAST_DISK_SHARE = 0.1
"""Least part of the disk cache for blocks, and for snapshots: small models of one kind need little of the other."""

LEAST_BLOCK_TOKENS = 64
"""Smaller pages share a block: a file of one token would be mostly header, and reading it mostly the time to open
it."""


class HostCacheError(ModelLoadError):
    """The machine cannot hold the host cache of this size; the message names the flag to change."""


def plan_host_tokens(
    cache_gb: float,
    cache_ratio: float,
    device_tokens: int,
    bytes_per_token: int,
    page_size: int,
    available_bytes: int,
    kv_share: float = 1.0,
) -> int:
    """Usable tokens of the host pool, a multiple of page_size; 0 where neither flag asks for one.

    cache_gb: GiB of host memory for the pool, the padding page included. cache_ratio: its size as a multiple of the
    device pool's device_tokens; the padding page comes on top. 0: not set.
    available_bytes: free host memory (`memory_sizing.available_memory`) less the memory promised before: a KV pool on a
    CPU takes its memory only as it is used, so its size must be subtracted.
    kv_share: of cache_gb; the rest is for recurrent states (`plan_host_states`).
    """
    asked = _asked_size(cache_gb, cache_ratio)
    if not asked:
        return 0
    if cache_gb:
        pages = int(cache_gb * kv_share * GB) // bytes_per_token // page_size - 1  # one is the padding page
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


def _asked_size(cache_gb: float, cache_ratio: float) -> str:
    """The flag that sizes the host cache, with its value; empty if neither does. Raises HostCacheError for values that
    make no sense."""
    for flag, value in (("--host-cache-gb", cache_gb), ("--host-cache-ratio", cache_ratio)):
        if not 0 <= value < math.inf:  # false for NaN too
            raise HostCacheError(f"{flag} is {value}; use a number from 0 (no host cache) up")
    if cache_gb and cache_ratio:
        raise HostCacheError(
            f"--host-cache-gb {cache_gb} and --host-cache-ratio {cache_ratio} both size the host cache; set one of them"
        )
    if not cache_gb and not cache_ratio:
        return ""
    return f"--host-cache-gb {cache_gb}" if cache_gb else f"--host-cache-ratio {cache_ratio}"


def plan_host_states(cache_gb: float, cache_ratio: float, states: StatePool, kv_share: float) -> int:
    """Recurrent states that the host keeps; 0 where neither flag asks for a host cache, else at least one. cache_gb,
    cache_ratio: as for `plan_host_tokens`. states: the device's pool."""
    asked = _asked_size(cache_gb, cache_ratio)
    if not asked:
        return 0
    if cache_gb:
        count = int(cache_gb * (1 - kv_share) * GB) // states.bytes_per_state - 1  # one slot is not used
    else:
        count = int(cache_ratio * states.num_states)
    if count < 1:
        raise HostCacheError(f"{asked} has no room for a recurrent state of {states.bytes_per_state} bytes; raise it")
    return count


def _kv_share(device_pool: KVPool, states: StatePool | None) -> float:
    """Share of the KV in the memory of KV and states on the device: it is the same on the host."""
    kv = device_pool.num_tokens * device_pool.bytes_per_token
    return 1.0 if states is None else kv / (kv + states.num_states * states.bytes_per_state)


def _lower(available: int, asked: str) -> str:
    there = f"{_gib(max(available, 0))} is still free (a container's limit counts)"
    return f"{there}; lower {asked.split()[0]}, or the size of the device's pool if that is in the same memory"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.2f} MiB"


def _check_room(config: TierConfig, needed: int) -> None:
    """Raises HostCacheError if the machine does not have so many bytes."""
    available = available_memory(torch.device("cpu"))
    if needed > available:
        asked = _asked_size(config.host_cache_gb, config.host_cache_ratio)
        raise HostCacheError(f"{asked} needs {_gib(needed)} of host memory, but {_lower(available, asked)}")


def make_host_states(config: TierConfig, device_pool: KVPool, states: StatePool | None) -> HostStatePool | None:
    """The host's pool of recurrent states; None if the settings ask for no host cache, or the model has no states.
    Raises HostCacheError as `make_host_pool` does, which counts its memory too. states: the device's pool."""
    count = _planned_states(config, device_pool, states)
    if states is None or not count:
        return None
    pool = HostStatePool(states, count)
    logger.info("tiers: %s", pool.describe())
    return pool


def _planned_states(config: TierConfig, device_pool: KVPool, states: StatePool | None) -> int:
    share = _kv_share(device_pool, states)
    return plan_host_states(config.host_cache_gb, config.host_cache_ratio, states, share) if states is not None else 0


def make_host_pool(
    config: TierConfig, device_pool: KVPool, transfer: CopyKVOp, states: StatePool | None = None
) -> HostPool | None:
    """The pool in host memory; None if the settings ask for none. Where the model has recurrent states only, it has
    slots for tokens, so that the tree can name them, but no memory. Raises HostCacheError (a ModelLoadError) if the
    machine does not have the memory. transfer: the device's own copies to and from the host. states: the device's
    recurrent states, which need their share of the host's memory."""
    # Pools on a CPU take their memory only as it is used, so the available memory still contains all of it.
    promised = device_pool.num_slots * device_pool.bytes_per_token if device_pool.device.type == "cpu" else 0
    num_states = _planned_states(config, device_pool, states)
    if states is not None:
        promised += states.nbytes if device_pool.device.type == "cpu" else 0
        promised += (num_states + 1) * states.bytes_per_state if num_states else 0
    if not device_pool.bytes_per_token:
        if states is None or not num_states:
            return None
        _check_room(config, promised)
        pages = device_pool.num_tokens * num_states // states.num_states // device_pool.page_size
        return HostPool(device_pool, max(1, pages) * device_pool.page_size)
    num_tokens = plan_host_tokens(
        config.host_cache_gb,
        config.host_cache_ratio,
        device_pool.num_tokens,
        device_pool.bytes_per_token,
        device_pool.page_size,
        available_memory(torch.device("cpu")) - promised,
        _kv_share(device_pool, states),
    )
    if not num_tokens:
        return None
    pool = HostPool(device_pool, num_tokens, copy_pages=choose_copies(transfer, device_pool))
    if not pool.pinned:
        _touch_first_used(pool, device_pool)
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
            "the host cache holds %d tokens, fewer than the KV pool (%d): it has already dropped most "
            "tokens that the pool evicts; make it several times as large, lower --max-total-tokens, or, if no disk or "
            "remote store needs it, disable it",
            num_tokens,
            tokens,
        )
    return pool


@torch.inference_mode()
def _touch_first_used(host: HostPool, device: KVPool) -> None:
    """Write zeros where the first tokens go, which is the end of either pool: an `Allocator` hands out the highest
    slots first. The system finds memory when it is first written, which took a millisecond per MiB on a virtual
    machine; the first conversations to come back from disk would wait for that, longer the longer they are."""
    tokens = max(host.page_size, TOUCHED_BYTES // host.bytes_per_token)
    host.memory[-(tokens // host.page_size) :].zero_()
    for layer in (*device.layers.k, *device.layers.v):
        layer[-tokens:].zero_()


@dataclass(frozen=True)
class Stores:
    """The stores behind the host, fastest first, and the fingerprint and size of their blocks."""

    by_name: dict[str, BlockStore]
    fingerprint: bytes
    block_tokens: int
    snapshots: dict[str, BlockStore]
    """Of the snapshots, by the same names; empty where the model has no recurrent states."""

    def close(self) -> None:
        """Close the stores' files and connections; no thread may use them any more."""
        for store in (*self.by_name.values(), *self.snapshots.values()):
            store.close()


def open_stores(
    config: TierConfig, host_pool: HostPool, model: bytes, states: HostStatePool | None = None
) -> Stores | None:
    """The stores that the settings name; None for none. Raises ModelLoadError if one cannot be used.

    model: `model_fingerprint`. states: the host's; None where the model has none.
    """
    block_tokens = max(host_pool.page_size, LEAST_BLOCK_TOKENS)
    kind = f"{host_pool.dtype}"
    if host_pool.dtype != host_pool.model_dtype:
        kind += f" of {host_pool.model_dtype}"
    layout = f"{kind} page {host_pool.page_size} block {block_tokens} layers {host_pool.layout}"
    if states is not None:
        layout += f" states {states.layout}"
    fingerprint, pages = model + layout.encode(), block_pages(host_pool)
    sizes = {"blocks": block_tokens // host_pool.page_size * pages.shape[1]}
    if states is not None:
        sizes["recurrent states"] = snapshot_pages(host_pool, states, block_tokens).block_bytes
    stores = Stores({}, fingerprint, block_tokens, {})
    try:
        for (kind, size), share in zip(sizes.items(), _disk_shares(host_pool, states)):
            by_name = stores.by_name if kind == "blocks" else stores.snapshots
            own = fingerprint if kind == "blocks" else fingerprint + b" snapshots"
            if config.disk_cache_path:
                by_name["disk"] = _open_disk(config, share, size, own, kind)
            if config.remote_cache_url:
                by_name["remote"] = _open_remote(config, size, own)
    except ModelLoadError:
        stores.close()
        raise
    return stores if stores.by_name else None


def block_pages(pool: HostPool) -> np.ndarray:
    """What blocks consist of, uint8 [pages, bytes]: the pages of the host pool. Where the model has no KV a page is one
    byte; its blocks say which prefixes a store knows, and snapshots have all the rest."""
    return pool.pages_view if pool.bytes_per_token else np.zeros((pool.num_pages, 1), dtype=np.uint8)


def snapshot_pages(pool: HostPool, states: HostStatePool, block_tokens: int) -> SnapshotPages:
    """Snapshots of these states, with the KV of fewer tokens than a block has."""
    return SnapshotPages(states.states_view, block_pages(pool), block_tokens // pool.page_size - 1)


def _disk_shares(pool: HostPool, states: HostStatePool | None) -> tuple[float, ...]:
    """The parts of the disk cache for blocks and for snapshots: as on the host."""
    if states is None:
        return (1.0,)
    kv = pool.num_tokens * pool.bytes_per_token
    share = kv / (kv + states.num_states * states.bytes_per_state)
    share = min(max(share, LEAST_DISK_SHARE), 1 - LEAST_DISK_SHARE)
    return share, 1 - share


def _open_disk(config: TierConfig, share: float, block_bytes: int, fingerprint: bytes, kind: str) -> DiskPool:
    capacity = int(config.disk_cache_gb * share * GB)
    try:
        pool = DiskPool(config.disk_cache_path, capacity, block_bytes, fingerprint)
    except DiskPoolError as error:
        raise ModelLoadError(f"--disk-cache-path {config.disk_cache_path}: {error}") from error
    logger.info(
        "disk KV cache in %s: %.2f of %.2f GiB used, %d %s of %.2f MiB",
        config.disk_cache_path, pool.used_bytes / GB, capacity / GB, len(pool), kind, block_bytes / 2**20,
    )  # fmt: skip
    return pool


def _open_remote(config: TierConfig, block_bytes: int, fingerprint: bytes) -> RemoteStore:
    url = config.remote_cache_url
    if url.startswith("env:"):
        url = os.environ.get(url.removeprefix("env:"), "")
        if not url:
            raise ModelLoadError(f"--remote-cache-url {config.remote_cache_url}: that environment variable is not set")
    try:
        store = RemoteStore(url, block_bytes, fingerprint, ttl_s=config.remote_cache_ttl or None)
        found = store.connect(time.monotonic())
    except RemoteStoreError as error:
        raise ModelLoadError(f"--remote-cache-url: {error}") from error
    logger.info("remote KV cache at %s%s", store.address, "" if found else ", which does not answer yet")
    return store


def model_fingerprint(
    folder: Path,
    config: ServedConfig,
    *,
    dummy_device: str = "",
    sparsity: Sparsity | None = None,
    few_bits: str = "",
) -> bytes:
    """Hash of everything that determines the KV except its layout: every byte of the weights, and how they are used.
    Reads all weight files, at the speed of memory where they have just been loaded.

    dummy_device: the device that drew random weights; then the files do not count. sparsity: it decides the order of
    the numbers in keys, and what later layers see. few_bits: `ModelRunner.few_bits`, as KV of rounded weights or inputs
    is not that of the others.
    """
    # The lengths bound the positions; they do not change the KV.
    digest = xxhash.xxh3_128(repr(dataclasses.replace(config, context_length=0)).encode())
    if sparsity is not None:
        digest.update(f"{sparsity.channels} {sparsity.tokens} {sparsity.threshold}".encode())
        for layer, order in sparsity.orders.items():
            digest.update(f"order of layer {layer}: {order.tolist()}".encode())
    if few_bits:
        digest.update(f"weights in few bits: {few_bits}".encode())
    if dummy_device:
        digest.update(f"dummy weights of {dummy_device}".encode())
        return digest.digest()
    for file in sorted([*folder.glob("*.safetensors"), *folder.glob("*.gguf")]):
        digest.update(file.name.encode())
        with file.open("rb") as data:
            while piece := data.read(2**24):
                digest.update(piece)
    return digest.digest()
