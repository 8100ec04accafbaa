"""The decoder that all architectures of `registry.py` share; `DecoderTraits` says where they differ.

    ids ─▶ embedding ─▶ [ norm ─▶ mixer ─▶ + ─▶ norm ─▶ gated MLP ─▶ + ] × layers ─▶ norm ─▶ hidden states

The mixer is attention, a layer with a recurrent state, or both side by side; a layer may lack its mixer or its MLP. The
norms stand before mixer and MLP, behind them, or both (`Branch`).

Tokens of all requests lie side by side, [tokens, hidden]; only attention knows which token belongs to which request.
Layers are plain objects over tensors, not nn.Modules, as there is no training. Each object's `checkpoint_views` names
the memory that each checkpoint tensor fills. `Ops` computes everything between the matrix products.
"""

from __future__ import annotations

import logging
from collections import Counter

import torch
import torch.nn.functional as F

from ...attention.backend import AttentionBackend, AttentionSpec
from ...memory_pool.kv_pool import KVPool
from ...memory_pool.state_pool import StateShape
from ..layers.activations import PLAIN_ACTIVATIONS, gated_activation
from ..layers.embedding import Embedding, LMHead, LogitsProduct
from ..layers.experts import Experts, Router
from ..layers.linear import Destination, Linear
from ..layers.low_rank import Target, module_targets
from ..layers.norm import RMSNorm
from ..layers.ops import Ops
from ..layers.product_trials import LateTrials, choose_products
from ..layers.products import BlockKernel, PackedKernel
from ..layers.quantized_weights import INT8, WeightForm
from ..layers.rotary import RotaryEmbedding, head_order, scaled_by_position
from ..layers.states.ops import StateOps
from ..layers.states.torch_states import TORCH_STATES
from ..layers.step_inputs import StepInputs
from ..model_config import ExpertTraits, GatedDeltaTraits, Mamba2Traits, Mixer, ModelConfig, ShortConvTraits
from .gated_delta_net import GatedDeltaNet
from .latent_attention import LatentAttention, latent_spec
from .mamba2 import Mamba2
from .short_conv import ShortConv

logger = logging.getLogger(__name__)

EMBEDDING = "model.embed_tokens"
"""Its name in a checkpoint."""


def attention_specs(config: ModelConfig) -> list[AttentionSpec]:
    """The attention spec of each layer with attention. They are numbered among themselves, as the KV pool has them."""
    traits = config.traits
    layers = [layer_id for layer_id in range(config.num_layers) if traits.has_attention(layer_id)]
    if traits.latent is not None:
        return [latent_spec(config, layer_id, number) for number, layer_id in enumerate(layers)]
    return [
        AttentionSpec(
            layer_id=number,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5 if traits.attention_scale is None else traits.attention_scale,
            sliding_window=traits.layer_windows[layer_id],
            logit_cap=traits.attention_cap,
            has_sinks=traits.has_sinks,
            chunk=traits.layer_chunks[layer_id] if traits.layer_chunks else None,
        )
        for number, layer_id in enumerate(layers)
    ]


class SelfAttention:
    """Projections, q/k norm and rotary embedding around an attention backend."""

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        spec: AttentionSpec,
        ops: Ops,
        state_ops: StateOps,
        rotary: RotaryEmbedding,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        traits, head_dim = config.traits, config.head_dim
        self.spec = spec
        q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        self._width = q_size + 2 * kv_size
        self._has_gate = traits.output_gate
        parts = {"q_proj": 2 * q_size if self._has_gate else q_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = Linear(
            config.hidden_size,
            {"qkv_proj": sum(parts.values())} if traits.has_fused_qkv else parts,
            bias=traits.qkv_bias,
            dtype=dtype,
            device=device,
        )
        self.o_proj = Linear(q_size, {"o_proj": config.hidden_size}, bias=traits.o_bias, dtype=dtype, device=device)
        # One weight per head of q and k, so that both are normed in one operation.
        self._has_norm_weight = traits.qk_norm
        is_unit_normed = traits.qk_unit_norm and config.ropes[layer_id] is not None
        self.qk_norm_weight = (
            torch.ones(config.num_heads + config.num_kv_heads, head_dim, dtype=dtype, device=device)
            if traits.qk_norm or is_unit_normed
            else None
        )
        self.row_norm = QKRowNorm(q_size, kv_size, config, dtype=dtype, device=device) if traits.qk_row_norm else None
        self.sinks = torch.empty(config.num_heads, dtype=torch.float32, device=device) if traits.has_sinks else None
        self.rms_norm_eps = config.rms_norm_eps
        self._head_order = head_order(config.ropes[layer_id], head_dim, is_interleaved=traits.is_interleaved)
        self._norm_offset = traits.norm_offset
        self._position_scale = config.position_scale(layer_id)
        self._rotary = rotary
        self._ops, self._gate = ops, state_ops.sigmoid_gate
        self._input_scale, self._output_scale = traits.attention_input_scale, traits.attention_output_scale

    def __call__(
        self, x: torch.Tensor, inputs: StepInputs, kv_pool: KVPool, attention: AttentionBackend
    ) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        layer = self.spec.layer_id
        projected = self.qkv_proj(x if self._input_scale == 1 else x * self._input_scale)
        qkv = projected[:, : self._width] if self._has_gate else projected
        if self.row_norm is not None:
            self.row_norm(qkv)
        if inputs.arrivals is not None:  # as late as can be: all of the layer so far went beside the copy
            inputs.arrivals.wait_layer(layer)
        q = self._ops.rotate_and_store(
            qkv,
            inputs.positions,
            self._rotary.table,
            inputs.slots_for(self.spec),
            kv_pool.k[layer],
            kv_pool.v[layer],
            self.qk_norm_weight,
            self.rms_norm_eps,
        )
        if self._position_scale is not None:
            q = scaled_by_position(q, inputs.positions, self._position_scale)
        found = attention.run(self.spec, q, self.sinks).view(len(x), -1)
        if self._has_gate:
            found = self._gate(found, projected[:, self._width :])
        out = self.o_proj(found)
        return out if self._output_scale == 1 else out.mul_(self._output_scale)

    @property
    def linears(self) -> list[Linear]:
        return [self.qkv_proj, self.o_proj]

    def finish_loading(self) -> None:
        """Bring what has been loaded into the form in which it is computed. To be called once."""
        if self.qk_norm_weight is not None:
            self.qk_norm_weight += self._norm_offset
        order, heads, head_dim = self._head_order, self.spec.num_heads, self.spec.head_dim
        if order is None and not self._has_gate:
            return
        outputs = torch.arange(self.qkv_proj.out_features).view(-1, head_dim)
        if self._has_gate:  # the checkpoint has each head's gate behind its q
            q, gates = outputs[: 2 * heads : 2], outputs[1 : 2 * heads : 2]
            outputs = torch.cat((q, outputs[2 * heads :], gates))
        if order is None:
            self.qkv_proj.reorder_outputs(outputs.flatten())
            return
        q_and_k = outputs[: heads + self.spec.num_kv_heads]
        q_and_k.copy_(q_and_k[:, order])
        self.qkv_proj.reorder_outputs(outputs.flatten())
        if self.qk_norm_weight is not None:
            self.qk_norm_weight.copy_(self.qk_norm_weight[:, order.to(self.qk_norm_weight.device)])
        if self.row_norm is not None:
            self.row_norm.reorder(q_and_k.flatten())

    def checkpoint_views(self, prefix: str) -> dict[str, Destination]:
        views = self.qkv_proj.checkpoint_views(prefix) | self.o_proj.checkpoint_views(prefix)
        if self.qk_norm_weight is not None and self._has_norm_weight:
            # load_weights copies the checkpoint's head_dim numbers to every head's row.
            views[f"{prefix}.q_norm.weight"] = self.qk_norm_weight[: self.spec.num_heads]
            views[f"{prefix}.k_norm.weight"] = self.qk_norm_weight[self.spec.num_heads :]
        if self.row_norm is not None:
            views |= self.row_norm.checkpoint_views(prefix)
        if self.sinks is not None:
            views[f"{prefix}.sinks"] = self.sinks
        return views


class QKRowNorm:
    """RMSNorm over all heads of q together, and over all heads of k (OLMo 2)."""

    def __init__(
        self, q_size: int, k_size: int, config: ModelConfig, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._sizes, self._eps = (q_size, k_size), config.rms_norm_eps
        self.weight = torch.empty(q_size + k_size, dtype=dtype, device=device)

    def __call__(self, qkv: torch.Tensor) -> None:
        """[tokens, q, k, v side by side]: norms q and k in place."""
        for part, weight in zip(qkv.split((*self._sizes, qkv.shape[1] - sum(self._sizes)), 1), self._weights()):
            part.copy_(F.rms_norm(part, weight.shape, weight, self._eps))

    def reorder(self, order: torch.Tensor) -> None:
        """Weight i becomes the checkpoint's order[i]."""
        self.weight.copy_(self.weight[order.to(self.weight.device)])

    def checkpoint_views(self, prefix: str) -> dict[str, Destination]:
        q, k = self._weights()
        return {f"{prefix}.q_norm.weight": q, f"{prefix}.k_norm.weight": k}

    def _weights(self) -> tuple[torch.Tensor, torch.Tensor]:
        q, k = self.weight.split(self._sizes)
        return q, k


class GatedMLP:
    """down(act(gate(x)) * up(x))"""

    def __init__(
        self, config: ModelConfig, ops: Ops, *, dtype: torch.dtype, device: torch.device, size: int = 0
    ) -> None:
        """size: of gate and up; 0: the config's intermediate_size, which the device's ops were made for."""
        fast_silu = ops.silu_and_mul if size in (0, config.intermediate_size) else None
        size, traits = size or config.intermediate_size, config.traits
        parts = {"gate_up_proj": 2 * size} if traits.has_fused_gate_up else {"gate_proj": size, "up_proj": size}
        bias, hidden = traits.mlp_bias, config.hidden_size
        self.gate_up_proj = Linear(hidden, parts, bias=bias, dtype=dtype, device=device)
        self.down_proj = Linear(size, {"down_proj": hidden}, bias=bias, dtype=dtype, device=device)
        self._activation = gated_activation(config.activation, fast_silu)
        self._size, (self._gate_scale, self._output_scale) = size, traits.mlp_scales

    @property
    def linears(self) -> list[Linear]:
        return [self.gate_up_proj, self.down_proj]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        gate_up = self.gate_up_proj(x)
        if self._gate_scale != 1:
            gate_up[:, : self._size].mul_(self._gate_scale)
        out = self.down_proj(self._activation(gate_up))
        return out if self._output_scale == 1 else out.mul_(self._output_scale)

    def checkpoint_views(self, prefix: str) -> dict[str, Destination]:
        return self.gate_up_proj.checkpoint_views(prefix) | self.down_proj.checkpoint_views(prefix)


class PlainMLP:
    """down(act(up(x)))"""

    def __init__(self, config: ModelConfig, activation: str, *, dtype: torch.dtype, device: torch.device) -> None:
        """activation: one of PLAIN_ACTIVATIONS."""
        size, hidden, bias = config.intermediate_size, config.hidden_size, config.traits.mlp_bias
        self.up_proj = Linear(hidden, {"up_proj": size}, bias=bias, dtype=dtype, device=device)
        self.down_proj = Linear(size, {"down_proj": hidden}, bias=bias, dtype=dtype, device=device)
        self._activation = PLAIN_ACTIVATIONS[activation]

    @property
    def linears(self) -> list[Linear]:
        return [self.up_proj, self.down_proj]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self._activation(self.up_proj(x)))

    def checkpoint_views(self, prefix: str) -> dict[str, Destination]:
        return self.up_proj.checkpoint_views(prefix) | self.down_proj.checkpoint_views(prefix)


class SparseMLP:
    """Experts, and perhaps an MLP that all tokens use."""

    def __init__(
        self, config: ModelConfig, traits: ExpertTraits, ops: Ops, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        names, hidden = traits.names, config.hidden_size
        self.router = Router(traits, hidden, dtype=dtype, device=device)
        self.experts = Experts(config, traits, dtype=dtype, device=device)
        self.shared = (
            GatedMLP(config, ops, dtype=dtype, device=device, size=traits.shared_size) if names.shared else None
        )
        self.shared_gate = torch.empty(1, hidden, dtype=dtype, device=device) if names.shared_gate else None
        self._names = names

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        out = self.experts(x, *self.router(x))
        if self.shared is None:
            return out
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = shared * F.linear(x, self.shared_gate).sigmoid()
        return out.add_(shared)

    @property
    def linears(self) -> list[Linear]:
        shared = [] if self.shared is None else self.shared.linears
        return [*self.experts.gate_up, *self.experts.down, *shared]

    def checkpoint_views(self, prefix: str) -> dict[str, Destination]:
        views = self.router.checkpoint_views(prefix) | self.experts.checkpoint_views(prefix)
        if self.shared is not None:
            views |= self.shared.checkpoint_views(f"{prefix}.{self._names.shared}")
        if self.shared_gate is not None:
            views[f"{prefix}.{self._names.shared_gate}.weight"] = self.shared_gate
        return views


class Branch:
    """What surrounds attention or the MLP: a norm before it or behind it, and the factor of what it adds."""

    def __init__(
        self,
        config: ModelConfig,
        before: str | None,
        after: str | None,
        ops: Ops,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """before, after: the norms' names in the checkpoint; None for no norm."""

        def norm(name: str | None) -> RMSNorm | None:
            size, eps, offset = config.hidden_size, config.rms_norm_eps, config.traits.norm_offset
            return RMSNorm(size, eps, ops, dtype=dtype, device=device, offset=offset) if name is not None else None

        self.before, self.after = norm(before), norm(after)
        self._names = before, after
        self._multiplier = config.traits.residual_multiplier
        self._ops = ops

    def enter(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual: see DecoderLayer. Returns the branch's input and the stream, which may be one tensor."""
        if self.before is None:
            stream = x if residual is None else self._ops.add(x, residual)
            return stream, stream
        if residual is None:
            return self.before(x), x
        return self.before.of_sum(x, residual)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """The branch's output -> what is added to the stream. May overwrite x."""
        if self.after is not None:
            x = self.after(x)
        return x if self._multiplier == 1 else x.mul_(self._multiplier)

    def finish_loading(self) -> None:
        for norm in (self.before, self.after):
            if norm is not None:
                norm.finish_loading()

    def checkpoint_views(self, prefix: str) -> dict[str, Destination]:
        views: dict[str, Destination] = {}
        for norm, name in zip((self.before, self.after), self._names, strict=True):
            if norm is not None:
                views |= norm.checkpoint_views(f"{prefix}.{name}")
        return views


RecurrentMixer = ShortConv | GatedDeltaNet | Mamba2


def recurrent_mixer(
    config: ModelConfig, number: int, ops: StateOps, *, dtype: torch.dtype, device: torch.device
) -> RecurrentMixer:
    """A layer with a state, the ``number``-th of them."""
    traits = config.traits.recurrent
    if isinstance(traits, ShortConvTraits):
        return ShortConv(config, traits, number, ops, dtype=dtype, device=device)
    if isinstance(traits, GatedDeltaTraits):
        return GatedDeltaNet(config, traits, number, ops, dtype=dtype, device=device)
    assert isinstance(traits, Mamba2Traits)
    return Mamba2(config, traits, number, ops, dtype=dtype, device=device)


class DecoderLayer:
    """Mixer and MLP. The layer leaves its last addition to the next layer, where one operation adds and norms."""

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        self_attn: SelfAttention | LatentAttention | None,
        recurrent: RecurrentMixer | None,
        ops: Ops,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """self_attn, recurrent: the mixers; two are summed; none: the layer is an MLP alone."""
        traits, names = config.traits, config.traits.norms
        self.self_attn, self.recurrent = self_attn, recurrent
        self._recurrent_name = traits.recurrent_name
        self._mixers = [mixer for mixer in (recurrent, self_attn) if mixer is not None]
        self._around_mixer = (
            Branch(config, names.before_attention, names.after_attention, ops, dtype=dtype, device=device)
            if self._mixers
            else None
        )
        experts = traits.experts
        is_sparse = experts is not None and experts.is_sparse[layer_id]
        self._mlp_name = experts.names.block if experts is not None and is_sparse else traits.mlp_name
        self.mlp: GatedMLP | PlainMLP | SparseMLP | None = None
        self._around_mlp: Branch | None = None
        if traits.has_mlp and not traits.has_mlp[layer_id]:
            return
        self._around_mlp = Branch(config, names.before_mlp, names.after_mlp, ops, dtype=dtype, device=device)
        if experts is not None and is_sparse:
            self.mlp = SparseMLP(config, experts, ops, dtype=dtype, device=device)
        elif traits.plain_mlp is not None:
            self.mlp = PlainMLP(config, traits.plain_mlp, dtype=dtype, device=device)
        else:
            self.mlp = GatedMLP(config, ops, dtype=dtype, device=device, size=traits.dense_size)

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        inputs: StepInputs,
        kv_pool: KVPool,
        attention: AttentionBackend,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x, residual [tokens, hidden]: the stream is their sum (residual None: zero). Returns the same pair for the
        next layer. May overwrite both arguments: the caller must not use them again."""
        if self._around_mixer is not None:
            x, residual = self._around_mixer.enter(x, residual)
            first, *others = [mixer(x, inputs, kv_pool, attention) for mixer in self._mixers]
            for other in others:
                first = first.add_(other)
            x = self._around_mixer.leave(first)
        if self._around_mlp is not None and self.mlp is not None:
            x, residual = self._around_mlp.enter(x, residual)
            x = self._around_mlp.leave(self.mlp(x))
        return x, residual

    @property
    def linears(self) -> list[Linear]:
        mixers = [linear for mixer in self._mixers for linear in mixer.linears]
        return mixers if self.mlp is None else [*mixers, *self.mlp.linears]

    def finish_loading(self) -> None:
        """See Decoder.finish_loading."""
        for part in (self._around_mixer, *self._mixers, self._around_mlp):
            if part is not None:
                part.finish_loading()

    def checkpoint_views(self, prefix: str) -> dict[str, Destination]:
        parts = (
            (self._around_mixer, prefix),
            (self.recurrent, f"{prefix}.{self._recurrent_name}"),
            (self.self_attn, f"{prefix}.self_attn"),
            (self._around_mlp, prefix),
            (self.mlp, f"{prefix}.{self._mlp_name}"),
        )
        views: dict[str, Destination] = {}
        for part, name in parts:
            if part is not None:
                views |= part.checkpoint_views(name)
        return views


class Decoder:
    """The whole model. Weights are uninitialised until `weights.load_weights` or `weights.fill_dummy` has run."""

    def __init__(
        self,
        config: ModelConfig,
        ops: Ops,
        state_ops: StateOps = TORCH_STATES,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, ops, dtype=dtype, device=device)
        self._stored_rows: torch.Tensor | None = None
        """The embedding in the checkpoint's file, as long as a tied head may still repack the one in memory."""
        self._ops = ops
        traits = config.traits
        # Rounded first, as in transformers.
        self._embedding_multiplier = float(torch.tensor(traits.embedding_multiplier, dtype=dtype))
        self._needs_torch = traits.needs_torch or config.activation not in ("silu", "swish")
        self._needs_torch |= traits.uses_states and not state_ops.is_recordable
        self._renames = traits.renames
        self._logit_multiplier, self._logit_cap = traits.logit_multiplier, traits.logit_cap
        rotaries = {
            rope: RotaryEmbedding(rope, config.head_dim, config.context_length, dtype=dtype, device=device)
            for rope in {rope for layer, rope in enumerate(config.ropes) if traits.has_attention(layer)}
        }
        self.layers: list[DecoderLayer] = []
        specs, num_recurrent, where = iter(attention_specs(config)), 0, {"dtype": dtype, "device": device}
        for layer_id, rope in enumerate(config.ropes):
            attention = recurrent = None
            if traits.has_attention(layer_id):
                if traits.latent is None:
                    args = layer_id, next(specs), ops, state_ops, rotaries[rope]
                    attention = SelfAttention(config, *args, **where)
                else:
                    attention = LatentAttention(config, layer_id, next(specs), ops, rotaries[rope], **where)
            if traits.mixer(layer_id) in (Mixer.RECURRENT, Mixer.BOTH):
                recurrent = recurrent_mixer(config, num_recurrent, state_ops, **where)
                num_recurrent += 1
            self.layers.append(DecoderLayer(config, layer_id, attention, recurrent, ops, **where))
        self.norm = RMSNorm(
            config.hidden_size,
            config.rms_norm_eps,
            ops,
            dtype=dtype,
            device=device,
            offset=traits.norm_offset,
        )
        self.lm_head: LMHead | None = None
        """None in a model that computes no logits of the next token."""
        if config.head == "language":
            self.lm_head = LMHead(
                config.vocab_size,
                config.hidden_size,
                tied_to=self.embed_tokens if config.tie_word_embeddings else None,
                dtype=dtype,
                device=device,
            )
        self.label_head: LMHead | None = None
        if config.head == "labels":
            self.label_head = LMHead(
                len(config.labels), config.hidden_size, tied_to=None, name="score", dtype=dtype, device=device
            )

    @property
    def specs(self) -> list[AttentionSpec]:
        """See ServedModel.specs."""
        return [layer.self_attn.spec for layer in self.layers if layer.self_attn is not None]

    @property
    def state_shapes(self) -> list[StateShape]:
        """See ServedModel.state_shapes."""
        return [layer.recurrent.state_shape for layer in self.layers if layer.recurrent is not None]

    @property
    def weight_bytes(self) -> int:
        """See ServedModel.weight_bytes. To be asked before `finish_loading` and `choose_products`, which may drop
        weights."""
        return sum(view.nbytes for view in self.checkpoint_views().values())

    def __call__(self, inputs: StepInputs, kv_pool: KVPool, attention: AttentionBackend) -> torch.Tensor:
        """See ServedModel.__call__. The hidden states are those before the final norm."""
        x, residual = self.embed_tokens(inputs.input_ids), None
        if self._embedding_multiplier != 1:
            x.mul_(self._embedding_multiplier)
        for layer in self.layers:
            x, residual = layer(x, residual, inputs, kv_pool, attention)
        return x if residual is None else self._ops.add(x, residual)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states of some tokens [rows, hidden], as returned by a call -> float32 [rows, vocab_size]; [rows, 0]
        of a model without a language head."""
        if self.lm_head is None:
            return hidden.new_empty(len(hidden), 0, dtype=torch.float32)
        logits = self.lm_head(hidden, self.norm)
        if self._logit_multiplier != 1:
            logits.mul_(self._logit_multiplier)
        if self._logit_cap is not None:
            logits.div_(self._logit_cap).tanh_().mul_(self._logit_cap)
        return logits

    def final_states(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ServedModel.final_states."""
        return self.norm(hidden).to(torch.float32)

    def compute_labels(self, hidden: torch.Tensor) -> torch.Tensor:
        """See ServedModel.compute_labels."""
        assert self.label_head is not None, "the model has no classification head"
        return self.label_head(hidden, self.norm)

    def keep_packed(self, form: WeightForm | None, *, has_stored_rows: bool) -> None:
        """Load the weights of matrix products as the checkpoint has them, in few bits or in 16, and with a form all its
        floats in few bits: in the form, embedding and head in 8 bits. To be called before `checkpoint_views`; `pack`
        follows `finish_loading`.

        has_stored_rows: True if the embedding can be looked up in the checkpoint's file.
        """
        for linear in (linear for layer in self.layers for linear in layer.linears):
            if not linear.is_shared:
                linear.keep_packed(form)
        for layer in self.layers:
            if isinstance(layer.mlp, SparseMLP):
                layer.mlp.experts.keep_packed(form)
        # 4 bits in the head cost small models as much perplexity as in all layers together.
        of_head = None if form is None else INT8
        is_tied = self.lm_head is not None and self.lm_head.is_tied
        self.embed_tokens.keep_packed(of_head, is_read=is_tied or not has_stored_rows)
        if self.lm_head is not None and not is_tied:
            self.lm_head.linear.keep_packed(of_head)

    def pack(self, kernel: PackedKernel | None, embedding_rows: torch.Tensor | None) -> None:
        """Bring weights that were kept packed into the form in which they are computed. kernel: multiplies by them;
        where there is none they become floats. embedding_rows: the embedding in the checkpoint's file."""
        widened: Counter[str] = Counter()
        for linear in (linear for layer in self.layers for linear in layer.linears):
            widened.update(linear.pack(kernel))
        of_embedding = self.embed_tokens.pack(kernel, embedding_rows)
        if self.lm_head is not None:
            self.lm_head.pack(kernel, of_embedding)
        if widened and kernel is not None:
            described = ", ".join(f"{count} of {kind}" for kind, count in widened.items())
            logger.warning("weights in few bits become floats: there is no kernel for %s", described)

    def finish_loading(self) -> None:
        """Bring what has been loaded into the form in which it is computed. To be called once, before
        `choose_products`."""
        for layer in self.layers:
            layer.finish_loading()
        self.norm.finish_loading()

    def choose_products(
        self,
        form: str,
        embedding_rows: torch.Tensor | None,
        logits: LogitsProduct | None = None,
        kernel: BlockKernel | None = None,
    ) -> LateTrials | None:
        """Choose the form of all matrix products, see `product_trials`. The weights have been loaded. Returns the
        trials for which there was no time.

        embedding_rows: where else the tokens of a tied model can be looked up, if the LM head repacks its weight; None:
        nowhere, so it does not. logits: computes the head's product, so that it needs no form. kernel: computes the
        form "numba".
        """
        for layer in self.layers:
            if isinstance(layer.mlp, SparseMLP):
                layer.mlp.experts.release_packed()
                layer.mlp.experts.use_kernel(kernel)
        linears = [linear for layer in self.layers for linear in layer.linears if linear.packed is None]
        # A head of classes is small: it keeps its plain product.
        if self.lm_head is None or self.lm_head.packed_product is not None:
            return choose_products(linears, form, kernel=kernel) if linears else None
        head = self.lm_head.linear
        if logits is not None:
            self.lm_head.product = logits
            return choose_products(linears, form, kernel=kernel)
        kept = [head] if self.lm_head.is_tied and embedding_rows is None else []
        late = choose_products([*linears, head], form, kept, kernel)
        self._stored_rows = embedding_rows if self.lm_head.is_tied else None
        self.drop_tied_matrix()
        return late

    def drop_tied_matrix(self) -> bool:
        """See ServedModel.drop_tied_matrix."""
        if self._stored_rows is None or self.lm_head is None or self.lm_head.linear.weight is not None:
            return False
        self.embed_tokens.read_from(self._stored_rows)
        self._stored_rows = None
        return True

    def adapter_targets(self) -> dict[str, Target]:
        """See ServedModel.adapter_targets: the projections of attention and of MLPs, without those of experts."""
        names = {
            _identity(view): name.removesuffix(".weight")
            for name, view in self.checkpoint_views().items()
            if name.endswith(".weight") and ".experts." not in name
        }
        layers = []
        for linear in (linear for layer in self.layers for linear in layer.linears):
            weights, modules, start = linear.checkpoint_views(""), {}, 0
            for part, size in linear.parts.items():
                if (name := names.get(_identity(weights[f"{part}.weight"]))) is not None:
                    modules[name] = start, size
                start += size
            layers.append((modules, linear.in_features, linear.output_order, linear.attach_updates))
        return module_targets(layers)

    def is_recordable(self, tokens: int) -> bool:
        """Are all products of the layers, for a step of so many tokens, calls that attention's team can record?"""
        return not self._needs_torch and all(
            linear.is_recordable(tokens) for layer in self.layers for linear in layer.linears
        )

    def checkpoint_views(self) -> dict[str, Destination]:
        """Checkpoint tensor name -> memory to fill: every tensor the model needs, and no other."""
        views = self.embed_tokens.checkpoint_views(EMBEDDING)
        for i, layer in enumerate(self.layers):
            views |= layer.checkpoint_views(f"model.layers.{i}")
        views |= self.norm.checkpoint_views("model.norm")
        for head in (self.lm_head, self.label_head):
            views |= head.checkpoint_views() if head is not None else {}
        return {self._checkpoint_name(name): view for name, view in views.items()}

    def _checkpoint_name(self, name: str) -> str:
        for here, there in self._renames:
            name = name.replace(here, there)
        return name


def _identity(view: Destination) -> int:
    """The same for a place in memory, or a slot, whenever it is asked for."""
    return view.data_ptr() if isinstance(view, torch.Tensor) else id(view)
