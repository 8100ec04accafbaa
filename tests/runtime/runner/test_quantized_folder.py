"""`baton convert --quantization`: folders with weights in few bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.entrypoints.convert_weights import main
from baton.runtime.checkpoint.load_errors import ModelLoadError
from baton.runtime.checkpoint.weight_source import open_source
from baton.runtime.layers.quantize import narrowed
from baton.runtime.layers.quantized_weights import INT8, QUANTIZATIONS, Float8Weight, QuantizedWeight
from baton.runtime.runner import quantized_folder
from baton.runtime.runner.quantized_folder import quantize_folder
from tests.doubles.tiny_models import MODELS, make_reference

TOY = Path(__file__).parents[3] / "examples" / "toy_model"
NAMES = [name for name, form in QUANTIZATIONS.items() if form is not None]


def tensors_of(weight: QuantizedWeight | Float8Weight) -> list[torch.Tensor]:
    parts = [weight.codes, weight.scales]
    parts += [weight.rows, weight.mins] if isinstance(weight, QuantizedWeight) else []
    return [part.view(torch.uint8) for part in parts if part is not None]


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_that_a_start_makes(tmp_path: Path, name: str) -> None:
    files = quantize_folder(TOY, tmp_path / "made", name)
    assert files == [tmp_path / "made" / "model-00001.safetensors"]
    floats, few, form = open_source(TOY), open_source(tmp_path / "made"), QUANTIZATIONS[name]
    assert form is not None and few.tensors.keys() == floats.tensors.keys()
    packed = [each for each, tensor in few.tensors.items() if tensor.is_packed]
    layers = json.loads((TOY / "config.json").read_text())["num_hidden_layers"]
    assert "model.embed_tokens.weight" in packed and len(packed) == 7 * layers + 1
    for each in floats.tensors:
        weight, found = floats.read(each), few.read(each)
        assert isinstance(weight, torch.Tensor)
        if each not in packed:
            assert torch.equal(torch.as_tensor(found), weight)
            continue
        expected = narrowed(weight, INT8 if "embed" in each else form)
        assert isinstance(found, QuantizedWeight | Float8Weight) and type(found) is type(expected)
        assert found.shape == tuple(weight.shape) and getattr(found, "form", 0) == getattr(expected, "form", 0)
        assert isinstance(expected, QuantizedWeight | Float8Weight)
        for ours, theirs in zip(tensors_of(found), tensors_of(expected), strict=True):
            assert torch.equal(ours, theirs)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "made" / file).read_bytes() == (TOY / file).read_bytes()


def test_large_models_are_written_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantized_folder, "SHARD_BYTES", 100_000)
    files = quantize_folder(TOY, tmp_path / "made", "int4")
    assert len(files) > 3
    few = open_source(tmp_path / "made")
    assert {tensor.file for tensor in few.tensors.values()} == set(files)
    assert all(few.read(name) is not None for name in few.tensors)


def test_command_names_the_folder_to_serve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "new" / "made"
    assert main([str(TOY), "--output", str(made), "--quantization", "int8"]) == 0
    assert f"--model-path {made}" in capsys.readouterr().out
    assert main([str(TOY), "--output", str(made), "--quantization", "int8"]) == 1
    assert "exists already" in capsys.readouterr().err
    assert main([str(made), "--output", str(tmp_path / "again"), "--quantization", "int4"]) == 1
    assert "has weights in few bits already" in capsys.readouterr().err and not (tmp_path / "again").exists()


def test_nothing_is_left_of_a_folder_that_cannot_be_written_whole(tmp_path: Path) -> None:
    shutil.copytree(TOY, tmp_path / "bad")
    tensors = load_file(tmp_path / "bad" / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(tensors, tmp_path / "bad" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"model\.layers\.1\.mlp\.down_proj\.weight in .* NaN or infinite"):
        quantize_folder(tmp_path / "bad", tmp_path / "made", "int8")
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]


@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("weight_codes", lambda tensor: tensor[:, :-4]),
        ("weight_rows", lambda tensor: tensor[:-1]),
        ("weight_rows", lambda tensor: None),
        ("weight_scales", lambda tensor: tensor.float()),
        ("weight_scales", lambda tensor: tensor[:, :-1]),
        ("weight_scales", lambda tensor: None),
        ("weight_mins", lambda tensor: tensor[:-1]),
    ],
)
def test_parts_that_do_not_fit_each_other_are_refused(tmp_path: Path, part: str, change: Any) -> None:
    (file,) = quantize_folder(TOY, tmp_path / "made", "int4")
    name = f"model.layers.0.mlp.up_proj.{part}"
    tensors = load_file(file)
    changed = change(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed.contiguous()
    save_file(tensors, tmp_path / "made" / "model.safetensors", metadata={"format": "pt"})
    for old in (file, tmp_path / "made" / "model.safetensors.index.json"):
        old.unlink()
    with pytest.raises(ModelLoadError, match=r"layers\.0\.mlp\.up_proj needs weight_codes U8 .* convert the model"):
        open_source(tmp_path / "made")


def test_folders_of_another_format_are_refused(tmp_path: Path) -> None:
    quantize_folder(TOY, tmp_path / "made", "int8")
    config = json.loads((tmp_path / "made" / "config.json").read_text())
    config["quantization_config"]["format"] = 2
    (tmp_path / "made" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match="format 2 of `baton convert` are not supported; format 1 is"):
        open_source(tmp_path / "made")


def test_experts_in_one_tensor_are_refused(tmp_path: Path) -> None:
    make_reference(*MODELS["granitemoe"]).save_pretrained(tmp_path / "experts")
    with pytest.raises(ModelLoadError, match=r"all experts of a layer in one tensor .* serve it with --quantization"):
        quantize_folder(tmp_path / "experts", tmp_path / "made", "int8")
