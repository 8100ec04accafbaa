"""Qwen3, dense (Yang et al. 2025): RMSNorm on each head of q and k instead of Qwen2's bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..model_config import DecoderTraits
from .traits import windows_by_layer_type


def qwen3_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    bias = raw.get("attention_bias", False)
    return DecoderTraits(layer_windows=windows_by_layer_type(raw), qkv_bias=bias, o_bias=bias, qk_norm=True)
