"""Hybrids of real shapes with random weights: as a Hugging Face folder, and as the GGUF file that llama.cpp loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common.gguf_files import add_tokenizer
from benchmarks.common.models import save_random_model, write_tokenizer
from benchmarks.peers.models import SPECIAL, fresh

LFM2_350M: dict[str, Any] = {
    "model_type": "lfm2",
    "vocab_size": 65536,
    "hidden_size": 1024,
    "block_ff_dim": 6656,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "conv_L_cache": 3,
    "block_dim": 1024,
    "conv_dim": 1024,
    "max_position_embeddings": 128000,
    "tie_word_embeddings": True,
    "initializer_range": 0.06,
}
"""LFM2-350M: ten layers of gated short convolutions, six of attention; 354 M parameters.

With weights as small as usual, a random model repeats the last token of its prompt."""

LFM2_75M = LFM2_350M | {
    "vocab_size": 8192,
    "hidden_size": 512,
    "block_dim": 512,
    "conv_dim": 512,
    "block_ff_dim": 3328,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
"""The same layers, half as wide: 75 M parameters."""

LFM2_TINY = LFM2_350M | {
    "vocab_size": 512,
    "hidden_size": 128,
    "block_dim": 128,
    "conv_dim": 128,
    "block_ff_dim": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "block_multiple_of": 32,
}
"""For a check that everything runs. (vLLM computes no heads with fewer than 32 dimensions on a CPU.)"""

SHAPES = {"lfm2-350m": LFM2_350M, "lfm2-75m": LFM2_75M, "lfm2-tiny": LFM2_TINY}


def make_hybrid(name: str, work: Path) -> Path:
    """The Hugging Face folder of a shape, float32, with ``model.gguf`` in it; created once."""
    folder = work / "models" / name
    if not folder.exists():
        part = fresh(folder)
        save_random_model(part, SHAPES[name] | SPECIAL)
        write_tokenizer(part, SHAPES[name]["vocab_size"])
        write_gguf(part, part / "model.gguf")
        part.rename(folder)
    return folder


def write_gguf(folder: Path, file: Path) -> None:
    """The float32 weights of an LFM2 under llama.cpp's names, with the tokenizer that `write_tokenizer` writes."""
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    tensors = load_file(folder / "model.safetensors")
    ff_dim = len(tensors["model.layers.0.feed_forward.w1.weight"])
    heads = [config["num_key_value_heads"] * (kind == "full_attention") for kind in config["layer_types"]]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LFM2, layers)

    writer = gguf.GGUFWriter(file, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.LFM2])
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(hidden)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(ff_dim)
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(heads)  # 0 where a layer has a convolution
    writer.add_layer_norm_rms_eps(config["norm_eps"])
    writer.add_rope_freq_base(float(config["rope_parameters"]["rope_theta"]))
    writer.add_shortconv_l_cache(config["conv_L_cache"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    add_tokenizer(writer, folder)
    for name, tensor in tensors.items():
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if theirs is None:
            raise ValueError(f"llama.cpp's LFM2 has no tensor for {name}")
        if ".conv.conv." in name:
            tensor = tensor.squeeze(1)  # [channels, 1, window]
        writer.add_tensor(theirs, np.ascontiguousarray(tensor))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
