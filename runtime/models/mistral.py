"""Mistral (Jiang et al. 2023): Llama without biases; one sliding window for all layers, if any."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..model_config import DecoderTraits


def mistral_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    return DecoderTraits(layer_windows=(raw.get("sliding_window"),) * raw["num_hidden_layers"])
