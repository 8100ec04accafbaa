"""How many tokens the host keeps for the device: from the flags, checked against the memory that the machine has."""

from __future__ import annotations

import math

from ..checkpoint.model_files import ModelLoadError

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
