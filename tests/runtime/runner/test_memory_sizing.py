"""What memory there is, and what to change if it runs short."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from baton.runtime.checkpoint.model_files import ModelLoadError
from baton.runtime.runner.memory_plan import MemorySettings
from baton.runtime.runner.memory_sizing import (
    GRAPH_OVERHEAD,
    Phase,
    available_memory,
    estimate_graph_bytes,
    explain_out_of_memory,
    profiled_bytes,
)

MIB, GIB = 2**20, 2**30
SETTINGS = MemorySettings(
    mem_fraction_static=0.5,
    context_length=1000,
    page_size=16,
    chunked_prefill_size=2048,
    max_running_requests=64,
    cuda_graph_max_bs=32,
)


def test_graph_estimate_shares_memory_of_the_largest():
    estimate = estimate_graph_bytes(num_graphs=10, max_tokens=256, activation_bytes=800 * MIB, profiled_tokens=2048)
    assert estimate == 10 * GRAPH_OVERHEAD + 100 * MIB
    assert estimate_graph_bytes(num_graphs=0, max_tokens=0, activation_bytes=GIB, profiled_tokens=2048) == 0


@pytest.mark.parametrize(
    ("phase", "flags"),
    [
        ("load", "--dtype"),
        ("profile", "--chunked-prefill-size (2048)"),
        ("pool", "--mem-fraction-static (0.5)"),
        ("capture", "--cuda-graph-max-bs (32), or set --disable-cuda-graph, or lower --mem-fraction-static (0.5)"),
        ("step", "--mem-fraction-static (0.5), or lower --max-running-requests (64)"),
    ],
)
def test_out_of_memory_error_names_flag_to_change(phase: Phase, flags: str):
    raised = explain_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB."), phase, SETTINGS)
    assert isinstance(raised, torch.OutOfMemoryError if phase == "step" else ModelLoadError)
    assert flags in str(raised) and str(raised).endswith("CUDA out of memory. Tried 2 GiB.")


def test_out_of_memory_with_explicit_pool_names_max_total_tokens():
    asked = dataclasses.replace(SETTINGS, max_total_tokens=4096)
    for phase in ("pool", "capture", "step"):
        assert "lower --max-total-tokens (4096)" in str(explain_out_of_memory(torch.OutOfMemoryError(), phase, asked))


def test_available_memory_of_host():
    cpu = torch.device("cpu")
    assert GIB // 16 < available_memory(cpu) < 2**50
    assert profiled_bytes(cpu, lambda: pytest.fail("there is nothing to profile on a CPU")) == 0


@pytest.mark.gpu
def test_profiled_bytes_include_freed_peak():
    device = torch.device("cuda")
    kept = []

    def run() -> None:
        torch.empty(512 * MIB, dtype=torch.uint8, device=device)
        kept.append(torch.empty(64 * MIB, dtype=torch.uint8, device=device))

    assert 512 * MIB <= profiled_bytes(device, run) < 1024 * MIB
