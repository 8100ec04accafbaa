"""Qwen3-Next (2025) and Qwen3.5 (2026): three layers out of four are gated delta nets, and attention has a gate on its
output. Qwen3-Next and Qwen3.5-MoE have experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..model_config import DecoderTraits, ExpertNames, GatedDeltaTraits, Mixer
from .qwen_moe import expert_traits, sparse_layers
from .traits import FULL, full_attention


def qwen3_next_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    traits = _delta_traits(raw, has_grouped_inputs=True)
    return _with_experts(raw, traits, sparse_layers(raw), renormalises=raw.get("norm_topk_prob", True))


def qwen3_5_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    return _delta_traits(raw, has_grouped_inputs=False)


def qwen3_5_moe_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    every_layer = (True,) * raw["num_hidden_layers"]
    return _with_experts(raw, _delta_traits(raw, has_grouped_inputs=False), every_layer, renormalises=True)


def qwen3_5_moe_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """No layer has an MLP of intermediate_size, which newer files leave out."""
    return {**raw, "intermediate_size": raw.get("intermediate_size") or raw["moe_intermediate_size"]}


def _with_experts(
    raw: Mapping[str, Any], traits: DecoderTraits, is_sparse: tuple[bool, ...], *, renormalises: bool
) -> DecoderTraits:
    experts = dataclasses.replace(
        expert_traits(raw, raw["moe_intermediate_size"], is_sparse),
        renormalises=renormalises,
        shared_size=raw["shared_expert_intermediate_size"],
        names=ExpertNames(shared="shared_expert", shared_gate="shared_expert_gate"),
    )
    return dataclasses.replace(traits, experts=experts)


def _delta_traits(raw: Mapping[str, Any], *, has_grouped_inputs: bool) -> DecoderTraits:
    kinds, bias = raw.get("layer_types"), raw.get("attention_bias", False)
    if kinds is None:
        full_every = raw.get("full_attention_interval", 4)
        kinds = [None if (layer + 1) % full_every else FULL for layer in range(raw["num_hidden_layers"])]
    return DecoderTraits(
        layer_windows=full_attention(raw),
        mixers=tuple(Mixer.ATTENTION if kind == FULL else Mixer.RECURRENT for kind in kinds),
        recurrent=GatedDeltaTraits(
            key_heads=raw["linear_num_key_heads"],
            value_heads=raw["linear_num_value_heads"],
            key_size=raw["linear_key_head_dim"],
            value_size=raw["linear_value_head_dim"],
            kernel=raw.get("linear_conv_kernel_dim", 4),
            has_grouped_inputs=has_grouped_inputs,
        ),
        recurrent_name="linear_attn",
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        output_gate=True,
        partial_rotary=0.25,
        norm_offset=1.0,
    )
