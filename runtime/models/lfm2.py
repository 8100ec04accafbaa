"""LFM2 (Liquid AI 2025): most layers are gated short convolutions, the others attention. LFM2-MoE has experts in all
but its first layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..model_config import Choice, DecoderTraits, ExpertNames, ExpertTraits, Mixer, NormNames, ShortConvTraits
from .traits import FULL, expert_count, full_attention

MLP = "feed_forward"


def lfm2_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the keys that other architectures have. The MLP may be smaller than it says: two thirds of it,
    rounded up to a multiple."""
    size = raw.get("block_ff_dim", raw.get("intermediate_size", 12288))
    if raw.get("block_auto_adjust_ff_dim", "num_experts" not in raw):
        multiple = raw.get("block_multiple_of", 256)
        size = int(raw.get("block_ffn_dim_multiplier", 1.0) * int(2 * size / 3))
        size = -(-size // multiple) * multiple
    changes = {
        "rms_norm_eps": raw.get("norm_eps", 1e-5),
        "intermediate_size": size,
        "tie_word_embeddings": raw.get("tie_embedding", raw.get("tie_word_embeddings", True)),
        "rope_theta": raw.get("rope_theta", 1e6),
    }
    return {**raw, **changes}


def lfm2_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    kinds = raw.get("layer_types")
    if kinds is None:
        layers = range(raw["num_hidden_layers"])
        full = raw.get("full_attn_idxs")
        kinds = [FULL if full is None or layer in full else "conv" for layer in layers]
    return DecoderTraits(
        layer_windows=full_attention(raw),
        mixers=tuple(Mixer.ATTENTION if kind == FULL else Mixer.RECURRENT for kind in kinds),
        recurrent=ShortConvTraits(kernel=raw.get("conv_L_cache", 3), bias=raw.get("conv_bias", False)),
        recurrent_name="conv",
        qk_norm=True,
        mlp_name=MLP,
        norms=NormNames(before_attention="operator_norm", before_mlp="ffn_norm"),
        renames=(
            (".self_attn.o_proj.", ".self_attn.out_proj."),
            (".self_attn.q_norm.", ".self_attn.q_layernorm."),
            (".self_attn.k_norm.", ".self_attn.k_layernorm."),
            (f".{MLP}.gate_proj.", f".{MLP}.w1."),
            (f".{MLP}.up_proj.", f".{MLP}.w3."),
            (f".{MLP}.down_proj.", f".{MLP}.w2."),
            ("model.norm.", "model.embedding_norm."),
        ),
    )


def lfm2_moe_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    dense = raw.get("num_dense_layers", 2)
    experts = ExpertTraits(
        is_sparse=tuple(layer >= dense for layer in range(raw["num_hidden_layers"])),
        num_experts=expert_count(raw),
        top_k=raw["num_experts_per_tok"],
        intermediate_size=raw["moe_intermediate_size"],
        choice=Choice.SIGMOID,
        renormalises=raw.get("norm_topk_prob", True),
        weight_scale=raw.get("routed_scaling_factor", 1.0),
        names=ExpertNames(
            block=MLP, single=("w1", "w3", "w2"), correction="expert_bias" if raw.get("use_expert_bias", True) else None
        ),
    )
    return dataclasses.replace(lfm2_traits(raw), experts=experts)
