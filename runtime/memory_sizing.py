"""How many tokens the KV pool gets.

GPU: mem_fraction_static × free memory before loading − weights
CPU: the same of available host memory (cgroup limit respected), but at most CPU_POOL_LIMIT: a host has other work
"""

from __future__ import annotations

from pathlib import Path

import torch

from .model_files import ModelLoadError

CPU_POOL_LIMIT = 4 * 2**30
"""Bytes. A larger pool on a CPU must be asked for with --max-total-tokens."""


def available_memory(device: torch.device) -> int:
    """Bytes that could be allocated on the device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_host_available(), _cgroup_available())


def pool_tokens(
    *,
    requested: int,
    available: int,
    mem_fraction: float,
    weight_bytes: int,
    bytes_per_token: int,
    page_size: int,
    context_length: int,
    is_cpu: bool,
) -> int:
    """Usable tokens, a multiple of page_size. requested: --max-total-tokens, 0 sizes from memory.

    available: bytes before the weights were loaded. Raises ModelLoadError where one request of context_length does not
    fit, or the requested pool exceeds what is there.
    """
    budget = int(available * mem_fraction) - weight_bytes
    if requested:
        tokens = requested // page_size * page_size
        if tokens < page_size:
            raise ModelLoadError(f"--max-total-tokens {requested} is less than one page (--page-size {page_size})")
        if tokens * bytes_per_token > available - weight_bytes:
            raise ModelLoadError(
                f"--max-total-tokens {requested} needs {_gib(tokens * bytes_per_token)} beside {_gib(weight_bytes)} of "
                f"weights, but {_gib(available)} is free; lower it"
            )
        return tokens
    if is_cpu:
        budget = min(budget, CPU_POOL_LIMIT)
    # One page stays out: the padding page.
    tokens = (max(budget, 0) // bytes_per_token // page_size - 1) * page_size
    if tokens < context_length:
        raise ModelLoadError(
            f"the KV pool would hold {max(tokens, 0)} tokens, fewer than one request of the context length "
            f"({context_length} tokens × {bytes_per_token} bytes = {_gib(context_length * bytes_per_token)}); "
            f"{_gib(available)} was free, weights take {_gib(weight_bytes)}. Lower --context-length, raise "
            f"--mem-fraction-static ({mem_fraction}), or set --max-total-tokens"
        )
    return tokens


def _host_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ModelLoadError("/proc/meminfo does not say MemAvailable; set --max-total-tokens")


def _cgroup_available() -> int:
    """What the container may still take (cgroup v2), without a limit more than any host has."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except OSError:
        return 2**62
    return 2**62 if limit == "max" else max(int(limit) - used, 0)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
