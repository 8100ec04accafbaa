"""tokenizer.json and tokenizer_config.json of the tokenizer in a GGUF file. No torch.

tokenizer.ggml.model  gpt2: tokens and merges of byte-level BPE; tokenizer.ggml.pre names the rule that splits a text
                            into words, and the file does not contain it: `_RULES` has those that are known
                      llama: pieces and scores of SentencePiece; merges are all pairs of pieces that make a piece,
                            best score first
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from .gguf_header import GGUFHeader
from .load_errors import ModelLoadError

logger = logging.getLogger(__name__)

_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
"""Name in tokenizer_config.json -> in the metadata."""
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
"""tokenizer.ggml.token_type"""


class UnknownTokenizer(ValueError):
    """The file does not contain its whole tokenizer, and Baton does not know the rest; the message says what is
    missing. The model can be served with another tokenizer."""


def _words(contractions: str, numbers: str, behind: str = r"[\r\n]*") -> str:
    """The pattern that GPT-4 made usual: contractions, words, numbers, signs, ends of lines, spaces."""
    return (
        rf"{contractions}[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{numbers}| ?[^\s\p{{L}}\p{{N}}]+{behind}|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_SUFFIXES = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(ending: str, numbers: str) -> str:
    """Words that may begin with capitals: Tekken (Mistral) and o200k (OpenAI)."""
    start = r"[^\r\n\p{L}\p{N}]?"
    return (
        rf"{start}{_UPPER}*{_LOWER}+{ending}|{start}{_UPPER}+{_LOWER}*{ending}|{numbers}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    )


def _byte_level(*before: Any) -> Any:
    """GPT-2's words, behind other rules."""
    last = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return pre_tokenizers.Sequence([*before, last]) if before else last


def _split(pattern: str) -> Any:
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_only])


_GPT2 = ("gpt-2", "phi-2", "olmo", "mpt", "jais", "trillion")
_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b")
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "lfm2", "pixtral", "midm-2.0")
_CL100K = ("dbrx", "smaug-bpe", "chatglm-bpe", "glm4")

_RULES: dict[str, Callable[[], Any]] = {
    **dict.fromkeys(_GPT2, _byte_level),
    **dict.fromkeys(_DIGITS, lambda: _byte_level(pre_tokenizers.Digits(individual_digits=True))),
    **dict.fromkeys((*_LLAMA3, *_CL100K), lambda: _split(_words(f"{_SUFFIXES}|", r"\p{N}{1,3}"))),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "megrez", "stablelm2"), lambda: _split(_words(f"{_SUFFIXES}|", r"\p{N}"))
    ),
    "tekken": lambda: _split(_cased("", r"\p{N}")),
    **dict.fromkeys(("gpt-4o", "llama4"), lambda: _split(_cased(f"{_SUFFIXES}?", r"\p{N}{1,3}"))),
}
"""tokenizer.ggml.pre -> what splits a text into words. The patterns are those of the models' own tokenizer.json."""

_WHOLE_WORDS = (*_LLAMA3, "tekken", "gpt-4o", "llama4")
"""Rules of tokenizers that take a word as one token where there is such a token, whatever the merges say."""
_COMPOSED = ("qwen2", "deepseek-r1-qwen")
"""Rules of tokenizers that compose characters first (Unicode's NFC)."""
_BEGINS = (*_LLAMA3, "tekken")
"""Rules of tokenizers that put the bos before a text if the file does not say."""


def make_tokenizer(header: GGUFHeader) -> Tokenizer:
    """The data for tokenizer.json. Raises ModelLoadError if the tokenizer contradicts itself, UnknownTokenizer if
    Baton cannot make it."""
    values = header.metadata
    tokens, kinds = _tokens(header)
    model = values.get("tokenizer.ggml.model")
    try:
        if model == "gpt2":
            tokenizer = _make_bpe(header, tokens, kinds)
        elif model == "llama":
            tokenizer = _make_sentencepiece(header, tokens, kinds)
        else:
            raise UnknownTokenizer(
                f"tokenizer.ggml.model is {model!r}; gpt2 (byte-level BPE) and llama (SentencePiece) are read"
            )
        # All at once: each call makes what finds them in texts anew. A text of both kinds is special.
        tokenizer.add_tokens(_added(tokens, kinds, _USER_DEFINED))
        tokenizer.add_special_tokens(_added(tokens, kinds, _CONTROL))
    except (ModelLoadError, UnknownTokenizer):
        raise
    except Exception as error:  # the library raises plain Exception
        raise ModelLoadError(f"{header.file}: tokens and merges do not make a tokenizer: {error}") from error
    around = _special_around(values, tokens)
    if around is not None:
        tokenizer.post_processor = around if tokenizer.post_processor is None else tokenizer.post_processor
    return tokenizer


def _added(tokens: list[str], kinds: list[int], wanted: int) -> list[AddedToken]:
    """Tokens of one kind, which are found in a text before it is split."""
    return [AddedToken(token, normalized=False) for token, kind in zip(tokens, kinds, strict=True) if kind == wanted]


def _tokens(header: GGUFHeader) -> tuple[list[str], list[int]]:
    """All tokens and their kinds. Raises ModelLoadError if they contradict the rest of the file."""
    values, file = header.metadata, header.file
    tokens = values.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        raise ModelLoadError(f"{file} has no tokenizer.ggml.tokens in its metadata; convert the model again")
    kinds = values.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    scores = values.get("tokenizer.ggml.scores") or [0.0] * len(tokens)
    for name, table in (("token_type", kinds), ("scores", scores)):
        if len(table) != len(tokens):
            raise ModelLoadError(
                f"{file}: tokenizer.ggml.{name} has {len(table)} entries for {len(tokens)} tokens; the file is damaged"
            )
    embedding = header.tensors.get("token_embd.weight")
    if embedding is not None and embedding.shape[0] != len(tokens):
        raise ModelLoadError(
            f"{file}: its tokenizer has {len(tokens)} tokens, but token_embd.weight has {embedding.shape[0]} rows; "
            "tokenizer and weights are of different models"
        )
    if values.get("tokenizer.ggml.model") == "llama":  # they are found in texts as these are, before spaces become ▁
        tokens = [
            token.replace("▁", " ") if kind == _USER_DEFINED else token
            for token, kind in zip(tokens, kinds, strict=True)
        ]
    architecture = values.get("general.architecture")
    if values.get(f"{architecture}.vocab_size", len(tokens)) != len(tokens):
        raise ModelLoadError(
            f"{file}: {architecture}.vocab_size is {values[f'{architecture}.vocab_size']}, but its tokenizer has "
            f"{len(tokens)} tokens; the file is damaged"
        )
    for name, index in values.items():
        if not (name.startswith("tokenizer.ggml.") and name.endswith("_token_id")):
            continue
        if not isinstance(index, int) or not 0 <= index < len(tokens):
            raise ModelLoadError(f"{file}: {name} is {index!r}, but its tokenizer has {len(tokens)} tokens")
    return tokens, kinds


def _vocabulary(tokens: list[str], kinds: list[int]) -> dict[str, int]:
    """Token -> id, without those that only fill the embedding up; of equal ones, the first counts."""
    found: dict[str, int] = {}
    for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind != _UNUSED:
            found.setdefault(token, index)
    return found


def _make_bpe(header: GGUFHeader, tokens: list[str], kinds: list[int]) -> Tokenizer:
    values = header.metadata
    rule = values.get("tokenizer.ggml.pre")
    if rule not in _RULES:
        raise UnknownTokenizer(
            f"tokenizer.ggml.pre is {rule!r}: the file names the rule that splits a text into words, and this one is "
            "not known here"
        )
    merges = values.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ModelLoadError(f"{header.file} has no tokenizer.ggml.merges in its metadata; convert the model again")
    vocabulary = _vocabulary(tokens, kinds)
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ") if isinstance(merge, str) else ("", "", "")
        if not left or not right or " " in right:
            raise ModelLoadError(f"{header.file}: {merge!r} in tokenizer.ggml.merges is no pair of tokens")
        if {left, right, left + right} <= vocabulary.keys():
            pairs.append((left, right))
    if left_out := len(merges) - len(pairs):  # as in a pruned vocabulary; llama.cpp splits what they make up again
        what = f"{left_out} of {len(merges)} merges are left out"
        logger.warning("%s: %s: their tokens are not there", header.file, what)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs, ignore_merges=rule in _WHOLE_WORDS))
    tokenizer.pre_tokenizer = _RULES[rule]()
    tokenizer.decoder = decoders.ByteLevel()
    if rule in _COMPOSED:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _make_sentencepiece(header: GGUFHeader, tokens: list[str], kinds: list[int]) -> Tokenizer:
    values = header.metadata
    scores = values.get("tokenizer.ggml.scores")
    if not isinstance(scores, list):
        raise ModelLoadError(f"{header.file} has no tokenizer.ggml.scores in its metadata; convert the model again")
    vocabulary = _vocabulary(tokens, kinds)
    unknown = values.get("tokenizer.ggml.unknown_token_id")
    has_bytes = _BYTE in kinds
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=_merges(tokens, kinds, scores, vocabulary),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=has_bytes,
        )
    )
    has_prefix = values.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if has_prefix else spaces
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)
    return tokenizer


def _merges(
    tokens: list[str], kinds: list[int], scores: list[float], vocabulary: Mapping[str, int]
) -> list[tuple[str, str]]:
    """SentencePiece's BPE joins the two neighbours whose piece has the best score; of equal scores, the earlier piece
    comes first."""
    found = []
    for index, token in enumerate(tokens):
        if kinds[index] not in (_NORMAL, _USER_DEFINED) or len(token) < 2:
            continue
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[index], index, left, right))
    found.sort()
    return [(tokens[left], tokens[right]) for _, _, left, right in found]


def _special_around(values: Mapping[str, Any], tokens: list[str]) -> Any:
    """What puts bos and eos around a text; None if nothing does."""
    rule, model = values.get("tokenizer.ggml.pre"), values.get("tokenizer.ggml.model")
    begins = values.get("tokenizer.ggml.add_bos_token", model == "llama" or rule in _BEGINS)
    ends = values.get("tokenizer.ggml.add_eos_token", False)
    bos, eos = values.get("tokenizer.ggml.bos_token_id"), values.get("tokenizer.ggml.eos_token_id")
    before = [tokens[bos]] if begins and bos is not None else []
    after = [tokens[eos]] if ends and eos is not None else []
    if not before and not after:
        return None
    special = {tokens[index]: index for index in (bos, eos) if index is not None}
    second = [*(f"{token}:1" for token in before), "$B:1", *(f"{token}:1" for token in after)]
    return processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, *second],
        special_tokens=[(token, index) for token, index in special.items() if token in before + after],
    )


def tokenizer_config(header: GGUFHeader) -> dict[str, Any]:
    """tokenizer_config.json: the special tokens by name, and the chat templates."""
    values = header.metadata
    tokens = values.get("tokenizer.ggml.tokens") or []
    found: dict[str, Any] = {
        # No class of a model: transformers would take it to cut texts in its own way, and not look at tokenizer.json.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    for name, key in _NAMED.items():
        if (index := values.get(f"tokenizer.ggml.{key}")) is not None:
            found[name] = tokens[index]
    templates = {
        key.removeprefix("tokenizer.chat_template").lstrip(".") or "default": template
        for key, template in values.items()
        if key.startswith("tokenizer.chat_template") and isinstance(template, str)
    }
    if set(templates) == {"default"}:
        found["chat_template"] = templates["default"]
    elif templates:
        found["chat_template"] = [{"name": name, "template": template} for name, template in templates.items()]
    return found
