"""The gated short convolution of LFM2 (Liquid AI 2025): the last few tokens are all that a layer keeps.

b, c, x = in(u)        out(c ∘ conv(b ∘ x))
"""

from __future__ import annotations

import torch

from ...attention.backend import AttentionBackend
from ...memory_pool.kv_pool import KVPool
from ...memory_pool.state_pool import StateShape
from ..layers.linear import Destination, Linear
from ..layers.states.causal_conv import CausalConv
from ..layers.states.ops import StateOps
from ..layers.step_inputs import StepInputs
from ..model_config import ModelConfig, ShortConvTraits


class ShortConv:
    """One layer's."""

    def __init__(
        self,
        config: ModelConfig,
        traits: ShortConvTraits,
        number: int,
        ops: StateOps,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """number: of the layer among those with states."""
        self._size = size = config.hidden_size
        self._number, self._ops = number, ops
        self._conv = CausalConv("conv", size, traits.kernel, bias=traits.bias, dtype=dtype, device=device)
        self.in_proj = Linear(size, {"in_proj": 3 * size}, bias=traits.bias, dtype=dtype, device=device)
        self.out_proj = Linear(size, {"out_proj": size}, bias=traits.bias, dtype=dtype, device=device)

    def __call__(
        self, x: torch.Tensor, inputs: StepInputs, kv_pool: KVPool, attention: AttentionBackend
    ) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        states, size = inputs.states, self._size
        assert states is not None, "a step of a model with states brings them"
        parts = self.in_proj(x)
        mixed = self._ops.short_conv(
            parts[:, 2 * size :],
            self._conv.weight,
            self._conv.bias,
            states.pool.layers[self._number]["conv"],
            states,
            before=parts[:, :size],
            after=parts[:, size : 2 * size],
        )
        return self.out_proj(mixed)

    @property
    def state_shape(self) -> StateShape:
        """See ServedModel.state_shapes."""
        return {"conv": self._conv.state}

    @property
    def linears(self) -> list[Linear]:
        return [self.in_proj, self.out_proj]

    def finish_loading(self) -> None:
        """See Decoder.finish_loading."""

    def checkpoint_views(self, prefix: str) -> dict[str, Destination]:
        views: dict[str, Destination] = {**self._conv.checkpoint_views(prefix)}
        for linear in self.linears:
            views |= linear.checkpoint_views(prefix)
        return views
