"""ERNIE 4.5 (Baidu 2025): Llama that rotates neighbouring coordinates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..model_config import DecoderTraits
from .traits import full_attention


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
