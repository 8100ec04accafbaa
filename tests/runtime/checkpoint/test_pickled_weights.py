"""Conversion of pickled weights: equal tensors, hostile and incomplete folders."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.runtime.checkpoint.new_folder import ConversionError
from baton.runtime.checkpoint.pickled_weights import convert_folder
from baton.runtime.checkpoint.weight_files import stored_tensors
from baton.runtime.checkpoint.weights import load_weights


def converted(folder: Path) -> dict[str, torch.Tensor]:
    output = folder.with_name("converted")
    convert_folder(folder, output)
    views = {name: torch.zeros(tensor.shape) for name, tensor in stored_tensors(output).items()}
    load_weights(views, output)
    return views


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return tmp_path / "model"


def test_single_file_with_shared_and_transposed_tensors(folder: Path) -> None:
    embedding = torch.randn(5, 3)
    given = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding, "t": torch.randn(2, 4).T}
    given["part"] = embedding[1:3]
    torch.save(given, folder / "pytorch_model.bin")
    torch.save({"lr": 1}, folder / "optimizer.pt")
    torch.save({"lr": 1}, folder / "training_args.bin")
    found = converted(folder)
    assert found.keys() == given.keys() and all(torch.equal(found[name], given[name]) for name in given)


def test_shards_and_their_index(folder: Path) -> None:
    shards = [{"a": torch.randn(3)}, {"b": torch.randn(2, 2, dtype=torch.float64)}]
    names = ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"]
    for name, shard in zip(names, shards, strict=True):
        torch.save(shard, folder / name, _use_new_zipfile_serialization=name == names[0])
    for pair in ("config.json", "{}"), ("tokenizer.json", "{}"), ("vocab.txt", ""), ("notes.md", ""):
        (folder / pair[0]).write_text(pair[1])
    found = converted(folder)
    assert torch.equal(found["a"], shards[0]["a"]) and torch.equal(found["b"].double(), shards[1]["b"].float().double())
    files = sorted(file.name for file in folder.with_name("converted").iterdir())
    assert files == [
        "config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
        "model.safetensors.index.json", "tokenizer.json", "vocab.txt",
    ]  # fmt: skip
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"a": names[0], "b": "gone.bin"}}))
    with pytest.raises(ConversionError, match=r"lacks gone\.bin"):
        convert_folder(folder, folder / "again")


class Hostile:
    """A pickle that would create a file when it is loaded."""

    def __init__(self, made: Path) -> None:
        self._made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._made,)


@pytest.mark.parametrize("torchs_own", [True, False])
def test_hostile_pickle_is_refused_and_not_run(folder: Path, torchs_own: bool) -> None:
    made = folder / "made"
    content = {"a": torch.zeros(1), "b": Hostile(made)}
    file = folder / "pytorch_model.bin"
    torch.save(content, file) if torchs_own else file.write_bytes(pickle.dumps(Hostile(made)))
    with pytest.raises(ConversionError, match=r"pytorch_model\.bin is refused: loading it would run code"):
        convert_folder(folder, folder.with_name("converted"))
    assert not made.exists() and not folder.with_name("converted").exists()
    assert sorted(file.name for file in folder.parent.iterdir()) == ["model"], "nothing half-written stays"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"a": torch.zeros(1), "epoch": 3}, "entries that are no dense tensors: epoch"),
        ({"a": torch.eye(2).to_sparse()}, "entries that are no dense tensors: a"),
        ([torch.zeros(1)], "holds a list, not tensors by name"),
    ],
)
def test_other_contents_are_refused(folder: Path, content: Any, message: str) -> None:
    torch.save(content, folder / "pytorch_model.bin")
    with pytest.raises(ConversionError, match=message):
        convert_folder(folder, folder.with_name("converted"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
            "Git LFS pointer, not the weights; run",
        ),
        (b"<html>404</html>", r"begins with b'<html>404</html>'; download the file again"),
        (b"", "is empty; download the file again"),
        (b"PK\x03\x04", "cannot be read: .*download the file again"),
    ],
)
def test_files_left_by_a_failed_download_are_named(folder: Path, content: bytes, message: str) -> None:
    """None of them is taken for a pickle that would run code."""
    (folder / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(ConversionError, match=message):
        convert_folder(folder, folder.with_name("converted"))


def test_wrapped_state_dict_is_unwrapped(folder: Path) -> None:
    torch.save({"state_dict": {"a": torch.ones(1)}, "epoch": 3}, folder / "last.ckpt")
    assert converted(folder)["a"].item() == 1


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], r"has no weights to convert: no file \*\.bin"),
        (["training_args.bin"], "has no weights to convert"),
        (["consolidated.00.pth"], "is in Meta's own format"),
        (["a.pt", "b.pt"], "several files of weights and no pytorch_model.bin.index.json: a.pt, b.pt"),
        (["pytorch_model-00001-of-00002.bin"], "1 of 2 shards"),
    ],
)
def test_folders_without_usable_weights(folder: Path, files: list[str], message: str) -> None:
    for name in files:
        (folder / name).write_bytes(b"")
    with pytest.raises(ConversionError, match=message):
        convert_folder(folder, folder.with_name("converted"))


def test_output_must_be_new(folder: Path) -> None:
    torch.save({"a": torch.zeros(1)}, folder / "pytorch_model.bin")
    with pytest.raises(ConversionError, match="exists already"):
        convert_folder(folder, folder)
    with pytest.raises(ConversionError, match="is no folder"):
        convert_folder(folder / "nothing", folder / "converted")
