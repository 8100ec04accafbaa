"""What a token, and a sequence's recurrent state, take in memory, from a model's config.json.

The server's own code says it of models with recurrent states or sliding windows, which Baton must therefore have code
for. Of all others with K and V, or a latent that Baton keeps as it is, in every layer, the file says enough; torch is
then not needed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...runtime.checkpoint.hf_config import parse_model_config
from ...runtime.checkpoint.model_files import ModelLoadError, UnsupportedModelError
from ...runtime.model_config import ModelConfig
from ...runtime.models.registry import ARCHITECTURES
from .model_size import ModelSize, ModelSizeError

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


_CONTRADICTIONS = (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RuntimeError)
"""Raised where numbers of a config do not fit together, by code that reads configs that people have loaded."""


def read_model_size(folder: Path) -> ModelSize:
    """Raises ModelSizeError."""
    config = _read_config(folder)
    try:
        size = _served_size(config)
    except UnsupportedModelError:
        size = None  # the size of its KV may be plain all the same
    except ModelLoadError as error:
        raise ModelSizeError(f"--model {folder}: the server would not load it: {error}") from None
    except _CONTRADICTIONS as error:
        raise ModelSizeError(f"--model {folder}: config.json contradicts itself: {error}") from None
    if size is None:
        text = config.get("text_config")
        size = ModelSize(bytes_per_token=_plain_bytes(folder, config | (text if isinstance(text, dict) else {})))
    if size.bytes_per_token < 0:
        raise ModelSizeError(f"--model {folder}: config.json contradicts itself: tokens take less than nothing")
    return size


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelSizeError(f"--model {folder}: config.json cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelSizeError(f"--model {folder}: config.json is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelSizeError(f"--model {folder}: config.json is not a JSON object")
    return config


def _served_size(config: dict[str, Any]) -> ModelSize | None:
    """By the server's code; None for a model without code of Baton's own, or where all layers keep as much. Raises
    ModelLoadError, or one of `_CONTRADICTIONS`."""
    if not _has_own_code(config):
        return None
    served = parse_model_config(config)
    if not _is_uneven(served):
        return None
    from .served_size import served_size  # imports torch

    return served_size(served)


def _has_own_code(config: dict[str, Any]) -> bool:
    names = config.get("architectures")
    return isinstance(names, list) and any(isinstance(name, str) and name in ARCHITECTURES for name in names)


def _is_uneven(config: ModelConfig) -> bool:
    """True if layers differ in what they keep of a sequence."""
    traits = config.traits
    return traits.recurrent is not None or any(traits.layer_windows) or any(traits.layer_chunks) or bool(traits.mixers)


def _plain_bytes(folder: Path, config: dict[str, Any]) -> int:
    """Bytes of a token where every layer keeps as much."""
    otherwise = "; give --kv-bytes-per-token"
    keeps_latents = bool(config.get("kv_lora_rank")) and _has_own_code(config)
    for name, why in _OTHER_CACHES.items():
        if config.get(name) and not (keeps_latents and name == "kv_lora_rank"):
            raise ModelSizeError(f"--model {folder}: {name} in config.json: {why}{otherwise}")

    def need(*names: str) -> int:
        for name in names:
            if type(value := config.get(name)) is int and value > 0:
                return value
        raise ModelSizeError(f"--model {folder}: config.json has no {names[0]}{otherwise}")

    if keeps_latents:
        size = need("kv_lora_rank") + need("qk_rope_head_dim")
        return need("num_hidden_layers") * size * _dtype_bytes(config, folder)
    heads = need("num_key_value_heads", "num_attention_heads")
    if type(head_dim := config.get("head_dim")) is not int:
        head_dim = need("hidden_size") // need("num_attention_heads")
    return 2 * need("num_hidden_layers") * heads * head_dim * _dtype_bytes(config, folder)


_OTHER_CACHES = {
    "kv_lora_rank": "its attention keeps a compressed KV",
    "mamba_d_state": "not all of its layers keep K and V",
    "linear_num_key_heads": "not all of its layers keep K and V",
}


def _dtype_bytes(config: dict[str, Any], folder: Path) -> int:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPE_BYTES:
        raise ModelSizeError(f"--model {folder}: dtype {dtype} in config.json; give --kv-bytes-per-token")
    return DTYPE_BYTES[dtype]
