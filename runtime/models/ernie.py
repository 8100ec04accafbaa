"""ERNIE 4.5 (Baidu 2025): Llama that rotates neighbouring coordinates; the larger models have experts."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..model_config import DecoderTraits, ExpertNames, ExpertTraits
from .traits import expert_count, full_attention


def ernie4_5_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    bias = raw.get("use_bias", False)
    return DecoderTraits(
        layer_windows=full_attention(raw),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        is_interleaved=True,
        ties_by_default=True,
    )


def ernie4_5_moe_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    layers, size = raw["num_hidden_layers"], raw["moe_intermediate_size"]
    first, last = raw.get("moe_layer_start_index", 1), raw.get("moe_layer_end_index", -1)
    last = layers - 1 if last == -1 else last
    interval, shared = raw.get("moe_layer_interval", 1), raw.get("moe_num_shared_experts", 2)
    experts = ExpertTraits(
        is_sparse=tuple((layer + 1) % interval == 0 and first <= layer <= last for layer in range(layers)),
        num_experts=expert_count(raw),
        top_k=raw.get("moe_k") or raw["num_experts_per_tok"],
        intermediate_size=size,
        shared_size=size * shared,
        routes_in_float32=True,
        names=ExpertNames(
            shared="shared_experts" if shared else None,
            correction="moe_statics.e_score_correction_bias",
            correction_is_row=True,
        ),
    )
    return dataclasses.replace(ernie4_5_traits(raw), experts=experts)
