"""The formats: how each is loaded, and the goal of its perplexity."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.runtime.config import ModelArgs

REFERENCE = "float32"


@dataclass(frozen=True)
class Format:
    """settings: fields of ModelArgs beside the model. file: type of the GGUF file that is loaded in place of the
    folder. by_llama_cpp: llama.cpp computes. goal: percent that its perplexity may be above that of float32."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    file: str = ""
    by_llama_cpp: bool = False
    goal: float | None = None

    def unknown_settings(self) -> list[str]:
        """Settings that this version does not have."""
        known = {each.name for each in dataclasses.fields(ModelArgs)}
        return [name for name in self.settings if name not in known]


def int_of(bits: int) -> dict[str, Any]:
    return {"dtype": "float32", "quantization": f"int{bits}"}


GGUF_TYPES = ("Q8_0", "Q4_0", "Q4_K_M")
FORMATS = {
    each.name: each
    for each in (
        Format(REFERENCE, {"dtype": "float32"}),
        Format("bfloat16", {"dtype": "bfloat16"}),
        Format("int8", int_of(8), goal=0.3),
        Format("int4", int_of(4), goal=4.0),
        Format("fp8", {"dtype": "float32", "quantization": "fp8"}),
        Format("int8, KV int8", int_of(8) | {"kv_cache_dtype": "int8"}),
        *(Format(f"GGUF {kind}", {"dtype": "float32"}, file=kind) for kind in GGUF_TYPES),
        *(Format(f"llama.cpp {kind}", file=kind, by_llama_cpp=True) for kind in ("F32", *GGUF_TYPES)),
    )
}


def gguf_path(work: Path, kind: str) -> Path:
    return work / f"{kind}.gguf"
