"""Gemma 1 to 3, text (Gemma Team 2024, 2025): norms multiply by 1 + weight, embeddings by √hidden_size, GELU gates.
Gemma 2 adds norms behind attention and MLP, soft caps, and windows in every other layer; Gemma 3 has a norm of q and k
instead of caps, five layers with a window and their own rotary embedding for each full one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..model_config import DecoderTraits, NormNames
from .traits import full_attention, layer_kinds, windows_of

AROUND = NormNames(
    before_attention="input_layernorm",
    after_attention="post_attention_layernorm",
    before_mlp="pre_feedforward_layernorm",
    after_mlp="post_feedforward_layernorm",
)


def gemma_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    bias = raw.get("attention_bias", False)
    return DecoderTraits(
        layer_windows=full_attention(raw),
        qkv_bias=bias,
        o_bias=bias,
        activation="gelu_pytorch_tanh",  # also where the config says gelu: an error of the first files
        norm_offset=1.0,
        embedding_multiplier=raw["hidden_size"] ** 0.5,
        ties_by_default=True,
    )


def gemma2_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    _refuse_bidirectional(raw)
    bias = raw.get("attention_bias", False)
    return DecoderTraits(
        layer_windows=windows_of(raw, layer_kinds(raw, full_every=2)),
        qkv_bias=bias,
        o_bias=bias,
        activation=raw.get("hidden_activation") or "gelu_pytorch_tanh",
        norms=AROUND,
        norm_offset=1.0,
        embedding_multiplier=raw["hidden_size"] ** 0.5,
        attention_scale=raw["query_pre_attn_scalar"] ** -0.5,
        attention_cap=raw.get("attn_logit_softcapping"),
        logit_cap=raw.get("final_logit_softcapping"),
        ties_by_default=True,
    )


def gemma3_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    _refuse_bidirectional(raw)
    bias = raw.get("attention_bias", False)
    kinds = layer_kinds(raw, full_every=raw.get("sliding_window_pattern", 6))
    return DecoderTraits(
        layer_windows=windows_of(raw, kinds),
        layer_kinds=kinds,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        activation=raw.get("hidden_activation") or "gelu_pytorch_tanh",
        norms=AROUND,
        norm_offset=1.0,
        embedding_multiplier=raw["hidden_size"] ** 0.5,
        attention_scale=raw["query_pre_attn_scalar"] ** -0.5,
        logit_cap=raw.get("final_logit_softcapping"),
        ties_by_default=True,
    )


def _refuse_bidirectional(raw: Mapping[str, Any]) -> None:
    if raw.get("use_bidirectional_attention"):
        raise ValueError("use_bidirectional_attention: an encoder, which cannot generate text; use a causal model")
