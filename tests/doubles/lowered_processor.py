"""Tests as on another processor: marks for what only some can do, and a processor lowered within one test."""

from __future__ import annotations

import pytest
import torch

from baton.attention import processor

AVX2 = frozenset({"sse4_2", "avx", "avx2", "fma3", "f16c"})
"""Features of a processor with nothing newer."""

packs_bfloat16 = pytest.mark.skipif(
    not processor.packs(torch.bfloat16), reason="oneDNN packs no bfloat16 on this processor"
)

has_bfloat16_blocks = pytest.mark.skipif(
    not (processor.packs(torch.bfloat16) and processor.multiplies(torch.bfloat16)),
    reason="without units for bfloat16 oneDNN does not pack pairs of its numbers, which Numba's products read",
)


def lower_to_avx2(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked of the processor answers as one with AVX2 would. (The libraries go on as they are: for them see
    `make test-avx2`.)"""
    monkeypatch.setattr(processor, "features", lambda: AVX2)
    monkeypatch.setattr(processor, "architecture", lambda: "x86_64")
