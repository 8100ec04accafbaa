"""Tokenizers of GGUF files: compared with those that the metadata were made of."""

from __future__ import annotations

import inspect
import io
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from baton.runtime.checkpoint import gguf_tokenizer
from baton.runtime.checkpoint.gguf_header import BLOCK_TYPES, GGUFHeader, TensorInfo
from baton.runtime.checkpoint.gguf_tokenizer import make_tokenizer, tokenizer_config
from baton.runtime.checkpoint.model_files import ModelLoadError
from tests.doubles.trained_tokenizers import CORPUS

TEXTS = [
    "Hello world, it's 2024's 1st; x  3 and 12345 items",
    "def f(a, b):\n\n\treturn a+b  # ok\n\n\n    pass\r\n",
    "Ein Fluß, drei Äpfel, naïve café e\u0301 ½ ² Ⅷ",
    "你好，世界！こんにちは 안녕하세요 Привет мир",
    "🙂👩‍👧 \u200b\ufeff\x00\x7f   trailing   ",
    "",
    " ",
    "▁ a▁b  c",
    "<|im_start|>user\nhi<|im_end|><tool>x</tool> <|im_start|>",
    "CamelCaseWORDS don'T WE'LL/path//to\n/x",
]


def header(values: dict[str, Any]) -> GGUFHeader:
    tokens = values["tokenizer.ggml.tokens"]
    embedding = TensorInfo("token_embd.weight", (len(tokens), 8), BLOCK_TYPES[0], 0, 0)
    return GGUFHeader(Path("m.gguf"), {"general.architecture": "llama"} | values, {"token_embd.weight": embedding})


def byte_level(pre: Any, *, normalizer: Any = None, ignores_merges: bool = False) -> Tokenizer:
    backend = Tokenizer(models.BPE(ignore_merges=ignores_merges))
    backend.pre_tokenizer, backend.decoder = pre, decoders.ByteLevel()
    if normalizer is not None:
        backend.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator([*CORPUS, *TEXTS] * 3, trainer)
    backend.add_tokens(["<tool>"])
    return backend


def metadata_of(backend: Tokenizer, rule: str) -> dict[str, Any]:
    content = json.loads(backend.to_str())
    added = {token["id"]: token for token in content["added_tokens"]}
    vocabulary = backend.get_vocab(with_added_tokens=True)
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    kinds = [(3 if added[i]["special"] else 4) if i in added else 1 for i in range(len(tokens))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.tokens": [*tokens, "[PAD0]"],
        "tokenizer.ggml.token_type": [*kinds, 5],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in content["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }


def split(pattern: str) -> Any:
    from tokenizers import Regex

    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), bytes_only])


def published_pattern(rule: str) -> str:
    """As libraries have it that were written for the models."""
    if rule == "qwen2":
        from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

        return PRETOKENIZE_REGEX
    if rule in ("llama-bpe", "dbrx"):
        from transformers.convert_slow_tokenizer import TikTokenConverter

        return inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default
    if rule == "tekken":
        import mistral_common

        data = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
        return json.loads(data.read_text())["config"]["pattern"]
    import tiktoken_ext.openai_public

    source = inspect.getsource(tiktoken_ext.openai_public.o200k_base)
    start = source.index("pat_str = ") + len("pat_str = ")
    return eval(source[start : source.index(")\n    return", start) + 1])


GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)


@pytest.mark.parametrize("rule", ["gpt-2", "smollm", "qwen2", "llama-bpe", "dbrx", "tekken", "gpt-4o"])
def test_byte_level_tokenizers(rule):
    if rule == "gpt-2":
        theirs = byte_level(GPT2)
    elif rule == "smollm":
        theirs = byte_level(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]))
    else:
        theirs = byte_level(
            split(published_pattern(rule)),
            normalizer=normalizers.NFC() if rule == "qwen2" else None,
            ignores_merges=rule in ("llama-bpe", "tekken", "gpt-4o"),
        )
    ours = make_tokenizer(header(metadata_of(theirs, rule)))
    assert ours.get_vocab() == theirs.get_vocab(), "tokens that only fill up the embedding are left out"
    for text in [*TEXTS, *CORPUS]:
        encoding = theirs.encode(text)
        assert ours.encode(text).ids == encoding.ids, text
        for skips in (True, False):
            assert ours.decode(encoding.ids, skip_special_tokens=skips) == theirs.decode(
                encoding.ids, skip_special_tokens=skips
            )


@pytest.mark.parametrize(("has_prefix", "spaces"), [(True, "▁"), (False, "▁"), (False, " ")])
def test_sentencepiece_tokenizers(has_prefix, spaces):
    """Against the library that made the pieces and scores. Without a prefix as of Gemma, with pieces for ends of lines
    and for several spaces, which converters have written in two ways."""
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is in the extra [dev]")
    model = io.BytesIO()
    runs = [] if has_prefix else ["<turn>", *("\n" * n for n in range(1, 4)), *("▁" * n for n in range(2, 9))]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in [*CORPUS, *TEXTS[:4]] * 4 for line in text.split("\n") if line]),
        model_writer=model,
        vocab_size=420,
        model_type="bpe",
        byte_fallback=True,
        add_dummy_prefix=has_prefix,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        character_coverage=0.98,
        minloglevel=2,
        hard_vocab_limit=False,
        user_defined_symbols=runs,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    pieces = [theirs.id_to_piece(i) for i in range(theirs.get_piece_size())]

    def kind(i: int) -> int:
        known = 2 if theirs.is_unknown(i) else 3 if theirs.is_control(i) else 6 if theirs.is_byte(i) else 1
        return 4 if pieces[i] in runs else known

    kinds = [kind(i) for i in range(len(pieces))]
    values = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [p.replace("▁", spaces) if p in runs else p for p in pieces],
        "tokenizer.ggml.scores": [-1000.0 if p in runs else theirs.get_score(i) for i, p in enumerate(pieces)],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": theirs.bos_id(),
        "tokenizer.ggml.eos_token_id": theirs.eos_id(),
        "tokenizer.ggml.unknown_token_id": theirs.unk_id(),
        "tokenizer.ggml.add_space_prefix": has_prefix,
    }
    ours = make_tokenizer(header(values))
    texts = [*TEXTS, *CORPUS, "   x  y    z         end  ", "    return\n\n\n\n  #", "<turn>user\nhi  \n"]
    for text in [text for text in texts if text and "<|" not in text and "▁" not in text]:
        ids = theirs.encode(text)
        assert ours.encode(text, add_special_tokens=False).ids == ids, text
        assert ours.decode(ids) == text
    # SentencePiece models begin with the bos unless the file says no.
    assert ours.encode("abc").ids[0] == theirs.bos_id()
    without = make_tokenizer(header(values | {"tokenizer.ggml.add_bos_token": False}))
    assert theirs.bos_id() not in without.encode("abc").ids
    both = make_tokenizer(header(values | {"tokenizer.ggml.add_eos_token": True})).encode("a", "b").ids
    assert both.count(theirs.bos_id()) == both.count(theirs.eos_id()) == 2


def test_llama3_begins_with_the_bos_unless_the_file_says_no():
    values = metadata_of(byte_level(GPT2), "llama-bpe")
    del values["tokenizer.ggml.add_bos_token"]
    assert make_tokenizer(header(values)).encode("a").ids[0] == 0
    assert make_tokenizer(header(values | {"tokenizer.ggml.pre": "qwen2"})).encode("a").ids[0] != 0


def test_named_templates_and_tokens():
    values = metadata_of(byte_level(GPT2), "gpt-2") | {
        "tokenizer.chat_template": "plain",
        "tokenizer.chat_template.tool_use": "tools",
    }
    config = tokenizer_config(header(values))
    assert config["bos_token"] == "<|endoftext|>" and config["eos_token"] == "<|im_end|>"
    assert config["chat_template"] == [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
    ]


def test_scores_of_another_number_are_refused():
    values = metadata_of(byte_level(GPT2), "gpt-2") | {"tokenizer.ggml.scores": [0.0]}
    with pytest.raises(ModelLoadError, match=r"scores has 1 entries for \d+ tokens"):
        make_tokenizer(header(values))


def test_tokens_of_a_kind_are_added_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma's have 6,000 that users defined, and each call makes the search for all of them anew."""
    added: list[list[str]] = []

    class Counting:
        post_processor: Any = None

        def __init__(self, _model: Any) -> None:
            pass

        def add_tokens(self, tokens: list[Any]) -> None:
            added.append([token.content for token in tokens])

        add_special_tokens = add_tokens

    backend = byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False))
    backend.add_tokens([f"<unused{number}>" for number in range(99)])
    monkeypatch.setattr(gguf_tokenizer, "Tokenizer", Counting)
    make_tokenizer(header(metadata_of(backend, "gpt-2")))
    defined, special = added
    assert len(special) == 3 and len(defined) == 100 and defined[-1] == "<unused98>"


def test_a_text_that_is_user_defined_and_special_is_special() -> None:
    values = metadata_of(byte_level(pre_tokenizers.ByteLevel(add_prefix_space=False)), "gpt-2")
    tokens, kinds = values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]
    tool = tokens.index("<tool>")
    for more in (3, 4):  # of the other kind, behind
        values["tokenizer.ggml.token_type"] = [*kinds[:tool], 7 - more, *kinds[tool + 1 :], more]
        made = make_tokenizer(header(values | {"tokenizer.ggml.tokens": [*tokens, "<tool>"]}))
        assert made.decode(made.encode("a<tool>").ids) == "a"
