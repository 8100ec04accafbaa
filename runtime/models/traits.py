"""Helpers to read an architecture's traits from its config.json. No torch: the HTTP process reads configs too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ..model_config import DecoderTraits

TraitsReader = Callable[[Mapping[str, Any]], DecoderTraits]
"""Reads the traits from the parsed config.json. Raises KeyError for what is missing, ValueError for a variant that
cannot be served, UnsupportedVariant for one that transformers' code may compute."""

ConfigReader = Callable[[Mapping[str, Any]], dict[str, Any]]
"""Gives the parsed config.json the keys that other architectures have. Raises KeyError for what is missing."""

FULL, SLIDING = "full_attention", "sliding_attention"


class UnsupportedVariant(ValueError):
    """Baton's own code does not compute this variant of an architecture."""


def full_attention(raw: Mapping[str, Any]) -> tuple[None, ...]:
    """No layer has a window."""
    return (None,) * raw["num_hidden_layers"]


def windows_by_layer_type(raw: Mapping[str, Any]) -> tuple[int | None, ...]:
    """Qwen's rule: with use_sliding_window, the layers that layer_types names (older files: those from
    max_window_layers on) see sliding_window tokens."""
    num_layers, window = raw["num_hidden_layers"], raw.get("sliding_window")
    if not raw.get("use_sliding_window", False) or window is None:
        return full_attention(raw)
    layer_types = raw.get("layer_types")
    if layer_types is None:
        first = raw.get("max_window_layers", 28)
        return tuple(window if layer >= first else None for layer in range(num_layers))
    return tuple(window if kind == "sliding_attention" else None for kind in layer_types)


def layer_kinds(raw: Mapping[str, Any], *, full_every: int) -> tuple[str, ...]:
    """Per layer, FULL or SLIDING: as layer_types says, else every so many layers is a full one."""
    if raw.get("layer_types") is not None:
        return tuple(raw["layer_types"])
    return tuple(SLIDING if (layer + 1) % full_every else FULL for layer in range(raw["num_hidden_layers"]))


def windows_of(raw: Mapping[str, Any], kinds: tuple[str, ...]) -> tuple[int | None, ...]:
    """Layers of the kind SLIDING see sliding_window tokens, all others everything."""
    return tuple(raw["sliding_window"] if kind == SLIDING else None for kind in kinds)


def one_window(raw: Mapping[str, Any]) -> tuple[int | None, ...]:
    """All layers see sliding_window tokens, or everything if it is not set."""
    return (raw.get("sliding_window"),) * raw["num_hidden_layers"]


def expert_count(raw: Mapping[str, Any]) -> int:
    """Experts of a layer; each family has a name of its own for it, and transformers 5 writes another."""
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return next((raw[name] for name in names if raw.get(name) is not None), None) or raw[names[0]]
