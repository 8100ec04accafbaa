"""Qwen2 and Qwen2.5 (Yang et al. 2024): q, k and v always have a bias, o never; windows per layer, if switched on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..model_config import DecoderTraits
from .traits import windows_by_layer_type


def qwen2_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    return DecoderTraits(layer_windows=windows_by_layer_type(raw), qkv_bias=True)
