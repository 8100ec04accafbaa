"""EXAONE 4.0 (LG AI Research 2025): norms behind attention and MLP, none before them; norms of each head of q and k.
Where some layers have a window, the others do not rotate q and k."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..model_config import DecoderTraits
from .olmo import BEHIND
from .traits import SLIDING, full_attention, windows_of


def exaone4_traits(raw: Mapping[str, Any]) -> DecoderTraits:
    if raw.get("sliding_window") is None:
        return DecoderTraits(layer_windows=full_attention(raw), qk_norm=True, norms=BEHIND)
    kinds = tuple(raw["layer_types"])
    return DecoderTraits(
        layer_windows=windows_of(raw, kinds),
        rotates=tuple(kind == SLIDING for kind in kinds),
        qk_norm=True,
        norms=BEHIND,
    )
