"""Seed-OSS (ByteDance Seed 2025): Llama with separate switches for the biases of q, k, v and of o."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..model_config import DecoderTraits
from .traits import full_attention


def seed_oss_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    return DecoderTraits(
        layer_windows=full_attention(raw),
        qkv_bias=raw.get("attention_bias", True),
        o_bias=raw.get("attention_out_bias", False),
        mlp_bias=raw.get("mlp_bias", False),
    )
