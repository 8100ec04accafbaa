"""Phi-3 and Phi-4 (Abdin et al. 2024): q, k and v in one matrix, gate and up in one; part of a head may be rotated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..model_config import DecoderTraits
from .traits import one_window


def phi3_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    return DecoderTraits(layer_windows=one_window(raw), partial_rotary=1.0, has_fused_qkv=True, has_fused_gate_up=True)
