"""Weights of a causal convolution of each channel by itself, in the form that `StateOps.short_conv` reads."""

from __future__ import annotations

import torch

from ....memory_pool.state_pool import StateTensor


class CausalConv:
    """weight: [kernel, channels], the checkpoint's [channels, 1, kernel] transposed; bias: [channels] or None."""

    def __init__(
        self, name: str, channels: int, kernel: int, *, bias: bool, dtype: torch.dtype, device: torch.device
    ) -> None:
        """name: in a checkpoint."""
        self.weight = torch.empty(kernel, channels, dtype=dtype, device=device)
        self.bias = torch.empty(channels, dtype=dtype, device=device) if bias else None
        self._name = name

    @property
    def state(self) -> StateTensor:
        """What is kept of a sequence: its last inputs."""
        kernel, channels = self.weight.shape
        return StateTensor((kernel - 1, channels), self.weight.dtype)

    def checkpoint_views(self, prefix: str) -> dict[str, torch.Tensor]:
        views = {f"{prefix}.{self._name}.weight": self.weight.T.unsqueeze(1)}
        if self.bias is not None:
            views[f"{prefix}.{self._name}.bias"] = self.bias
        return views
