"""GLM-4 (GLM Team 2024): half of each head is rotated, in neighbouring pairs; gate and up are one matrix. The models of
2025 (Glm4) have norms behind attention and MLP, too. GLM-4.5 and 4.6 (Glm4Moe) have experts, scored by sigmoids with a
correction (as DeepSeek-V3), pairs half a head apart, and perhaps a norm of q and k."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..model_config import Choice, DecoderTraits, ExpertNames, ExpertTraits, NormNames
from .traits import expert_count, full_attention

AROUND = NormNames(
    before_attention="input_layernorm",
    after_attention="post_self_attn_layernorm",
    before_mlp="post_attention_layernorm",
    after_mlp="post_mlp_layernorm",
)


def glm_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    return _traits(raw, NormNames())


def glm4_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    return _traits(raw, AROUND)


def glm4_moe_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    first, size = raw["first_k_dense_replace"], raw["moe_intermediate_size"]
    return DecoderTraits(
        layer_windows=full_attention(raw),
        qkv_bias=raw.get("attention_bias", False),
        qk_norm=raw.get("use_qk_norm", False),
        partial_rotary=0.5,
        experts=ExpertTraits(
            is_sparse=tuple(layer >= first for layer in range(raw["num_hidden_layers"])),
            num_experts=expert_count(raw),
            top_k=raw["num_experts_per_tok"],
            intermediate_size=size,
            shared_size=size * raw["n_shared_experts"],
            choice=Choice.SIGMOID,
            renormalises=raw.get("norm_topk_prob", True),
            weight_scale=raw.get("routed_scaling_factor", 1.0),
            num_groups=raw.get("n_group", 1),
            top_groups=raw.get("topk_group", 1),
            routes_in_float32=True,
            names=ExpertNames(shared="shared_experts", correction="gate.e_score_correction_bias"),
        ),
    )


def _traits(raw: Mapping[str, Any], norms: NormNames) -> DecoderTraits:
    return DecoderTraits(
        layer_windows=full_attention(raw),
        qkv_bias=raw.get("attention_bias", True),
        partial_rotary=0.5,
        is_interleaved=True,
        has_fused_gate_up=True,
        norms=norms,
    )
