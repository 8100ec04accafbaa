"""SmolLM3 (Bakouch et al. 2025): Llama that does not rotate q and k in every fourth layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..model_config import DecoderTraits
from .traits import full_attention, windows_of


def smollm3_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    bias, layers = raw.get("attention_bias", False), range(raw["num_hidden_layers"])
    rotates = raw.get("no_rope_layers")  # despite its name, 1 for those that rotate
    if rotates is None:
        interval = raw.get("no_rope_layer_interval", 4)
        rotates = [(layer + 1) % interval != 0 for layer in layers]
    has_windows = raw.get("use_sliding_window") and raw.get("layer_types") is not None
    return DecoderTraits(
        layer_windows=windows_of(raw, tuple(raw["layer_types"])) if has_windows else full_attention(raw),
        rotates=tuple(map(bool, rotates)),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=raw.get("mlp_bias", False),
        ties_by_default=True,
    )
