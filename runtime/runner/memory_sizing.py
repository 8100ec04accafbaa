"""Measures the memory of a device, and says what to change if it runs short.

The model runner calls, in this order (nothing but `memory_plan.plan_memory` on a CPU):

    settings = MemorySettings(mem_fraction_static=…, max_total_tokens=…, context_length=…, page_size=…, …)
    available = available_memory(device)                       # before the weights
    activations = profiled_bytes(device, run)                  # run(): a prefill of chunked_prefill_size tokens, then
                                                               # sampling of max_running_requests rows
    graphs = estimate_graph_bytes(num_graphs=…, max_tokens=…, activation_bytes=activations, profiled_tokens=…)
    plan = plan_memory(settings, available=available, weight_bytes=…, bytes_per_token=…, is_cpu=…,
                       activation_bytes=activations, graph_bytes=graphs)
    plan.kv_tokens                                             # for the KV pool; plan.describe() for the log

and wherever a device may run out of memory (``phase``: load, profile, pool, capture or step):

    except torch.OutOfMemoryError as error:
        raise explain_out_of_memory(error, phase, settings) from error
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from ..checkpoint.model_files import ModelLoadError
from .memory_plan import MemorySettings

GRAPH_OVERHEAD = 8 * 2**20
"""Bytes of a GPU that the driver takes for a captured step of some hundred kernels. A guess on the safe side."""

Phase = Literal["load", "profile", "pool", "capture", "step"]


def available_memory(device: torch.device) -> int:
    """Bytes that could be allocated on the device now."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min(_host_available(), _cgroup_available())


def profiled_bytes(device: torch.device, run: Callable[[], object]) -> int:
    """Bytes of GPU memory that ``run`` takes: its peak, workspaces it leaves behind and modules the driver loads. 0 on
    a CPU, where ``run`` is not called."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    free, allocated = available_memory(device), torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - allocated
    kept = torch.cuda.memory_allocated(device) - allocated
    torch.cuda.empty_cache()
    taken = free - available_memory(device)
    return peak + max(0, taken - kept)  # memory that torch did not allocate stays taken, on top of any peak


def estimate_graph_bytes(*, num_graphs: int, max_tokens: int, activation_bytes: int, profiled_tokens: int) -> int:
    """All graphs share one memory pool, which the largest of them (max_tokens new tokens) fills; activations grow with
    the tokens. activation_bytes: those of a step of profiled_tokens."""
    if num_graphs == 0:
        return 0
    return num_graphs * GRAPH_OVERHEAD + -(-activation_bytes * max_tokens // profiled_tokens)


def explain_out_of_memory(error: torch.OutOfMemoryError, phase: Phase, settings: MemorySettings) -> Exception:
    """The error to raise instead of torch's, naming the flag to change.

    For a step it is again a torch.OutOfMemoryError, so that only the step's requests fail; else a ModelLoadError.
    """
    ways = {
        "load": ["stop what else uses the GPU", "take a smaller model or --dtype"],
        "profile": [_lower("--chunked-prefill-size", settings.chunked_prefill_size)],
        "pool": [],
        "capture": [_lower("--cuda-graph-max-bs", settings.cuda_graph_max_bs), "set --disable-cuda-graph"],
        "step": [_lower("--chunked-prefill-size", settings.chunked_prefill_size)],
    }[phase]
    if phase != "load" and settings.max_total_tokens:
        ways.append(_lower("--max-total-tokens", settings.max_total_tokens))
    elif phase in ("pool", "capture", "step"):
        ways.append(_lower("--mem-fraction-static", settings.mem_fraction_static))
    if phase in ("profile", "step"):
        ways.append(_lower("--max-running-requests", settings.max_running_requests))
    what = {
        "load": "loading the weights",
        "profile": "the profile run, a prefill of --chunked-prefill-size tokens",
        "pool": "allocating the KV pool",
        "capture": "capturing CUDA graphs",
        "step": "a forward step",
    }[phase]
    message = f"out of GPU memory in {what}: {', or '.join(ways)}. {str(error).strip()}"
    return torch.OutOfMemoryError(message) if phase == "step" else ModelLoadError(message)


def _lower(name: str, value: float) -> str:
    return f"lower {name} ({value})" if value else f"lower {name}"


def _host_available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    raise ModelLoadError("/proc/meminfo does not say MemAvailable; set --max-total-tokens")


def _cgroup_available() -> int:
    """Bytes that the container may still take (cgroup v2); without a limit, more than any host has."""
    try:
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except OSError:
        return 2**62
    return 2**62 if limit == "max" else max(int(limit) - used, 0)
