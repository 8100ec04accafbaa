"""gpt-oss (OpenAI 2025): attention sinks, windows in every other layer, biases, experts with a clamped SwiGLU. Its own
checkpoints hold experts in MXFP4, which are widened when they are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..model_config import Choice, DecoderTraits, ExpertNames, ExpertTraits
from .traits import expert_count, layer_kinds, windows_of


def gpt_oss_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    bias = raw.get("attention_bias", True)
    return DecoderTraits(
        layer_windows=windows_of(raw, layer_kinds(raw, full_every=2)),
        qkv_bias=bias,
        o_bias=bias,
        has_sinks=True,
        experts=ExpertTraits(
            is_sparse=(True,) * raw["num_hidden_layers"],
            num_experts=expert_count(raw),
            top_k=raw["num_experts_per_tok"],
            intermediate_size=raw["intermediate_size"],
            choice=Choice.LOGITS,
            has_bias=True,
            clamp=(raw.get("swiglu_alpha", 1.702), raw.get("swiglu_limit", 7.0)),
            names=ExpertNames(
                router="router",
                router_bias=True,
                packed=("experts.gate_up_proj", "experts.down_proj"),
                is_transposed=True,
            ),
        ),
    )
