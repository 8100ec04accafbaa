"""The folder of a very small model that reads long prompts: a tokenizer trained on this project's documentation, the
ChatML template with tools, and a config for dummy weights."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "entrypoints" / "chat" / "bundled_templates" / "chatml_tools.jinja"
CONTEXT_LENGTH = 65536
_VOCAB_SIZE = 8192
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def write_small_model(folder: Path) -> Path:
    """Start it with ``--load-format dummy``."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE, special_tokens=_SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([path.read_text() for path in sorted((ROOT / "docs").glob("**/*.md"))], trainer)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE.read_text()}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "vocab_size": _VOCAB_SIZE,
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 1,
                "max_position_embeddings": CONTEXT_LENGTH,
                "rms_norm_eps": 1e-5,
                "rope_theta": 10000.0,
                "hidden_act": "silu",
                "eos_token_id": backend.token_to_id("<|im_end|>"),
                "torch_dtype": "float32",
            }
        )
    )
    return folder
