"""At tiny sizes; the benchmark itself compares the results of what it measures."""

from __future__ import annotations

import pytest
import torch

from baton.attention import torch_native
from benchmarks.kernels.beam_device import attention_times, rank_times


def test_benchmarked_kernels_agree_at_tiny_sizes(monkeypatch):
    monkeypatch.setattr(torch_native, "MIN_SAVED_KEYS", 0)
    with torch.inference_mode():
        assert len(rank_times(2, 3, 300, repeat=1)) == 3
        assert len(attention_times(2, 3, 20, 2, repeat=1)) == 2


def test_differing_kernel_results_are_an_error(monkeypatch):
    monkeypatch.setattr(torch_native, "MIN_SAVED_KEYS", 0)
    monkeypatch.setattr(
        "baton.attention.torch_native.attend_shared", lambda spec, tile, q, pools, buffers, out, sinks: out.zero_()
    )
    with torch.inference_mode(), pytest.raises(AssertionError, match="not close"):
        attention_times(2, 3, 20, 2, repeat=1)
