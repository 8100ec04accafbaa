"""Models whose layers with states are Mamba 2 (`mamba2.py`).

Bamba (IBM 2024) and Granite 4 H (IBM 2025) have attention in a few layers. In Falcon-H1 (Zuo et al. 2025) each layer
has both, side by side. In Nemotron-H (NVIDIA 2025) a layer is either of them, or an MLP. Mamba 2 itself (Dao and Gu
2024) has nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..model_config import DecoderTraits, Mamba2Traits, Mixer, NormNames
from .granite import granite_moe_traits, granite_traits
from .traits import FULL, UnsupportedVariant, full_attention

ATTENTION = (FULL, "attention")
"""Names of such layers, older files' included."""


def bamba_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    layers, full = range(raw["num_hidden_layers"]), raw.get("attn_layer_indices") or ()
    bias = raw.get("attention_bias", False)
    return DecoderTraits(
        layer_windows=full_attention(raw),
        mixers=tuple(Mixer.ATTENTION if layer in full else Mixer.RECURRENT for layer in layers),
        recurrent=_mamba(raw),
        recurrent_name="mamba",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=raw.get("mlp_bias", False),
        partial_rotary=0.5,
        mlp_name="feed_forward",
        norms=NormNames(before_mlp="pre_ff_layernorm"),
        renames=(("model.norm.", "model.final_layernorm."),),
    )


def granite_hybrid_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Without experts, the MLP that all tokens use is the only one."""
    return dict(raw) if raw.get("num_local_experts") else {**raw, "intermediate_size": raw["shared_intermediate_size"]}


def granite_hybrid_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    shared, layers = "shared_mlp", raw["num_hidden_layers"]
    kinds = raw.get("layer_types") or raw.get("layers_block_type") or ["mamba"] * layers
    rotates = raw.get("position_embedding_type") == "rope"
    traits = granite_moe_traits(raw) if raw.get("num_local_experts") else granite_traits(raw)
    experts, renames = traits.experts, ()
    if experts is not None:
        block = experts.names.block
        names = dataclasses.replace(experts.names, shared=shared)
        experts = dataclasses.replace(experts, shared_size=raw["shared_intermediate_size"], names=names)
        renames = ((f".{block}.{shared}.", f".{shared}."),)
    return dataclasses.replace(
        traits,
        mixers=tuple(Mixer.ATTENTION if kind in ATTENTION else Mixer.RECURRENT for kind in kinds),
        recurrent=_mamba(raw),
        recurrent_name="mamba",
        rotates=(rotates,) * layers,
        has_fused_gate_up=True,
        mlp_name=shared,
        experts=experts,
        renames=(
            *renames,
            (f".{shared}.gate_up_proj.", f".{shared}.input_linear."),
            (f".{shared}.down_proj.", f".{shared}.output_linear."),
        ),
    )


def falcon_h1_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    layers, bias = raw["num_hidden_layers"], raw.get("attention_bias", False)
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    mamba = dataclasses.replace(
        _mamba(raw),
        out_bias=raw.get("projectors_bias", False),
        norm_groups=raw.get("mamba_n_groups", 1) if raw.get("mamba_rms_norm", False) else 0,
        norms_first=raw.get("mamba_norm_before_gate", True),
        input_scale=raw.get("ssm_in_multiplier", 1.0),
        part_scales=tuple(raw.get("ssm_multipliers") or (1.0,) * 5),
        output_scale=raw.get("ssm_out_multiplier", 1.0),
    )
    gate, down = raw.get("mlp_multipliers") or (1.0, 1.0)
    return DecoderTraits(
        layer_windows=full_attention(raw),
        mixers=(Mixer.BOTH,) * layers,
        recurrent=mamba,
        recurrent_name="mamba",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=raw.get("mlp_bias", False),
        # Keys have a factor. It may as well be one of the scores.
        attention_scale=head_dim**-0.5 * raw.get("key_multiplier", 1.0),
        attention_input_scale=raw.get("attention_in_multiplier", 1.0),
        attention_output_scale=raw.get("attention_out_multiplier", 1.0),
        mlp_scales=(gate, down),
        embedding_multiplier=raw.get("embedding_multiplier", 1.0),
        logit_multiplier=raw.get("lm_head_multiplier", 1.0),
        mlp_name="feed_forward",
        norms=NormNames(before_mlp="pre_ff_layernorm"),
        renames=(("model.norm.", "model.final_layernorm."),),
    )


BLOCKS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
"""Letters of Nemotron-H's hybrid_override_pattern."""


def nemotron_h_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the keys that other architectures have."""
    blocks = raw.get("layers_block_type") or raw.get("layer_types")
    blocks = blocks or [BLOCKS[letter] for letter in raw["hybrid_override_pattern"]]
    changes = {
        "layers_block_type": blocks,
        "num_hidden_layers": len(blocks),
        "rms_norm_eps": raw.get("layer_norm_epsilon", 1e-5),
    }
    return {**raw, **changes}


def nemotron_h_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    """Raises UnsupportedVariant for experts, which have no gate there."""
    blocks = raw["layers_block_type"]
    if "moe" in blocks:
        raise UnsupportedVariant("experts of Nemotron-H have no gate")
    kinds = dict.fromkeys(ATTENTION, Mixer.ATTENTION) | {"mlp": Mixer.NONE}
    bias = raw.get("attention_bias", False)
    return DecoderTraits(
        layer_windows=full_attention(raw),
        mixers=tuple(kinds.get(block, Mixer.RECURRENT) for block in blocks),
        has_mlp=tuple(block == "mlp" for block in blocks),
        recurrent=Mamba2Traits(
            heads=raw["mamba_num_heads"],
            head_size=raw["mamba_head_dim"],
            groups=raw.get("n_groups", raw.get("mamba_n_groups", 8)),
            state_size=raw["ssm_state_size"],
            kernel=raw.get("conv_kernel", raw.get("mamba_d_conv", 4)),
            bias=raw.get("mamba_proj_bias", False),
            out_bias=raw.get("use_bias", False),
            conv_bias=raw.get("use_conv_bias", raw.get("mamba_conv_bias", True)),
            limits=(raw.get("time_step_min", raw.get("mamba_dt_min", 0.001)), float("inf")),
            norm_groups=raw.get("n_groups", raw.get("mamba_n_groups", 8)),
        ),
        recurrent_name="mixer",
        rotates=(False,) * len(blocks),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=raw.get("mlp_bias", False),
        plain_mlp=raw.get("mlp_hidden_act", "relu2"),
        mlp_name="mixer",
        norms=NormNames(before_attention="norm", before_mlp="norm"),
        renames=((".self_attn.", ".mixer."),),
    )


def mamba2_config(raw: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with the keys that other architectures have; there is no attention, and no MLP."""
    changes = {
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 2,
        "mamba_head_dim": raw["head_dim"],
        "intermediate_size": raw["hidden_size"],
        "rms_norm_eps": raw.get("layer_norm_epsilon", 1e-5),
    }
    return {**raw, **changes}


def mamba2_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    layers, bias = raw["num_hidden_layers"], raw.get("use_bias", False)
    return DecoderTraits(
        layer_windows=full_attention(raw),
        mixers=(Mixer.RECURRENT,) * layers,
        has_mlp=(False,) * layers,
        recurrent=Mamba2Traits(
            heads=raw["num_heads"],
            head_size=raw["mamba_head_dim"],
            groups=raw["n_groups"],
            state_size=raw["state_size"],
            kernel=raw.get("conv_kernel", 4),
            bias=bias,
            out_bias=bias,
            conv_bias=raw.get("use_conv_bias", True),
            limits=_limits(raw),
            norm_groups=raw["n_groups"],
        ),
        recurrent_name="mixer",
        rotates=(False,) * layers,
        norms=NormNames(before_attention="norm"),
    )


def _mamba(raw: Mapping[str, Any]) -> Mamba2Traits:
    """As Bamba, Granite and Falcon-H1 name its sizes."""
    width = raw.get("mamba_d_ssm") or raw.get("mamba_expand", 2) * raw["hidden_size"]
    heads, size = raw["mamba_n_heads"], raw.get("mamba_d_head", "auto")
    bias, groups = raw.get("mamba_proj_bias", False), raw.get("mamba_n_groups", 1)
    return Mamba2Traits(
        heads=heads,
        head_size=width // heads if size in ("auto", None) else size,
        groups=groups,
        state_size=raw["mamba_d_state"],
        kernel=raw.get("mamba_d_conv", 4),
        bias=bias,
        out_bias=bias,
        conv_bias=raw.get("mamba_conv_bias", True),
        limits=_limits(raw),
        norm_groups=groups,
    )


def _limits(raw: Mapping[str, Any]) -> tuple[float, float]:
    """time_step_limit; transformers writes an infinity as an object."""
    given = raw.get("time_step_limit") or (0.0, float("inf"))
    least, most = (float(limit["__float__"]) if isinstance(limit, Mapping) else float(limit) for limit in given)
    return least, most
