"""The decoder that Llama, Mistral, Qwen2 and Qwen3 share; `DecoderTraits` says where they differ.

    ids ─▶ embedding ─▶ [ norm ─▶ attention ─▶ + ─▶ norm ─▶ gated MLP ─▶ + ] × layers ─▶ norm ─▶ hidden states

Tokens of all requests lie side by side, [tokens, hidden]; only attention knows which token belongs to which request.
Layers are plain objects over tensors, not nn.Modules, as there is no training. Each object's `checkpoint_views` names
the memory that each checkpoint tensor fills. `Ops` computes everything between the matrix products.
"""

from __future__ import annotations

import torch

from ...attention.backend import AttentionBackend, AttentionSpec
from ...memory_pool.kv_pool import KVPool
from ..layers.embedding import Embedding, LMHead, LogitsProduct
from ..layers.linear import Linear
from ..layers.norm import RMSNorm
from ..layers.ops import Ops
from ..layers.product_trials import LateTrials, choose_products
from ..layers.products import NUMBA, BlockKernel
from ..layers.rotary import RotaryEmbedding
from ..layers.step_inputs import StepInputs
from ..model_config import ModelConfig

EMBEDDING = "model.embed_tokens"
"""Its name in a checkpoint."""


def attention_specs(config: ModelConfig) -> list[AttentionSpec]:
    """The attention spec of each layer."""
    return [
        AttentionSpec(
            layer_id=layer_id,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            scale=config.head_dim**-0.5,
            sliding_window=window,
        )
        for layer_id, window in enumerate(config.traits.layer_windows)
    ]


class SelfAttention:
    """Projections, q/k norm and rotary embedding around an attention backend."""

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        ops: Ops,
        rotary: RotaryEmbedding,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        traits, head_dim = config.traits, config.head_dim
        self.spec = attention_specs(config)[layer_id]
        q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        self.qkv_proj = Linear(
            config.hidden_size,
            {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size},
            bias=traits.qkv_bias,
            dtype=dtype,
            device=device,
        )
        self.o_proj = Linear(q_size, {"o_proj": config.hidden_size}, bias=traits.o_bias, dtype=dtype, device=device)
        # One weight per head of q and k, so that both are normed in one operation.
        self.qk_norm_weight = (
            torch.empty(config.num_heads + config.num_kv_heads, head_dim, dtype=dtype, device=device)
            if traits.qk_norm
            else None
        )
        self.rms_norm_eps = config.rms_norm_eps
        self._rotary = rotary
        self._ops = ops

    def __call__(
        self, x: torch.Tensor, inputs: StepInputs, kv_pool: KVPool, attention: AttentionBackend
    ) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        layer = self.spec.layer_id
        qkv = self.qkv_proj(x)
        if inputs.arrivals is not None:  # as late as can be: all of the layer so far went beside the copy
            inputs.arrivals.wait_layer(layer)
        q = self._ops.rotate_and_store(
            qkv,
            inputs.positions,
            self._rotary.table,
            inputs.out_cache_loc,
            kv_pool.k[layer],
            kv_pool.v[layer],
            self.qk_norm_weight,
            self.rms_norm_eps,
        )
        return self.o_proj(attention.run(self.spec, q).view(len(x), -1))

    def checkpoint_views(self, prefix: str) -> dict[str, torch.Tensor]:
        views = self.qkv_proj.checkpoint_views(prefix) | self.o_proj.checkpoint_views(prefix)
        if self.qk_norm_weight is not None:
            # load_weights copies the checkpoint's head_dim numbers to every head's row.
            views[f"{prefix}.q_norm.weight"] = self.qk_norm_weight[: self.spec.num_heads]
            views[f"{prefix}.k_norm.weight"] = self.qk_norm_weight[self.spec.num_heads :]
        return views


class GatedMLP:
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, config: ModelConfig, ops: Ops, *, dtype: torch.dtype, device: torch.device) -> None:
        size, bias = config.intermediate_size, config.traits.mlp_bias
        self.gate_up_proj = Linear(
            config.hidden_size, {"gate_proj": size, "up_proj": size}, bias=bias, dtype=dtype, device=device
        )
        self.down_proj = Linear(size, {"down_proj": config.hidden_size}, bias=bias, dtype=dtype, device=device)
        self._ops = ops

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self._ops.silu_and_mul(self.gate_up_proj(x)))

    def checkpoint_views(self, prefix: str) -> dict[str, torch.Tensor]:
        return self.gate_up_proj.checkpoint_views(prefix) | self.down_proj.checkpoint_views(prefix)


class DecoderLayer:
    """Attention and MLP. The layer leaves its last addition to the next layer, where one operation adds and norms."""

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        ops: Ops,
        rotary: RotaryEmbedding,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, ops, dtype=dtype, device=device)
        self.self_attn = SelfAttention(config, layer_id, ops, rotary, dtype=dtype, device=device)
        self.post_attention_layernorm = RMSNorm(size, eps, ops, dtype=dtype, device=device)
        self.mlp = GatedMLP(config, ops, dtype=dtype, device=device)

    def __call__(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        inputs: StepInputs,
        kv_pool: KVPool,
        attention: AttentionBackend,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [tokens, hidden]: the stream is their sum (residual None: zero). Returns the same pair for the
        next layer. May overwrite both arguments: the caller must not use them again."""
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm.of_sum(x, residual)
        x = self.self_attn(x, inputs, kv_pool, attention)
        x, residual = self.post_attention_layernorm.of_sum(x, residual)
        return self.mlp(x), residual

    @property
    def linears(self) -> list[Linear]:
        attention, mlp = self.self_attn, self.mlp
        return [attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj]

    def checkpoint_views(self, prefix: str) -> dict[str, torch.Tensor]:
        return (
            self.input_layernorm.checkpoint_views(f"{prefix}.input_layernorm")
            | self.self_attn.checkpoint_views(f"{prefix}.self_attn")
            | self.post_attention_layernorm.checkpoint_views(f"{prefix}.post_attention_layernorm")
            | self.mlp.checkpoint_views(f"{prefix}.mlp")
        )


class Decoder:
    """The whole model. Weights are uninitialised until `weights.load_weights` or `weights.fill_dummy` has run."""

    def __init__(self, config: ModelConfig, ops: Ops, *, dtype: torch.dtype, device: torch.device) -> None:
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, ops, dtype=dtype, device=device)
        self._ops = ops
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, config.context_length, dtype=dtype, device=device)
        self.layers = [
            DecoderLayer(config, i, ops, self.rotary, dtype=dtype, device=device) for i in range(config.num_layers)
        ]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, ops, dtype=dtype, device=device)
        self.lm_head = LMHead(
            config.vocab_size,
            config.hidden_size,
            tied_to=self.embed_tokens if config.tie_word_embeddings else None,
            dtype=dtype,
            device=device,
        )

    @property
    def specs(self) -> list[AttentionSpec]:
        """See ServedModel.specs."""
        return [layer.self_attn.spec for layer in self.layers]

    @property
    def weight_bytes(self) -> int:
        """See ServedModel.weight_bytes. To be asked before `choose_products`, which may drop weights."""
        return sum(view.nbytes for view in self.checkpoint_views().values())

    def __call__(self, inputs: StepInputs, kv_pool: KVPool, attention: AttentionBackend) -> torch.Tensor:
        """See ServedModel.__call__. The hidden states are those before the final norm."""
        x, residual = self.embed_tokens(inputs.input_ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, inputs, kv_pool, attention)
        return x if residual is None else self._ops.add(x, residual)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states of some tokens [rows, hidden], as returned by a call -> float32 [rows, vocab_size]."""
        return self.lm_head(hidden, self.norm)

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
        linears = [linear for layer in self.layers for linear in layer.linears]
        head = self.lm_head.linear
        if logits is not None:
            self.lm_head.product = logits
            return choose_products(linears, form, kernel=kernel)
        kept = [head] if self.lm_head.is_tied and embedding_rows is None else []
        late = choose_products([*linears, head], form, kept, kernel)
        if head.weight is None and self.lm_head.is_tied and embedding_rows is not None:
            self.embed_tokens.read_from(embedding_rows)
        return late

    def is_recordable(self, tokens: int) -> bool:
        """Are all products of the layers, for a step of so many tokens, calls that attention's team can record?"""
        return all(linear.form(tokens) == NUMBA for layer in self.layers for linear in layer.linears)

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        """Checkpoint tensor name -> memory to fill: every tensor the model needs, and no other."""
        views = self.embed_tokens.checkpoint_views(EMBEDDING)
        for i, layer in enumerate(self.layers):
            views |= layer.checkpoint_views(f"model.layers.{i}")
        return views | self.norm.checkpoint_views("model.norm") | self.lm_head.checkpoint_views()
