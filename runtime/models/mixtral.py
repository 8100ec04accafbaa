"""Mixtral (Jiang et al. 2024): Mistral with experts in place of the MLP."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..model_config import DecoderTraits, ExpertNames, ExpertTraits
from .mistral import mistral_traits
from .traits import expert_count


def mixtral_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    experts = ExpertTraits(
        is_sparse=(True,) * raw["num_hidden_layers"],
        num_experts=expert_count(raw),
        top_k=raw["num_experts_per_tok"],
        intermediate_size=raw["intermediate_size"],
        names=ExpertNames(block="block_sparse_moe", single=("w1", "w3", "w2")),
    )
    return dataclasses.replace(mistral_traits(raw), experts=experts)
