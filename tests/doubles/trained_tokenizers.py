"""Small tokenizers of both families that language models use, trained in a moment on a few lines."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and stops at the river. stop STOP\n### User: hello\n",
    "Ein Fluß, drei Äpfel, çava? naïve café — 你好，世界。こんにちは 世界 Привет мир 안녕하세요",
    "def main():\n    return [1, 2, 3]  # a comment\n\n\tprint('🙂🙂 👨‍👩‍👧')\n",
] * 4
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_end|>"]
CONFIG = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@functools.cache
def _byte_level_json() -> str:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["<think>", "<é ü>"])  # plain added tokens, one outside the byte alphabet
    return backend.to_str()


def byte_level() -> tokenizers.Tokenizer:
    """Byte-level BPE, as of Llama 3 and Qwen."""
    return tokenizers.Tokenizer.from_str(_byte_level_json())


@functools.cache
def _byte_fallback_json() -> str:
    """▁ for spaces and <0x..> tokens for characters outside the vocabulary, as of Llama 2 and Mistral."""
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=SPECIAL, limit_alphabet=60, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    content = json.loads(backend.to_str())
    vocab = content["model"]["vocab"]
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    content["model"]["byte_fallback"] = True
    backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return backend.to_str()


def byte_fallback() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(_byte_fallback_json())


@functools.cache
def _unigram_json() -> str:
    """A Unigram model with the Metaspace pre-tokenizer and decoder, as SentencePiece trains them."""
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    return backend.to_str()


def unigram() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(_unigram_json())


def write_folder(folder: Path, backend: tokenizers.Tokenizer, config: dict) -> Path:
    """tokenizer.json and tokenizer_config.json in ``folder``; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
