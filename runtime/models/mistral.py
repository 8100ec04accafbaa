"""Mistral (Jiang et al. 2023): Llama without biases; one sliding window for all layers, if any. Ministral has windows
per layer; Ministral 3 scales queries by their position, beyond the length of its pretraining."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..model_config import DecoderTraits, PositionScale
from .traits import layer_kinds, one_window, windows_of


def mistral_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    return DecoderTraits(layer_windows=one_window(raw))


def ministral_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    if raw.get("sliding_window") is None:
        return DecoderTraits(layer_windows=one_window(raw))
    never_full = raw["num_hidden_layers"] + 1
    return DecoderTraits(layer_windows=windows_of(raw, layer_kinds(raw, full_every=never_full)))


def ministral3_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    return DecoderTraits(layer_windows=one_window(raw), position_scale=position_scale(raw))


def position_scale(raw: Mapping[str, Any]) -> PositionScale | None:
    """That of Ministral 3 and Mistral 4, which is part of the rotary embedding's parameters."""
    rope = raw.get("rope_parameters") or {}
    beta, length = rope.get("llama_4_scaling_beta"), rope.get("original_max_position_embeddings")
    return PositionScale(beta=float(beta), length=int(length)) if beta and length else None
