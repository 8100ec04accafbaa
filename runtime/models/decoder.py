"""The decoder that Llama, Mistral, Qwen2 and Qwen3 share; `DecoderTraits` says where they differ.

    ids ─▶ embedding ─▶ [ norm ─▶ attention ─▶ + ─▶ norm ─▶ gated MLP ─▶ + ] × layers ─▶ norm ─▶ hidden states

Tokens of all requests lie side by side, [tokens, hidden]: only attention knows which token belongs to which request.
Layers are plain objects over tensors; there is no training, hence no nn.Module. Each object names, by
`checkpoint_views`, the memory that a checkpoint tensor fills.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ...attention.backend import AttentionBackend, AttentionSpec
from ..hf_config import ModelConfig
from ..layers.activation import silu_and_mul
from ..layers.embedding import Embedding, LMHead
from ..layers.linear import Linear
from ..layers.norm import RMSNorm
from ..layers.rotary import RotaryEmbedding, apply_rotary

Rotation = tuple[torch.Tensor, torch.Tensor]
"""cos and signed sin of the step's positions, see RotaryEmbedding.lookup."""


class SelfAttention:
    """Projections, q/k norm and rotary embedding around an attention backend."""

    def __init__(self, config: ModelConfig, layer_id: int, *, dtype: torch.dtype, device: torch.device) -> None:
        traits, head_dim = config.traits, config.head_dim
        self.spec = AttentionSpec(
            layer_id=layer_id,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=head_dim,
            scale=head_dim**-0.5,
            sliding_window=traits.layer_windows[layer_id],
        )
        q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
        self.qk_heads = config.num_heads + config.num_kv_heads
        self.qk_size = q_size + kv_size
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
            torch.empty(self.qk_heads, head_dim, dtype=dtype, device=device) if traits.qk_norm else None
        )
        self.rms_norm_eps = config.rms_norm_eps

    def __call__(self, x: torch.Tensor, rotation: Rotation, attention: AttentionBackend) -> torch.Tensor:
        """[tokens, hidden] -> [tokens, hidden]"""
        spec, tokens = self.spec, x.shape[0]
        qkv = self.qkv_proj(x)
        qk = qkv[:, : self.qk_size].view(tokens, self.qk_heads, spec.head_dim)
        v = qkv[:, self.qk_size :].view(tokens, spec.num_kv_heads, spec.head_dim)
        if self.qk_norm_weight is not None:
            qk = F.rms_norm(qk, (spec.head_dim,), None, self.rms_norm_eps) * self.qk_norm_weight
        qk = apply_rotary(qk, *rotation)
        out = attention.run(spec, qk[:, : spec.num_heads], qk[:, spec.num_heads :], v)
        return self.o_proj(out.view(tokens, -1))

    def checkpoint_views(self, prefix: str) -> dict[str, torch.Tensor]:
        views = self.qkv_proj.checkpoint_views(prefix) | self.o_proj.checkpoint_views(prefix)
        if self.qk_norm_weight is not None:
            # Expanded views: the same head_dim numbers for every head (see weights.fill).
            views[f"{prefix}.q_norm.weight"] = self.qk_norm_weight[: self.spec.num_heads]
            views[f"{prefix}.k_norm.weight"] = self.qk_norm_weight[self.spec.num_heads :]
        return views


class GatedMLP:
    """down(silu(gate(x)) * up(x))"""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        size, bias = config.intermediate_size, config.traits.mlp_bias
        self.gate_up_proj = Linear(
            config.hidden_size, {"gate_proj": size, "up_proj": size}, bias=bias, dtype=dtype, device=device
        )
        self.down_proj = Linear(size, {"down_proj": config.hidden_size}, bias=bias, dtype=dtype, device=device)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(silu_and_mul(self.gate_up_proj(x)))

    def checkpoint_views(self, prefix: str) -> dict[str, torch.Tensor]:
        return self.gate_up_proj.checkpoint_views(prefix) | self.down_proj.checkpoint_views(prefix)


class DecoderLayer:
    def __init__(self, config: ModelConfig, layer_id: int, *, dtype: torch.dtype, device: torch.device) -> None:
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.self_attn = SelfAttention(config, layer_id, dtype=dtype, device=device)
        self.post_attention_layernorm = RMSNorm(size, eps, dtype=dtype, device=device)
        self.mlp = GatedMLP(config, dtype=dtype, device=device)

    def __call__(self, x: torch.Tensor, rotation: Rotation, attention: AttentionBackend) -> torch.Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotation, attention)
        return x + self.mlp(self.post_attention_layernorm(x))

    def checkpoint_views(self, prefix: str) -> dict[str, torch.Tensor]:
        return (
            self.input_layernorm.checkpoint_views(f"{prefix}.input_layernorm")
            | self.self_attn.checkpoint_views(f"{prefix}.self_attn")
            | self.post_attention_layernorm.checkpoint_views(f"{prefix}.post_attention_layernorm")
            | self.mlp.checkpoint_views(f"{prefix}.mlp")
        )


class Decoder:
    """The whole model. Weights are uninitialised until `weights.load_weights` or `weights.fill_dummy` ran."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, dtype=dtype, device=device)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, config.context_length, dtype=dtype, device=device)
        self.layers = [DecoderLayer(config, i, dtype=dtype, device=device) for i in range(config.num_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype, device=device)
        self.lm_head = LMHead(
            config.vocab_size,
            config.hidden_size,
            tied_to=self.embed_tokens if config.tie_word_embeddings else None,
            dtype=dtype,
            device=device,
        )

    def __call__(self, input_ids: torch.Tensor, positions: torch.Tensor, attention: AttentionBackend) -> torch.Tensor:
        """input_ids, positions: int64 [tokens] -> hidden states [tokens, hidden], before the final norm.

        `attention` has planned this step.
        """
        x = self.embed_tokens(input_ids)
        rotation = self.rotary.lookup(positions)
        for layer in self.layers:
            x = layer(x, rotation, attention)
        return x

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states of some tokens [rows, hidden], as returned by a call -> float32 [rows, vocab_size]."""
        return self.lm_head(self.norm(hidden))

    def checkpoint_views(self) -> dict[str, torch.Tensor]:
        """Checkpoint tensor name -> memory to fill: every tensor the model needs, and no other."""
        views = self.embed_tokens.checkpoint_views("model.embed_tokens")
        for i, layer in enumerate(self.layers):
            views |= layer.checkpoint_views(f"model.layers.{i}")
        return views | self.norm.checkpoint_views("model.norm") | self.lm_head.checkpoint_views("lm_head")
