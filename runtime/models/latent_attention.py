"""Multi-head latent attention (MLA: DeepSeek-AI 2024, "DeepSeek-V2").

The keys and values of all heads are made of one small vector per token, its *latent*. Only the latent is kept, together
with one key for the rotary embedding that all heads share:

    kept  = norm(W_a x) ‖ rotate(W_r x)                      the latent c and the rotated key r: one head of K
    k_h   = W_uk,h c ‖ r          v_h = W_uv,h c             what heads see, as transformers computes it

As q · W_uk c = (W_ukᵀ q) · c, the projection to keys can go to the query, and the one to values, as a sum of W_uv c is
W_uv times the sum of c, to the output ("absorbed" weights):

    score = (W_uk,hᵀ q_plain ‖ q_rotated) · kept             all heads read the same key
    out_h = W_uv,h Σ weight × c                              and the same value, which is the first part of the key

So attention is that of many queries over one KV head whose values are a view of its keys (`MLAKVPool`), which every
backend for such layers can compute. For long prompts it is less work to make keys and values after all;
`attention/latent.py` does that.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...attention.backend import AttentionBackend, AttentionSpec
from ...attention.latent import LatentBackend, LatentWeights, attend_absorbed
from ...memory_pool.kv_pool import KVPool
from ..layers.linear import Destination, Linear
from ..layers.ops import Ops
from ..layers.rotary import RotaryEmbedding, apply_rotary, head_order, scaled_by_position
from ..layers.step_inputs import StepInputs
from ..model_config import LatentTraits, ModelConfig

NORM_EPS = 1e-6
"""Epsilon of the norms of latents. The config sets only that of the other norms."""


def latent_spec(config: ModelConfig, layer_id: int, number: int) -> AttentionSpec:
    """A layer's attention as backends see it. number: of the layer among those with attention."""
    latent, scale = config.traits.latent, config.traits.attention_scale
    assert latent is not None and scale is not None
    return AttentionSpec(
        layer_id=number,
        num_heads=config.num_heads,
        num_kv_heads=1,
        head_dim=latent.key_size,
        scale=scale,
        sliding_window=config.traits.layer_windows[layer_id],
        value_dim=latent.latent_size,
        values_in_keys=True,
    )


class LatentAttention:
    """Projections to and from latents around an attention backend."""

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        spec: AttentionSpec,
        ops: Ops,
        rotary: RotaryEmbedding,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        traits, latent, heads, hidden = config.traits, config.traits.latent, config.num_heads, config.hidden_size
        assert isinstance(latent, LatentTraits)
        self.spec = spec
        self._sizes, self._rank = latent, latent.query_rank or 0
        self._query_size = latent.plain_size + latent.rotary_size
        where = {"dtype": dtype, "device": device}
        parts = {"q_a_proj": self._rank} if self._rank else {}
        parts["kv_a_proj_with_mqa"] = latent.key_size
        self.down_proj = Linear(hidden, parts, bias=traits.qkv_bias, **where)
        """x -> the latent of queries, if they have one; the latent and the rotary key."""
        name = "q_b_proj" if self._rank else "q_proj"
        self.q_proj = Linear(self._rank or hidden, {name: heads * self._query_size}, bias=False, **where)
        self.o_proj = Linear(heads * latent.value_size, {"o_proj": hidden}, bias=traits.o_bias, **where)
        size = latent.plain_size + latent.value_size
        self._loaded: torch.Tensor | None = torch.empty(heads, size, latent.latent_size, **where)
        """As a checkpoint has it, [heads, W_uk and W_uv, latent]; None once that is in the form below."""
        to_latent, from_latent = self._loaded.split((latent.plain_size, latent.value_size), dim=1)
        self._to_latent, self._to_values = to_latent, from_latent.transpose(1, 2)
        """W_uk [heads, plain, latent] and W_uvᵀ [heads, latent, value], contiguous when they have been loaded."""
        self.q_norm = torch.empty(self._rank, **where) if self._rank else None
        self.kv_norm = torch.empty(latent.latent_size, **where)
        self._rotary_order = head_order(
            config.ropes[layer_id], latent.rotary_size, is_interleaved=traits.is_interleaved
        )
        self._position_scale = config.position_scale(layer_id)
        self._rotary = rotary

    def __call__(
        self, x: torch.Tensor, inputs: StepInputs, kv_pool: KVPool, attention: AttentionBackend
    ) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        layer, sizes, heads = self.spec.layer_id, self._sizes, self.spec.num_heads
        down = self.down_proj(x)
        q_latent, latent, key = down.split((self._rank, sizes.latent_size, sizes.rotary_size), dim=1)
        source = x if self.q_norm is None else F.rms_norm(q_latent, self.q_norm.shape, self.q_norm, NORM_EPS)
        q = self.q_proj(source).view(len(x), heads, self._query_size)
        rows = self._rotary.table.index_select(0, inputs.positions)
        q = torch.cat((q[..., : sizes.plain_size], apply_rotary(q[..., sizes.plain_size :], rows)), dim=2)
        if self._position_scale is not None:
            q = scaled_by_position(q, inputs.positions, self._position_scale)
        kept = torch.cat(
            (
                F.rms_norm(latent, self.kv_norm.shape, self.kv_norm, NORM_EPS).unsqueeze(1),
                apply_rotary(key.unsqueeze(1), rows),
            ),
            dim=2,
        )
        if inputs.arrivals is not None:  # as late as can be: all of the layer so far went beside the copy
            inputs.arrivals.wait_layer(layer)
        kv_pool.k[layer].index_copy_(0, inputs.out_cache_loc, kept)
        weights = LatentWeights(self._to_latent, self._to_values)
        if isinstance(attention, LatentBackend):
            found = attention.run_latent(self.spec, q, weights)
        else:
            found = attend_absorbed(attention.run, self.spec, q, weights)
        return self.o_proj(found.flatten(1))

    @property
    def linears(self) -> list[Linear]:
        return [self.down_proj, self.q_proj, self.o_proj]

    def finish_loading(self) -> None:
        """Bring the loaded weights into the form in which they are used. Call this once. (torch takes ten times
        as long for a product of few rows with a transposed bfloat16 matrix.)"""
        self._to_latent, self._to_values = self._to_latent.contiguous(), self._to_values.contiguous()
        self._loaded = None
        order = self._rotary_order
        if order is None:
            return
        q = torch.arange(self.spec.num_heads * self._query_size).view(self.spec.num_heads, -1)
        down = torch.arange(self._rank + self._sizes.key_size)
        for outputs in (q, down):
            rotated = outputs[..., -self._sizes.rotary_size :]
            rotated.copy_(rotated[..., order])
        self.q_proj.reorder_outputs(q.flatten())
        self.down_proj.reorder_outputs(down)

    def checkpoint_views(self, prefix: str) -> dict[str, Destination]:
        views: dict[str, Destination] = {}
        for linear in self.linears:
            views |= linear.checkpoint_views(prefix)
        if self._loaded is not None:  # it is not a layer that adapters could update, either
            views[f"{prefix}.kv_b_proj.weight"] = self._loaded.view(-1, self._sizes.latent_size)
        views[f"{prefix}.kv_a_layernorm.weight"] = self.kv_norm
        if self.q_norm is not None:
            views[f"{prefix}.q_a_layernorm.weight"] = self.q_norm
        return views
