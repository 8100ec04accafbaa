"""GLM-4 (GLM Team 2024): half of each head is rotated, in neighbouring pairs; gate and up are one matrix. The models of
2025 (Glm4) have norms behind attention and MLP, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..model_config import DecoderTraits, NormNames
from .traits import full_attention

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


def _traits(raw: Mapping[str, Any], norms: NormNames) -> DecoderTraits:
    return DecoderTraits(
        layer_windows=full_attention(raw),
        qkv_bias=raw.get("attention_bias", True),
        partial_rotary=0.5,
        is_interleaved=True,
        has_fused_gate_up=True,
        norms=norms,
    )
