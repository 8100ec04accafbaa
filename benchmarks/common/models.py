"""Creates model folders for benchmarks: shapes with known speeds, with random weights.

`write_dummy_model` writes a config and a tokenizer, for engines that create random weights themselves (``load_format:
dummy``); `save_random_model` also writes weights, for comparisons with another engine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TOY_MODEL = Path(__file__).parents[2] / "examples" / "toy_model"
"""The trained model of the examples, for what needs a real tokenizer or a whole server."""

LLAMA_40M: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}
"""40.0 M parameters; the model of every CPU figure."""

QWEN2_500M: dict[str, Any] = {
    "model_type": "qwen2",
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}
"""Qwen2.5-0.5B: 494 M parameters."""

LLAMA_TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
"""For what is about bookkeeping: a step costs a millisecond or two."""


LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
"""Llama-3.1-8B, without the scaling of its rotary frequencies, which costs no time; the model of every GPU figure."""

SHAPES = {"llama-3.1-8b": LLAMA_8B, "llama-40m": LLAMA_40M, "llama-tiny": LLAMA_TINY}


def write_dummy_model(folder: Path, config: dict[str, Any]) -> None:
    """config.json and a tokenizer, no weights. ``config``: fields of a Llama."""
    defaults = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
    }
    whole = defaults | config
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(whole, indent=1))
    write_tokenizer(folder, config["vocab_size"])


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """A byte-level tokenizer: the first 128 tokens are ASCII, the others words of their own (``<00128>``, …).

    Any sequence of its ids decodes to text that encodes to the same ids, so that a client that sends text again sends
    the same tokens again. It cannot encode what is not ASCII.
    """
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    # Byte-level BPE stands the bytes that do not print for characters from U+0100 on, in order: 0 to 32, then 127.
    spare = iter(range(256, 512))
    characters = [chr(byte) if 33 <= byte < 127 else chr(next(spare)) for byte in range(128)]
    backend = tokenizers.Tokenizer(models.BPE(vocab={char: byte for byte, char in enumerate(characters)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    words = [tokenizers.AddedToken(f"<{i:05d}>", normalized=False, special=False) for i in range(128, vocab_size)]
    backend.add_tokens(words)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")


def save_random_model(folder: Path, config: dict[str, Any]) -> None:
    """Seeded random weights, biases included, saved by transformers. ``config``: fields of a Llama, or of what its
    ``model_type`` says."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**{"model_type": "llama"} | config))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(".bias"):
                weight.normal_(0, 0.02)
    model.save_pretrained(str(folder))
