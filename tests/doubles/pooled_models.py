"""Tiny random models that embed, score and classify, with tokenizers, in the files of their releases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tokenizers
from safetensors.torch import load_file, save_file
from tokenizers import processors

from tests.doubles.byte_tokenizer import write_byte_tokenizer
from tests.doubles.tiny_models import make_reference

WORDS = ("yes", "no", "<|im_start|>", "<|im_end|>", "<pad>")
"""Tokens beside the 257 of the byte tokenizer."""

VOCAB = 257 + len(WORDS)

QWEN_TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
"""As Qwen3 writes a chat whose answer comes without thoughts."""

SIZES = {"vocab_size": VOCAB, "head_dim": 16, "max_position_embeddings": 2048}


def write_tokenizer(folder: Path, *, ends: bool = False) -> Path:
    """ends: each text ends in <eos>, as those of Qwen3-Embedding do."""
    write_byte_tokenizer(folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens(list(WORDS[:2]))
    backend.add_special_tokens([tokenizers.AddedToken(word, special=True) for word in WORDS[2:]])
    if ends:
        backend.post_processor = processors.TemplateProcessing(
            single="$A <eos>", pair="$A <eos> $B:1 <eos>:1", special_tokens=[("<eos>", 256)]
        )
    backend.save(str(folder / "tokenizer.json"))
    config = {
        "eos_token": "<eos>", "pad_token": "<pad>", "chat_template": QWEN_TEMPLATE,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }  # fmt: skip
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def write_language_model(folder: Path) -> Any:
    """A causal reranker: any language model whose chat template and words fit."""
    write_tokenizer(folder)
    reference = make_reference("Qwen3", SIZES, initializer_range=0.1)
    reference.save_pretrained(folder)
    return reference


def write_embedder(folder: Path, *, pooling: str = "lasttoken", normalizes: bool = True) -> Any:
    """As sentence-transformers saves it: without a head that the config does not tie, names without a prefix."""
    write_tokenizer(folder, ends=True)
    reference = make_reference("Qwen3", SIZES)
    reference.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name != "lm_head.weight"},
        folder / "model.safetensors",
    )
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalizes else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(kinds, paths))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({f"pooling_mode_{pooling}": True}))
    return reference


def write_classifier(folder: Path, num_labels: int, **changes: Any) -> Any:
    """A cross-encoder if there is one label."""
    write_tokenizer(folder, ends=True)
    labels = {"num_labels": num_labels, "id2label": {i: f"class {i}" for i in range(num_labels)}}
    reference = make_reference(
        "Qwen3", SIZES | labels | changes, architecture="Qwen3ForSequenceClassification", pad_token_id=VOCAB - 1
    )
    reference.save_pretrained(folder)
    return reference
