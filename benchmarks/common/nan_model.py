"""The toy model, with weights that give NaN for one token."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.common.models import TOY_MODEL


def write_nan_model(folder: Path, token_id: int) -> Path:
    """A copy in ``folder``; every sequence that contains the token gives NaN from there on."""
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOY_MODEL / name, folder / name)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    weights = load_file(TOY_MODEL / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["model.embed_tokens.weight"][token_id] = torch.nan
    save_file(weights, folder / "model.safetensors")
    return folder
