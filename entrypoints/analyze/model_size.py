"""The size of a token's KV in a model, from its config.json: for any architecture with K and V, or with a latent that
Baton keeps as it is, in every layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ...runtime.models.registry import ARCHITECTURES

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


class ModelSizeError(ValueError):
    """The size cannot be told from the file; the message says why."""


def kv_bytes_per_token(folder: Path) -> int:
    """Bytes of a token's K and V, or latent, in all layers, in the checkpoint's dtype. Raises ModelSizeError."""
    file = folder / "config.json"
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelSizeError(f"--model {folder}: config.json cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ModelSizeError(f"--model {folder}: config.json is not valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ModelSizeError(f"--model {folder}: config.json is not a JSON object")
    text = config.get("text_config")
    config |= text if isinstance(text, dict) else {}
    otherwise = "; give --kv-bytes-per-token"
    keeps_latents = bool(config.get("kv_lora_rank")) and any(
        name in ARCHITECTURES for name in config.get("architectures") or ()
    )
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
