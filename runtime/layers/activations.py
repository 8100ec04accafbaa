"""Gated activations: [rows, 2 * size], gate then up, contiguous -> act(gate) * up, [rows, size], contiguous. Plain
ones: [rows, size] -> [rows, size], in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from .ops import SiluAndMulOp, silu_and_mul


def _gelu_and_mul(approximate: str, gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate=approximate).mul_(up)


GATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": silu_and_mul,
    "swish": silu_and_mul,
    "gelu": partial(_gelu_and_mul, "none"),
    "gelu_pytorch_tanh": partial(_gelu_and_mul, "tanh"),
}
"""By the names that config.json has, see model_config.ACTIVATIONS."""


def gated_activation(name: str, fast_silu: SiluAndMulOp | None = None) -> Callable[[torch.Tensor], torch.Tensor]:
    """The gated activation of this name. fast_silu: the device's own for silu, if it has one for this size."""
    is_silu = GATED[name] is silu_and_mul
    return fast_silu if is_silu and fast_silu is not None else GATED[name]


def clamped_swiglu(alpha: float, limit: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """gpt-oss's: (up + 1) * gate * sigmoid(alpha * gate), both within the limit. Gate and up alternate."""

    def activation(gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up[:, ::2].clamp(max=limit), gate_up[:, 1::2].clamp(-limit, limit)
        return (up + 1) * (gate * torch.sigmoid(gate * alpha))

    return activation


def _squared_relu(x: torch.Tensor) -> torch.Tensor:
    return x.relu_().square_()


PLAIN_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {"relu2": _squared_relu}
"""Of an MLP without a gate (So et al. 2021, Primer), by the names that config.json has."""
