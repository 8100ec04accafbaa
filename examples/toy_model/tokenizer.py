"""Trains the byte-level BPE tokenizer and writes it as Hugging Face files.

The words and two-digit numbers of the languages are single tokens, so that copying one is copying a token; every byte
has a token, so that any text can be encoded. The tokens of the chat format are special (hidden when decoded); thoughts
and item codes are not.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from .conversation import CHAT_TEMPLATE, ITEM_END, ITEM_START, THINK_END, THINK_START, TURN_END, TURN_START
from .make_data import conversations
from .recommendation_language import ADJECTIVES, NOUNS, item_tokens
from .words import CONFIGS, EXTENSIONS, FOLDERS, KEYS, SERVICES, STEMS, WORDS

TEXT_END = "<|endoftext|>"
SPECIAL_TOKENS = (TEXT_END, TURN_START, TURN_END)
VISIBLE_TOKENS = (THINK_START, THINK_END, ITEM_START, ITEM_END, *item_tokens())

CONTEXT_LENGTH = 2048
LEARNED_TOKENS = 1697
"""Bytes and merges; with the added tokens the vocabulary has 1,800 entries."""
WORD_COPIES = 30
"""How often each word stands in the training text besides the conversations: enough to become a token."""


def train_tokenizer(seed: int = 0, samples: int = 3000) -> Tokenizer:
    """Always the same for the same seed, sample count and languages."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=LEARNED_TOKENS,
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_plain_text(seed, samples), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in VISIBLE_TOKENS])
    return tokenizer


def _plain_text(seed: int, samples: int):
    """Conversations without the tokens that are added later, and each word alone, with and without a space before."""
    added = re.compile("|".join(re.escape(token) for token in (*SPECIAL_TOKENS, *VISIBLE_TOKENS)))
    for conversation in conversations(seed, samples):
        for message in conversation.messages:
            yield added.sub("\n", f"{message.role}\n{message.content}")
    numbers = map(str, range(10, 100))
    for word in (*STEMS, *EXTENSIONS, *CONFIGS, *FOLDERS, *WORDS, *KEYS, *SERVICES, *ADJECTIVES, *NOUNS, *numbers):
        yield f"{word}\n {word}\n" * WORD_COPIES


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json and tokenizer_config.json, which also carries the chat template."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": CONTEXT_LENGTH,
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": TEXT_END,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
