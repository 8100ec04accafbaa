"""Granite 3 and 4, dense (IBM 2024): Llama with factors for embeddings, residuals, scores and logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..model_config import DecoderTraits
from .traits import full_attention


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
