"""Mamba 2 (Dao and Gu 2024), the layer with a state of Bamba, Granite 4, Nemotron-H and Falcon-H1.

    z, x, B, C, Δ = in(u)      x, B, C = silu(conv(x, B, C))      out(norm(scan(x, B, C, Δ) ∘ silu(z)))

`SsdOp` has the scan. A layer keeps the last inputs of the convolution, and for each head a matrix.
"""

from __future__ import annotations

import torch

from ...attention.backend import AttentionBackend
from ...memory_pool.kv_pool import KVPool
from ...memory_pool.state_pool import StateShape, StateTensor
from ..layers.linear import USUAL_MULTIPLE, Destination, Linear
from ..layers.states.causal_conv import CausalConv
from ..layers.states.ops import SsdHeads, StateOps
from ..layers.step_inputs import StepInputs
from ..model_config import Mamba2Traits, ModelConfig


class Mamba2:
    """One layer's."""

    def __init__(
        self,
        config: ModelConfig,
        traits: Mamba2Traits,
        number: int,
        ops: StateOps,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """number: of the layer among those with states."""
        heads = SsdHeads(traits.heads, traits.head_size, traits.groups, traits.state_size, traits.limits)
        self._heads, self._traits, self._number, self._ops = heads, traits, number, ops
        self._eps = config.rms_norm_eps
        where, hidden = {"dtype": dtype, "device": device}, config.hidden_size
        self._conv = CausalConv("conv1d", heads.channels, traits.kernel, bias=traits.conv_bias, **where)
        size = heads.width + heads.channels + heads.heads
        self.in_proj = Linear(hidden, {"in_proj": size}, bias=traits.bias, multiple=USUAL_MULTIPLE, **where)
        self.out_proj = Linear(heads.width, {"out_proj": hidden}, bias=traits.out_bias, **where)
        self._rate, self._dt_bias, self._skip = torch.empty(3, heads.heads, dtype=torch.float32, device=device)
        """The first is the checkpoint's A_log, and e to the power of that once it has been loaded."""
        self._norm_weight = torch.empty(heads.width, **where) if traits.norm_groups else None
        self._part_scales = self._scales(device)

    def _scales(self, device: torch.device) -> torch.Tensor | None:
        """float32 [outputs of in_proj]: a factor of each; None if all are 1."""
        if set(self._traits.part_scales) == {1.0}:
            return None
        heads = self._heads
        keys = heads.groups * heads.state_size
        sizes = torch.tensor(
            (heads.width, heads.width, keys, keys, self.in_proj.out_features - heads.width * 2 - keys * 2)
        )
        return torch.tensor(self._traits.part_scales).repeat_interleave(sizes).to(device)

    def __call__(
        self, x: torch.Tensor, inputs: StepInputs, kv_pool: KVPool, attention: AttentionBackend
    ) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        states, heads, traits, ops = inputs.states, self._heads, self._traits, self._ops
        assert states is not None, "a step of a model with states brings them"
        layer = states.pool.layers[self._number]
        parts = self.in_proj(x if traits.input_scale == 1 else x * traits.input_scale)
        if self._part_scales is not None:
            parts.mul_(self._part_scales)
        dt_start = heads.width + heads.channels
        xbc = ops.short_conv(
            parts[:, heads.width : dt_start], self._conv.weight, self._conv.bias, layer["conv"], states, silu=True
        )
        found = ops.ssd(
            xbc,
            parts[:, dt_start : dt_start + heads.heads],
            self._rate,
            self._dt_bias,
            self._skip,
            heads,
            layer["recurrent"],
            states,
        )
        z = parts[:, : heads.width]
        if self._norm_weight is None:
            found = ops.silu_gate(found, z)
        else:
            size = heads.width // traits.norm_groups
            found = ops.gated_norm(found, z, self._norm_weight, self._eps, size, norms_first=traits.norms_first)
        out = self.out_proj(found)
        return out if traits.output_scale == 1 else out.mul_(traits.output_scale)

    @property
    def state_shape(self) -> StateShape:
        """See ServedModel.state_shapes."""
        heads = self._heads
        shape = heads.heads, heads.head_size, heads.state_size
        return {"conv": self._conv.state, "recurrent": StateTensor(shape, torch.float32)}

    @property
    def linears(self) -> list[Linear]:
        return [self.in_proj, self.out_proj]

    def finish_loading(self) -> None:
        """See Decoder.finish_loading."""
        self._rate.exp_()

    def checkpoint_views(self, prefix: str) -> dict[str, Destination]:
        views = self._conv.checkpoint_views(prefix)
        for linear in self.linears:
            views |= linear.checkpoint_views(prefix)
        views |= {f"{prefix}.A_log": self._rate, f"{prefix}.dt_bias": self._dt_bias, f"{prefix}.D": self._skip}
        return views if self._norm_weight is None else views | {f"{prefix}.norm.weight": self._norm_weight}
