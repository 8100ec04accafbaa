"""Qwen2-MoE and Qwen3-MoE (Yang et al. 2024, 2025): Qwen with experts in place of the MLP; the former with a shared
expert behind a gate. OLMoE (Muennighoff et al. 2024) has the same experts, and norms over all heads of q and of k."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..model_config import DecoderTraits, ExpertNames, ExpertTraits
from .qwen2 import qwen2_traits
from .qwen3 import qwen3_traits
from .traits import expert_count, full_attention


def qwen2_moe_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    experts = dataclasses.replace(
        expert_traits(raw, raw["moe_intermediate_size"], sparse_layers(raw)),
        shared_size=raw["shared_expert_intermediate_size"],
        names=ExpertNames(shared="shared_expert", shared_gate="shared_expert_gate"),
    )
    return dataclasses.replace(qwen2_traits(raw), qkv_bias=raw.get("qkv_bias", True), experts=experts)


def qwen3_moe_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    experts = expert_traits(raw, raw["moe_intermediate_size"], sparse_layers(raw))
    # Unlike Qwen3, its windows are in all layers or in none.
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    windows = (window,) * raw["num_hidden_layers"]
    return dataclasses.replace(qwen3_traits(raw), layer_windows=windows, experts=experts)


def olmoe_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    if raw.get("clip_qkv") is not None:
        raise ValueError("clip_qkv is not supported; use a checkpoint without it")
    bias, every_layer = raw.get("attention_bias", False), (True,) * raw["num_hidden_layers"]
    return DecoderTraits(
        layer_windows=full_attention(raw),
        qkv_bias=bias,
        o_bias=bias,
        qk_row_norm=True,
        experts=expert_traits(raw, raw["intermediate_size"], every_layer),
    )


def sparse_layers(raw: Mapping[str, Any]) -> tuple[bool, ...]:
    """Per layer, whether it has experts: each decoder_sparse_step-th, but for mlp_only_layers."""
    dense, step = raw.get("mlp_only_layers") or (), raw.get("decoder_sparse_step", 1)
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(raw["num_hidden_layers"]))


def expert_traits(raw: Mapping[str, Any], size: int, is_sparse: tuple[bool, ...]) -> ExpertTraits:
    """size: of each expert."""
    return ExpertTraits(
        is_sparse=is_sparse,
        num_experts=expert_count(raw),
        top_k=raw["num_experts_per_tok"],
        intermediate_size=size,
        renormalises=raw.get("norm_topk_prob", False),
    )
