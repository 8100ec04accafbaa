"""RMSNorm (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class RMSNorm:
    """x / rms(x) * weight over the last dimension; the mean is taken in float32."""

    def __init__(self, size: int, eps: float, *, dtype: torch.dtype, device: torch.device) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] -> the same shape"""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def checkpoint_views(self, prefix: str) -> dict[str, torch.Tensor]:
        return {f"{prefix}.weight": self.weight}
