"""Llama 2 and 3.x (Touvron et al. 2023, Dubey et al. 2024): the plain decoder. attention_bias covers q, k, v and o."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..model_config import DecoderTraits
from .traits import full_attention


def llama_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    bias = raw.get("attention_bias", False)
    return DecoderTraits(
        layer_windows=full_attention(raw), qkv_bias=bias, o_bias=bias, mlp_bias=raw.get("mlp_bias", False)
    )
