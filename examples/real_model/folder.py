"""Writes the Hugging Face folder of a Llama that comes as a GGUF file."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tqdm import tqdm

from .gguf_file import GGUFError, GGUFFile
from .tokenizer import make_tokenizer, tokenizer_config
from .weights import HEAD, checkpoint_names, checkpoint_tensors

WEIGHTS, CONFIG = "model.safetensors", "config.json"
FILES = ("LICENSE", WEIGHTS, "tokenizer.json", "tokenizer_config.json", "generation_config.json", CONFIG)
"""In the order in which they are put in place. Without the last no loader takes the folder for a model."""


def is_whole(folder: Path) -> bool:
    """True if all files are there, and the weights have the length that they declare."""
    if not all((folder / name).is_file() for name in FILES):
        return False
    try:
        with safe_open(folder / WEIGHTS, framework="numpy"):
            return True
    except SafetensorError:
        return False


def write_folder(path: Path, licence: str, folder: Path) -> None:
    """Make the folder of the GGUF file at path. Each file is written elsewhere and then moved in: what is read in the
    folder is whole. Raises GGUFError."""
    gguf = GGUFFile(path)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
        written = Path(temporary)
        (written / "LICENSE").write_text(licence, encoding="utf-8")
        _write_json(written / CONFIG, model_config(gguf))
        _write_json(written / "generation_config.json", generation_config(gguf))
        _write_json(written / "tokenizer_config.json", tokenizer_config(gguf))
        make_tokenizer(gguf).save(str(written / "tokenizer.json"))
        _write_weights(gguf, written / WEIGHTS)
        (folder / CONFIG).unlink(missing_ok=True)
        for name in FILES:
            os.replace(written / name, folder / name)


def model_config(gguf: GGUFFile) -> dict[str, Any]:
    """config.json."""
    gguf.expect("general.architecture", "llama", "RMSNorm, rotary embeddings, SwiGLU")
    if scaling := [key for key in gguf.metadata_keys if key.startswith("llama.rope.scaling.")]:
        raise GGUFError(f"{', '.join(scaling)} in the metadata: only unscaled rotary embeddings are known here")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        # The values of 4-bit weights as they are: 16 bits would round them.
        "dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": gguf["llama.embedding_length"],
        "intermediate_size": gguf["llama.feed_forward_length"],
        "max_position_embeddings": gguf["llama.context_length"],
        "num_attention_heads": gguf["llama.attention.head_count"],
        "num_hidden_layers": gguf["llama.block_count"],
        "num_key_value_heads": gguf["llama.attention.head_count_kv"],
        "head_dim": gguf["llama.rope.dimension_count"],
        "rms_norm_eps": _short(gguf["llama.attention.layer_norm_rms_epsilon"]),
        "rope_parameters": {"rope_type": "default", "rope_theta": _short(gguf["llama.rope.freq_base"])},
        "tie_word_embeddings": HEAD not in gguf.tensor_names,
        "vocab_size": gguf["llama.vocab_size"],
        **_special_ids(gguf),
    }


def generation_config(gguf: GGUFFile) -> dict[str, Any]:
    """generation_config.json: where a model stops."""
    return _special_ids(gguf)


def _special_ids(gguf: GGUFFile) -> dict[str, int]:
    keys = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "pad_token_id": "padding_token_id"}
    return {name: gguf[f"tokenizer.ggml.{key}"] for name, key in keys.items()}


def _short(value: float) -> float:
    """The number that a float32 was written as: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _write_weights(gguf: GGUFFile, file: Path) -> None:
    count = len(checkpoint_names(gguf))
    tensors = dict(tqdm(checkpoint_tensors(gguf), total=count, desc="Dequantising", unit="tensor", disable=None))
    save_file(tensors, file, metadata={"format": "pt"})
    file.chmod(0o644)  # the library makes it its owner's alone


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
