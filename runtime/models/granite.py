"""Granite 3 and 4 (IBM 2024): Llama with factors for embeddings, residuals, scores and logits. GraniteMoe
has experts in place of the MLP."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..model_config import Choice, DecoderTraits, ExpertNames, ExpertTraits
from .traits import expert_count, full_attention


def granite_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    bias = raw.get("attention_bias", False)
    return DecoderTraits(
        layer_windows=full_attention(raw),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=raw.get("mlp_bias", False),
        embedding_multiplier=raw.get("embedding_multiplier", 1.0),
        residual_multiplier=raw.get("residual_multiplier", 1.0),
        attention_scale=raw.get("attention_multiplier", 1.0),
        logit_multiplier=1.0 / raw.get("logits_scaling", 1.0),
    )


def granite_moe_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    experts = ExpertTraits(
        is_sparse=(True,) * raw["num_hidden_layers"],
        num_experts=expert_count(raw),
        top_k=raw["num_experts_per_tok"],
        intermediate_size=raw["intermediate_size"],
        choice=Choice.LOGITS,
        names=ExpertNames(
            block="block_sparse_moe", router="router.layer", packed=("input_linear.weight", "output_linear.weight")
        ),
    )
    return dataclasses.replace(granite_traits(raw), experts=experts)
