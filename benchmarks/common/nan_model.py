"""The toy model, with finite weights that give NaN for one token. (Weights that are not finite are refused.)

The token alone has a value in one coordinate, which the first layer's MLP multiplies beyond the largest float32:
infinities of both signs are then added. Nothing that comes before the MLP writes to that coordinate.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import load_file, save_file

from benchmarks.common.models import TOY_MODEL

COORDINATE, LARGE = 7, 3e38


def write_nan_model(folder: Path, token_id: int) -> Path:
    """A copy in ``folder``; every sequence that contains the token gives NaN from there on."""
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOY_MODEL / name, folder / name)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    weights = load_file(TOY_MODEL / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    embedding, layer = weights["model.embed_tokens.weight"], "model.layers.0"
    embedding[:, COORDINATE] = 0.0
    embedding[token_id] = 0.0
    embedding[token_id, COORDINATE] = 1.0
    weights[f"{layer}.self_attn.o_proj.weight"][COORDINATE] = 0.0
    weights[f"{layer}.post_attention_layernorm.weight"][COORDINATE] = 1.0
    for name in ("gate_proj", "up_proj"):
        weights[f"{layer}.mlp.{name}.weight"][:, COORDINATE] = LARGE
    save_file(weights, folder / "model.safetensors")
    return folder
