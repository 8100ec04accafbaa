"""A tokenizer whose tokens are bytes: ids 0-255, then <eos> (256). A character beyond ASCII spans several tokens."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

VOCAB_SIZE = 257
EOS_ID = 256


def write_byte_tokenizer(folder: Path) -> Path:
    """Write tokenizer.json and its config; returns the folder."""
    # The byte-level alphabet, in the order of the bytes it stands for.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    characters = [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]
    model = models.BPE(vocab={char: byte for byte, char in enumerate(characters)}, merges=[])
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken("<eos>", special=True)])
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))
    return folder
