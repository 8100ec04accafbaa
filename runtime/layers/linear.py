"""Linear projections. Those that read the same input (q, k, v; gate and up) are fused into one matrix product; each
part keeps its own name in the checkpoint.

On a CPU the product has two forms, backed by different kernels; see `project`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

# Row counts for which mm(W, xT) beats F.linear on a CPU (docs/design/model_and_attention.md has the measurements).
_TRANSPOSED_ROWS = range(8, 33)


def project(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x [rows, in], weight [out, in], bias [out] -> [rows, out]; the same numbers as F.linear up to rounding.

    On a CPU, batches of 8 to 32 rows go through mm(W, xT): such batches wait for the weight, and its kernel streams it.
    The result is copied back to rows, because later operations (above all attention) are slow on transposed memory.
    """
    if x.is_cuda or x.shape[0] not in _TRANSPOSED_ROWS or x.dtype != torch.float32:
        return F.linear(x, weight, bias)
    if bias is None:
        return torch.mm(weight, x.t()).t().contiguous()
    return torch.addmm(bias.unsqueeze(1), weight, x.t()).t().contiguous()


class Linear:
    """y = x Wᵀ + b for one or several projections of the same input, their outputs side by side.

    parts: checkpoint name -> output features, e.g. {"q_proj": 512, "k_proj": 256, "v_proj": 256}.
    """

    def __init__(
        self, in_features: int, parts: dict[str, int], *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.parts = parts
        out_features = sum(parts.values())
        self.weight = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.bias = torch.empty(out_features, dtype=dtype, device=device) if bias else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in_features] -> [rows, sum of parts]"""
        return project(x, self.weight, self.bias)

    def checkpoint_views(self, prefix: str) -> dict[str, torch.Tensor]:
        """Checkpoint tensor name -> the part of this layer's memory it fills."""
        views, start = {}, 0
        for name, size in self.parts.items():
            views[f"{prefix}.{name}.weight"] = self.weight[start : start + size]
            if self.bias is not None:
                views[f"{prefix}.{name}.bias"] = self.bias[start : start + size]
            start += size
        return views
