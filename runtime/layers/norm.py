"""RMSNorm (Zhang and Sennrich 2019): x / rms(x) * weight over the last dimension; the mean is taken in float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from .ops import Ops


class RMSNorm:
    """A norm with its weight."""

    def __init__(
        self, size: int, eps: float, ops: Ops, *, dtype: torch.dtype, device: torch.device, offset: float = 0.0
    ) -> None:
        """offset: added to the checkpoint's weight (Gemma's norms multiply by 1 + weight)."""
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self.eps = eps
        self._offset = offset
        self._ops = ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, size] -> the same shape"""
        return self._ops.rms_norm(x, self.weight, self.eps)

    def in_float32(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, size] -> float32, the same shape"""
        if x.dtype == self.weight.dtype == torch.float32:
            return self(x)
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)

    def of_sum(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [rows, size] -> (norm of their sum, their sum). May overwrite both: do not use them again."""
        return self._ops.add_rms_norm(x, residual, self.weight, self.eps)

    def finish_loading(self) -> None:
        """Call it once when the weight has been loaded. In half precision the sum is rounded."""
        if self._offset:
            self.weight += self._offset

    def checkpoint_views(self, prefix: str) -> dict[str, torch.Tensor]:
        return {f"{prefix}.weight": self.weight}
