"""OLMo 2 and 3 (OLMo Team 2025): norms behind attention and MLP, none before them; norms over all heads of q and of
k. OLMo 3 has windows in three of four layers, and scales the rotary embedding of the others only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..model_config import DecoderTraits, NormNames
from .traits import full_attention, layer_kinds, windows_of

BEHIND = NormNames(
    before_attention=None,
    after_attention="post_attention_layernorm",
    before_mlp=None,
    after_mlp="post_feedforward_layernorm",
)


def olmo2_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    bias = raw.get("attention_bias", False)
    return DecoderTraits(layer_windows=full_attention(raw), qkv_bias=bias, o_bias=bias, qk_row_norm=True, norms=BEHIND)


def olmo3_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    bias, kinds = raw.get("attention_bias", False), layer_kinds(raw, full_every=4)
    return DecoderTraits(
        layer_windows=windows_of(raw, kinds),
        layer_kinds=kinds,
        qkv_bias=bias,
        o_bias=bias,
        qk_row_norm=True,
        norms=BEHIND,
    )
