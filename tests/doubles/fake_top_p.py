"""FlashInfer's cut of a nucleus, in torch."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch


def top_p_renorm_probs(probs: torch.Tensor, top_p: torch.Tensor, is_deterministic: bool = False) -> torch.Tensor:
    """probs float32 [n, vocab], top_p float32 [n] -> what is kept, divided by its sum; else 0. Keeps all that tie at
    the end of the nucleus. (Sorting stands in for its radix search, one row after the other as there.)"""
    assert probs.dtype == torch.float32 and top_p.dtype == torch.float32 and probs.is_contiguous()
    assert is_deterministic and top_p.shape == (len(probs),)
    ordered = probs.sort(dim=-1, descending=True).values
    before = ordered.double().cumsum(dim=-1) - ordered
    wanted = top_p.double() * ordered.sum(dim=-1, dtype=torch.float64)
    count = (before < wanted[:, None]).sum(dim=-1, keepdim=True).clamp(min=1)
    kept = probs >= ordered.gather(-1, count - 1)
    return torch.where(kept, probs, 0.0) / (probs * kept).sum(dim=-1, keepdim=True)


def install(patch: pytest.MonkeyPatch, function=top_p_renorm_probs) -> None:
    """As the module that runtime/sampling/flashinfer_ops.py imports, until the test ends."""
    package, sampling = ModuleType("flashinfer"), ModuleType("flashinfer.sampling")
    sampling.__dict__["top_p_renorm_probs"] = function
    patch.setitem(sys.modules, "flashinfer", package)
    patch.setitem(sys.modules, "flashinfer.sampling", sampling)
    patch.delitem(sys.modules, "baton.runtime.sampling.flashinfer_ops", raising=False)
    import baton.runtime.sampling

    patch.delattr(baton.runtime.sampling, "flashinfer_ops", raising=False)
