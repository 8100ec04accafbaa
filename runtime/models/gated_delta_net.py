"""The gated delta net (Yang et al. 2024) as Qwen3-Next and Qwen3.5 have it: linear attention that overwrites what it
remembers of a key.

    q, k, v, z, b, a = in(u)      q, k, v = silu(conv(q, k, v))      out(norm(rule(q, k, v, a, b)) ∘ silu(z))

`GatedDeltaOp` has the rule. A layer keeps the last inputs of the convolution, and for each value head a matrix from
keys to values.
"""

from __future__ import annotations

import torch

from ...attention.backend import AttentionBackend
from ...memory_pool.kv_pool import KVPool
from ...memory_pool.state_pool import StateShape, StateTensor
from ..layers.linear import USUAL_MULTIPLE, Destination, Linear
from ..layers.states.causal_conv import CausalConv
from ..layers.states.ops import DeltaHeads, StateOps
from ..layers.step_inputs import StepInputs
from ..model_config import GatedDeltaTraits, ModelConfig


class GatedDeltaNet:
    """One layer's."""

    def __init__(
        self,
        config: ModelConfig,
        traits: GatedDeltaTraits,
        number: int,
        ops: StateOps,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """number: of the layer among those with states."""
        self._heads = heads = DeltaHeads(traits.key_heads, traits.value_heads, traits.key_size, traits.value_size)
        self._is_grouped = traits.has_grouped_inputs
        self._number, self._ops, self._eps = number, ops, config.rms_norm_eps
        self._width = width = heads.value_heads * heads.value_size
        self._conv = CausalConv("conv1d", heads.channels, traits.kernel, bias=False, dtype=dtype, device=device)
        if self._is_grouped:
            parts = {"in_proj_qkvz": heads.channels + width, "in_proj_ba": 2 * heads.value_heads}
        else:
            parts = {"in_proj_qkv": heads.channels, "in_proj_z": width}
            parts |= {"in_proj_b": heads.value_heads, "in_proj_a": heads.value_heads}
        self.in_proj = Linear(
            config.hidden_size, parts, bias=False, dtype=dtype, device=device, multiple=USUAL_MULTIPLE
        )
        self.out_proj = Linear(width, {"out_proj": config.hidden_size}, bias=False, dtype=dtype, device=device)
        self._rate = torch.empty(heads.value_heads, dtype=torch.float32, device=device)
        """The checkpoint's A_log, and e to the power of that once it has been loaded."""
        self._dt_bias = torch.empty(heads.value_heads, dtype=torch.float32, device=device)
        # One weight for all heads, which load_weights copies to each one's row.
        self._norm_weight = torch.empty(heads.value_heads, heads.value_size, dtype=dtype, device=device)

    def __call__(
        self, x: torch.Tensor, inputs: StepInputs, kv_pool: KVPool, attention: AttentionBackend
    ) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        states, heads, ops = inputs.states, self._heads, self._ops
        assert states is not None, "a step of a model with states brings them"
        layer, parts = states.pool.layers[self._number], self.in_proj(x)
        qkv = ops.short_conv(parts[:, : heads.channels], self._conv.weight, None, layer["conv"], states, silu=True)
        z_end = heads.channels + self._width
        a_start = z_end + heads.value_heads
        found = ops.gated_delta(
            qkv,
            parts[:, a_start : a_start + heads.value_heads],
            parts[:, z_end:a_start],
            self._rate,
            self._dt_bias,
            heads,
            layer["recurrent"],
            states,
        )
        z, weight = parts[:, heads.channels : z_end], self._norm_weight.view(-1)
        return self.out_proj(ops.gated_norm(found, z, weight, self._eps, heads.value_size, norms_first=True))

    @property
    def state_shape(self) -> StateShape:
        """See ServedModel.state_shapes."""
        heads = self._heads
        shape = heads.value_heads, heads.key_size, heads.value_size
        return {"conv": self._conv.state, "recurrent": StateTensor(shape, torch.float32)}

    @property
    def linears(self) -> list[Linear]:
        return [self.in_proj, self.out_proj]

    def finish_loading(self) -> None:
        """See Decoder.finish_loading."""
        self._rate.exp_()
        if self._is_grouped:
            self.in_proj.reorder_outputs(self._ungrouped())

    def _ungrouped(self) -> torch.Tensor:
        """int64 [outputs]: for q, k, v, z, b and a, each of all heads, where the checkpoint has it: one key head after
        the other, each with its own q, k, v and z; then each with its own b and a."""
        heads = self._heads
        each = heads.value_heads // heads.key_heads
        sizes = heads.key_size, heads.key_size, each * heads.value_size, each * heads.value_size
        qkvz = torch.arange(heads.key_heads * sum(sizes)).view(heads.key_heads, -1)
        ba = torch.arange(heads.key_heads * 2 * each).view(heads.key_heads, -1) + qkvz.numel()
        return torch.cat([part.flatten() for part in (*qkvz.split(sizes, dim=1), *ba.split(each, dim=1))])

    def checkpoint_views(self, prefix: str) -> dict[str, Destination]:
        views = self._conv.checkpoint_views(prefix)
        for linear in self.linears:
            views |= linear.checkpoint_views(prefix)
        views |= {f"{prefix}.A_log": self._rate, f"{prefix}.dt_bias": self._dt_bias}
        return views | {f"{prefix}.norm.weight": self._norm_weight}
