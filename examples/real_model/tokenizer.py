"""SmolLM2's tokenizer, from the metadata of a GGUF file: byte-level BPE as in GPT-2, but every digit is a separate
token.

GGUF holds tokens and merges, but only the name of the rule by which a text is split before the merges. For "smollm"
this rule is _PRE_TOKENIZER; other names are refused.
"""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from .gguf_file import GGUFError, GGUFFile

_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
"""Name in tokenizer_config.json -> in the metadata."""


def make_tokenizer(gguf: GGUFFile) -> Tokenizer:
    """The data for tokenizer.json. Raises GGUFError for another kind of tokenizer."""
    from gguf import TokenType

    gguf.expect("tokenizer.ggml.model", "gpt2", "byte-level BPE")
    gguf.expect("tokenizer.ggml.pre", "smollm", "digits one by one, then GPT-2's words")
    gguf.expect("tokenizer.ggml.add_space_prefix", False, "no space before a text")
    gguf.expect("tokenizer.ggml.add_bos_token", False, "nothing before a prompt")
    tokens: list[str] = gguf["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in gguf["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, gguf["tokenizer.ggml.token_type"], strict=True):
        if kind == TokenType.CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, normalized=False)])
        elif kind != TokenType.NORMAL:
            raise GGUFError(f"token {token!r} is of kind {kind}; only {TokenType.NORMAL!r} and {TokenType.CONTROL!r}")
    return tokenizer


def tokenizer_config(gguf: GGUFFile) -> dict[str, Any]:
    """tokenizer_config.json: the special tokens by name, and the chat template."""
    tokens = gguf["tokenizer.ggml.tokens"]
    named = {name: tokens[gguf[f"tokenizer.ggml.{key}"]] for name, key in _NAMED.items()}
    return {
        # Not GPT2Tokenizer: transformers would take it to cut texts as GPT-2 does, and not look at tokenizer.json.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": gguf["llama.context_length"],
        **named,
        "clean_up_tokenization_spaces": False,
        "chat_template": gguf["tokenizer.chat_template"],
    }
