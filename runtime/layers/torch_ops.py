"""The torch twins of the operations in `ops.Ops`. `rotate_and_store` is in rotary.py, `copy_kv` in kv_pool.py."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def look_up(ids: torch.Tensor, table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See ops.LookUpOp."""
    return F.embedding(ids, table).to(dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See ops.RMSNormOp."""
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ops.AddRMSNormOp."""
    total = residual.add_(x)
    return rms_norm(total, weight, eps), total


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SwiGLU's gate (Shazeer 2020). See ops.SiluAndMulOp."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
