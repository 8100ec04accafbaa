"""The text part of Llama 4 (Meta 2025). Most layers see chunks of the context and rotate q and k; the others see all of
it, rotate nothing, and scale queries by their position. An expert's input is multiplied by the sigmoid of its score."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..model_config import Choice, DecoderTraits, ExpertNames, ExpertTraits, PositionScale
from .traits import expert_count, full_attention

CHUNKED = "chunked_attention"
BLOCK = "feed_forward"


def llama4_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    layers = range(raw["num_hidden_layers"])
    interval = raw.get("no_rope_layer_interval", 4)
    rotates = tuple(map(bool, raw.get("no_rope_layers") or [(layer + 1) % interval for layer in layers]))
    kinds = raw.get("layer_types") or [CHUNKED if turns else "full_attention" for turns in rotates]
    chunk, size = raw.get("attention_chunk_size", 8192), raw["intermediate_size"]
    step = raw.get("interleave_moe_layer_step", 1)
    sparse = raw.get("moe_layers")
    sparse = range(step - 1, len(layers), step) if sparse is None else sparse
    tunes = raw.get("attn_temperature_tuning", True)
    return DecoderTraits(
        layer_windows=full_attention(raw),
        layer_chunks=tuple(chunk if kind == CHUNKED else None for kind in kinds),
        rotates=rotates,
        qkv_bias=raw.get("attention_bias", False),
        o_bias=raw.get("attention_bias", False),
        qk_unit_norm=raw.get("use_qk_norm", True),
        is_interleaved=True,
        mlp_name=BLOCK,
        dense_size=raw["intermediate_size_mlp"],
        experts=ExpertTraits(
            is_sparse=tuple(layer in sparse for layer in layers),
            num_experts=expert_count(raw),
            top_k=raw["num_experts_per_tok"],
            intermediate_size=size,
            shared_size=size,
            choice=Choice.GATES,
            names=ExpertNames(
                block=BLOCK,
                router="router",
                packed=("experts.gate_up_proj", "experts.down_proj"),
                is_transposed=True,
                shared="shared_expert",
            ),
        ),
        position_scale=PositionScale(
            beta=raw.get("attn_scale", 0.1),
            length=raw.get("floor_scale", 8192),
            offset=1,
            unrotated_only=True,
        )
        if tunes
        else None,
    )
