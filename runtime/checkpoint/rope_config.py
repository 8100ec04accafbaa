"""Reads the rotary embedding of each layer from config.json. No torch.

Both spellings are read: `rope_parameters` of transformers 5, one for all layers or one per kind of layer, and the older
`rope_theta`, `rope_scaling` and `rope_local_base_freq`.

dynamic: transformers stretches frequencies once a sequence is longer than max_position_embeddings. Baton serves none
that is longer, so it is the same as default. longrope has two sets of factors. transformers decides by the length of
what it is computing, so that the keys of a growing sequence are of both sets; a cache that is shared by sequences of
all lengths cannot do that. Baton decides by the longest sequence it serves: up to original_max_position_embeddings
(lower --context-length to that) the short factors, beyond it the long ones, for every token. So it equals transformers
where the context length does not exceed the original one, and for prompts that do.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..model_config import DecoderTraits, RopeConfig
from .model_files import ModelLoadError, UnsupportedModelError

SUPPORTED = "default, linear, dynamic, llama3, yarn and longrope"
FULL = "full_attention"


def layer_ropes(
    raw: Mapping[str, Any],
    traits: DecoderTraits,
    *,
    head_dim: int,
    max_positions: int,
    context_length: int,
    source: str,
) -> tuple[RopeConfig | None, ...]:
    """The rotary embedding of each layer; None for layers without one. Raises ModelLoadError."""

    def read(parameters: Mapping[str, Any]) -> RopeConfig:
        partial = parameters.get("partial_rotary_factor") or raw.get("partial_rotary_factor")
        if traits.latent is not None:  # it says how much of a head is rotated, and head_dim is of that part
            partial = 1
        if traits.partial_rotary is None and partial not in (None, 1):
            raise UnsupportedModelError(
                f"{source}: partial_rotary_factor {partial}: this architecture rotates whole heads"
            )
        partial = float(partial or traits.partial_rotary or 1)
        try:
            return _read_rope(parameters, partial, raw, head_dim, max_positions, context_length, source)
        except KeyError as missing:
            kind = parameters.get("rope_type") or parameters.get("type")
            raise ModelLoadError(f"{source}: rope scaling {kind!r} has no {missing}") from None

    parameters = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rotates = traits.rotates or (True,) * len(traits.layer_windows)
    kinds = traits.layer_kinds
    if any(isinstance(value, Mapping) for value in parameters.values()):
        if absent := sorted(set(kinds) - set(parameters)) or (not kinds and [FULL]):
            raise UnsupportedModelError(
                f"{source}: rope_parameters per layer type: {', '.join(sorted(parameters))}, but this architecture "
                f"needs {', '.join(absent)}"
            )
        by_kind = {kind: read(parameters[kind]) for kind in set(kinds)}
    else:
        by_kind = dict.fromkeys(kinds or [FULL], read(parameters))
        if set(kinds) - {FULL} and not raw.get("rope_parameters"):  # older files: scaling is for full attention
            local = {"rope_theta": raw.get("rope_local_base_freq") or raw.get("rope_theta")}
            by_kind |= dict.fromkeys(set(kinds) - {FULL}, read(local))
    kinds = kinds or (FULL,) * len(rotates)
    return tuple(by_kind[kind] if turns else None for kind, turns in zip(kinds, rotates, strict=True))


def _read_rope(
    parameters: Mapping[str, Any],
    partial: float,
    raw: Mapping[str, Any],
    head_dim: int,
    max_positions: int,
    context_length: int,
    source: str,
) -> RopeConfig:
    """One rotary embedding. Raises KeyError for a missing parameter, ModelLoadError for a wrong one."""
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    theta = float(parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    size = int(head_dim * partial)
    if not 0 < size <= head_dim or size % 2:
        raise ModelLoadError(
            f"{source}: partial_rotary_factor {partial} rotates {size} of {head_dim} coordinates of a head; it must be "
            "an even number"
        )
    if rope_type in ("default", "dynamic"):
        return RopeConfig(theta=theta, partial=partial)
    original = int(
        parameters.get("original_max_position_embeddings")
        or raw.get("original_max_position_embeddings")
        or max_positions
    )
    if rope_type == "linear":
        return RopeConfig(theta=theta, partial=partial, rope_type="linear", factor=float(parameters["factor"]))
    if rope_type == "llama3":
        return RopeConfig(
            theta=theta,
            partial=partial,
            rope_type="llama3",
            factor=float(parameters["factor"]),
            low_freq_factor=float(parameters["low_freq_factor"]),
            high_freq_factor=float(parameters["high_freq_factor"]),
            original_max_position_embeddings=original,
        )
    if rope_type == "yarn":
        factor = float(parameters.get("factor") or max_positions / original)
        return RopeConfig(
            theta=theta,
            partial=partial,
            rope_type="yarn",
            factor=factor,
            original_max_position_embeddings=original,
            attention_factor=_yarn_attention_factor(parameters, factor),
            beta_fast=float(parameters.get("beta_fast") or 32),
            beta_slow=float(parameters.get("beta_slow") or 1),
            truncate=bool(parameters.get("truncate", True)),
        )
    if rope_type in ("longrope", "su"):
        factors = tuple(map(float, parameters["long_factor" if context_length > original else "short_factor"]))
        if len(factors) != size // 2:
            raise ModelLoadError(
                f"{source}: longrope has {len(factors)} factors for {size // 2} pairs of rotated coordinates"
            )
        factor = float(parameters.get("factor") or max_positions / original)
        scaled = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        return RopeConfig(
            theta=theta,
            partial=partial,
            rope_type="longrope",
            factors=factors,
            original_max_position_embeddings=original,
            attention_factor=float(parameters.get("attention_factor") or scaled),
        )
    raise UnsupportedModelError(f"{source}: rope scaling {rope_type!r} is not supported; supported are {SUPPORTED}")


def _yarn_attention_factor(parameters: Mapping[str, Any], factor: float) -> float:
    """As given, or the paper's 0.1 ln(factor) + 1, which mscale and mscale_all_dim change (DeepSeek)."""
    if parameters.get("attention_factor") is not None:
        return float(parameters["attention_factor"])

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    over, under = parameters.get("mscale"), parameters.get("mscale_all_dim")
    return scale(over) / scale(under) if over and under else scale(1.0)
