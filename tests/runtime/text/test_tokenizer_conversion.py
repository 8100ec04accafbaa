"""Tokenizers in older formats: converted once, cached, and equal to the libraries they were written for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.runtime.text import tokenizer_conversion
from baton.runtime.text.tokenizer import Tokenizer, TokenizerError
from tests.doubles import trained_tokenizers

TEXTS = [
    "Hello world",
    "x = 1\n\n\tif x:\n    print('ünïcödé')",
    "日本語 😀 नमस्ते",
    "a\u0301 e\u200b\u00a0z",
    "tail ",
    "12345 67",
    "",
]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Each module run converts anew, and leaves the user's cache alone."""
    folder = tmp_path_factory.mktemp("cache")
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(folder)
    yield folder
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(scope="module")
def sentencepiece_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import sentencepiece

    folder = tmp_path_factory.mktemp("spm")
    (folder / "text").write_text("Hello world, this is a test.\nThe quick brown fox\nnumbers 123 4567\n" * 40)
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "text"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=360,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer", "legacy": False}))
    size = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model")).get_piece_size()
    (folder / "added_tokens.json").write_text(json.dumps({"<|im_start|>": size}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": {"content": "</s>"}}))
    return folder


def test_sentencepiece_alone(sentencepiece_folder: Path) -> None:
    import sentencepiece

    reference = sentencepiece.SentencePieceProcessor(model_file=str(sentencepiece_folder / "tokenizer.model"))
    tokenizer = Tokenizer.load(sentencepiece_folder)
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == reference.encode(text) and tokenizer.decode(ids) == text
    added = tokenizer.token_to_id("<|im_start|>")
    assert added == reference.get_piece_size()
    assert tokenizer.encode("<|im_start|>Hello", False)[0] == added
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (reference.bos_id(), reference.eos_id())


def test_second_load_reads_the_cache(sentencepiece_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Tokenizer.load(sentencepiece_folder)
    monkeypatch.setattr(tokenizer_conversion, "_run_child", lambda *_: pytest.fail("converted again"))
    assert Tokenizer.load(sentencepiece_folder).encode("Hello") == first.encode("Hello")


def test_vocab_and_merges_with_added_tokens(tmp_path: Path) -> None:
    trained = trained_tokenizers.byte_level()
    trained.model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|end|>", "unk_token": None})
    )
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|end|>": trained.get_vocab_size() + 5}))
    from transformers import AutoTokenizer

    tokenizer, reference = Tokenizer.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in [*TEXTS, "  leading", "end<|end|>x"]:
        ids = tokenizer.encode(text)
        assert ids == reference(text).input_ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == reference.decode(ids)
    assert tokenizer.eos_token_id == reference.eos_token_id is not None


def test_tekken(tmp_path: Path) -> None:
    import mistral_common
    from mistral_common.tokens.tokenizers.tekken import Tekkenizer

    source = Path(mistral_common.__file__).parent / "data" / "tekken_240911.json"
    content = json.loads(source.read_text())
    content["config"]["default_vocab_size"] = 5000  # conversion takes a second
    # As newer files have them; for older ones transformers asks mistral-common.
    content["special_tokens"] = [
        {**each, "token_str": str(getattr(each["token_str"], "value", each["token_str"]))}
        for each in Tekkenizer.DEPRECATED_SPECIAL_TOKENS
    ]
    (tmp_path / "tekken.json").write_text(json.dumps(content))
    tokenizer, reference = Tokenizer.load(tmp_path), Tekkenizer.from_file(tmp_path / "tekken.json")
    for text in [*TEXTS, "  leading"]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert ids == reference.encode(text, bos=False, eos=False) and tokenizer.decode(ids) == text
    assert tokenizer.token_to_id("[INST]") == reference.get_special_token("[INST]")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (reference.bos_id, reference.eos_id)
    assert tokenizer.encode("Hello") == reference.encode("Hello", bos=True, eos=False)


def test_tokenizer_that_cannot_be_converted_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TokenizerError, match=r"no tokenizer in an older format .*--tokenizer-path"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"broken")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    with pytest.raises(TokenizerError, match=r"its tokenizer\.model cannot be converted: .*--tokenizer-path"):
        Tokenizer.load(tmp_path)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(TokenizerError, match=r"cannot be kept in .*set XDG_CACHE_HOME"):
        Tokenizer.load(tmp_path)


def test_conversion_loads_no_torch_here(sentencepiece_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sentencepiece_folder, tmp_path / "copy")
    code = "import sys; from baton.runtime.text.tokenizer import Tokenizer; Tokenizer.load(sys.argv[1]); "
    code += "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code, str(folder)], check=False).returncode == 0
