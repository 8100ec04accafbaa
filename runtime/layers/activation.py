"""SwiGLU's gate (Shazeer 2020); the torch twin of `ops.Ops`."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See ops.SiluAndMulOp."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
