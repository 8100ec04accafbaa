"""Decoders with latent attention (`latent_attention.py`).

DeepSeek-V2 (DeepSeek-AI 2024) has experts with softmax scores; DeepSeek-V3 and Kimi K2, which is the same architecture,
have sigmoids with a correction. GLM-4.7 Flash is DeepSeek-V3 with other names in its config, Mistral 4 has softmax
scores and queries scaled by their position, and Youtu and MiniCPM 3 (Hu et al. 2024) have no experts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..model_config import Choice, DecoderTraits, ExpertNames, ExpertTraits, LatentTraits
from .mistral import position_scale
from .traits import expert_count, full_attention

SHARED = "shared_experts"


def deepseek_v2_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    """Raises ValueError for a routing that DeepSeek-V2's own code does not have."""
    method = raw.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        raise ValueError(f"topk_method {method!r}: DeepSeek-V2 has greedy and group_limited_greedy")
    experts = _experts(
        raw,
        choice=Choice.SOFTMAX,
        renormalises=False,
        in_groups=method == "group_limited_greedy",
        group_best=1,
        names=ExpertNames(shared=SHARED),
    )
    return _latent_traits(raw, experts, is_interleaved=True, mlp_bias=raw.get("mlp_bias", False))


def deepseek_v3_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    return _latent_traits(raw, _experts(raw, choice=Choice.SIGMOID, names=_v3_names()))


def glm4_moe_lite_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    kinds = raw.get("mlp_layer_types")
    if kinds is None:
        first = raw.get("first_k_dense_replace", 1)
        kinds = ["sparse" if layer >= first else "dense" for layer in range(raw["num_hidden_layers"])]
    experts = _experts(
        raw,
        choice=Choice.SIGMOID,
        is_sparse=tuple(kind == "sparse" for kind in kinds),
        names=_v3_names(),
    )
    return _latent_traits(raw, experts)


def mistral4_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    return _latent_traits(
        raw,
        _experts(
            raw,
            choice=Choice.SOFTMAX,
            routes_in_float32=False,
            names=ExpertNames(shared=SHARED, packed=("experts.gate_up_proj", "experts.down_proj")),
        ),
        position_scale=position_scale(raw),
    )


def youtu_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    return _latent_traits(raw, None, ties_by_default=True)


def minicpm3_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    layers, hidden = raw["num_hidden_layers"], raw["hidden_size"]
    depth, base = raw.get("scale_depth", 1.4), raw.get("dim_model_base", 256)  # None: no factor
    return _latent_traits(
        dict(raw) | {"v_head_dim": raw.get("v_head_dim") or hidden // raw["num_attention_heads"]},
        None,
        is_interleaved=False,
        mlp_bias=raw.get("mlp_bias", False),
        embedding_multiplier=float(raw.get("scale_emb", 12)),
        residual_multiplier=1.0 if depth is None else depth / math.sqrt(layers),
        logit_multiplier=1.0 if base is None else base / hidden,
        ties_by_default=True,
    )


def _v3_names() -> ExpertNames:
    return ExpertNames(shared=SHARED, correction="gate.e_score_correction_bias")


def _experts(
    raw: Mapping[str, Any],
    *,
    choice: Choice,
    names: ExpertNames,
    is_sparse: tuple[bool, ...] | None = None,
    renormalises: bool | None = None,
    in_groups: bool = True,
    group_best: int = 2,
    routes_in_float32: bool = True,
) -> ExpertTraits:
    """is_sparse: None: layers from first_k_dense_replace on. renormalises: None: as norm_topk_prob says."""
    if raw.get("moe_layer_freq", 1) != 1:
        raise ValueError(
            f"moe_layer_freq {raw['moe_layer_freq']}: transformers ignores it, and all layers have experts"
        )
    if is_sparse is None:
        first = raw.get("first_k_dense_replace") or 0
        is_sparse = tuple(layer >= first for layer in range(raw["num_hidden_layers"]))
    size = raw["moe_intermediate_size"]
    return ExpertTraits(
        is_sparse=is_sparse,
        num_experts=expert_count(raw),
        top_k=raw["num_experts_per_tok"],
        intermediate_size=size,
        shared_size=size * raw["n_shared_experts"],
        choice=choice,
        renormalises=raw.get("norm_topk_prob", True) if renormalises is None else renormalises,
        weight_scale=raw.get("routed_scaling_factor", 1.0),
        num_groups=(raw.get("n_group") or 1) if in_groups else 1,
        top_groups=(raw.get("topk_group") or 1) if in_groups else 1,
        group_best=group_best,
        routes_in_float32=routes_in_float32,
        names=names,
    )


def _latent_traits(raw: Mapping[str, Any], experts: ExpertTraits | None, **others: Any) -> DecoderTraits:
    """others: further traits. Configs without rope_interleave rotate neighbouring coordinates."""

    def size(key: str) -> int:
        if raw.get(key) is None:
            raise KeyError(key)
        return raw[key]

    latent = LatentTraits(
        query_rank=raw.get("q_lora_rank"),
        latent_size=size("kv_lora_rank"),
        plain_size=size("qk_nope_head_dim"),
        rotary_size=size("qk_rope_head_dim"),
        value_size=size("v_head_dim"),
    )
    bias = raw.get("attention_bias", False)
    given: dict[str, Any] = {
        "layer_windows": full_attention(raw),
        "experts": experts,
        "latent": latent,
        "qkv_bias": bias,
        "o_bias": bias,
        "is_interleaved": raw.get("rope_interleave", True),
        "attention_scale": _scale(raw, latent),
    }
    return DecoderTraits(**(given | others))


def _scale(raw: Mapping[str, Any], latent: LatentTraits) -> float:
    """YaRN (Peng et al. 2023) sharpens the softmax, too: by the square of its factor over all coordinates."""
    scale = (latent.plain_size + latent.rotary_size) ** -0.5
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    weight = rope.get("mscale_all_dim")
    if (rope.get("rope_type") or rope.get("type") or "default") == "default" or not weight:
        return scale
    factor = rope["factor"]
    return scale * (0.1 * weight * math.log(factor) + 1.0) ** 2 if factor > 1 else scale
