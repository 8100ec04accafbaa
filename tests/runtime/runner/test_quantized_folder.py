"""`baton convert --quantization`: folders with weights in few bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from baton.entrypoints.convert_weights import main
from baton.runtime.checkpoint.load_errors import ModelLoadError
from baton.runtime.checkpoint.new_folder import ConversionError
from baton.runtime.checkpoint.pooling_files import read_embedding_config
from baton.runtime.checkpoint.weight_source import open_source
from baton.runtime.config import ModelArgs
from baton.runtime.layers.quantize import narrowed
from baton.runtime.layers.quantized_weights import INT8, QUANTIZATIONS, Float8Weight, QuantizedWeight
from baton.runtime.runner import quantized_folder
from baton.runtime.runner.model_runner import ModelRunner
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
    assert files[0].stat().st_mode & 0o777 == 0o644, "the server may be another user's"
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


def test_copy_of_a_tied_embedding_is_left_out(tmp_path: Path) -> None:
    """Or it would differ from the rounded one, and a start would refuse the folder."""
    shutil.copytree(TOY, tmp_path / "both")
    tensors = load_file(tmp_path / "both" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "both" / "model.safetensors", metadata={"format": "pt"})
    quantize_folder(tmp_path / "both", tmp_path / "made", "int8")
    assert open_source(tmp_path / "made").tensors.keys() == open_source(TOY).tensors.keys()
    runner = ModelRunner(
        ModelArgs(model_path=str(tmp_path / "made")), context_length=0, num_rows=2, page_size=1, max_total_tokens=64
    )
    assert runner.few_bits.startswith("auto")


def changed(tmp_path: Path, name: str, change: Any) -> Path:
    """The toy model with another tensor of this name."""
    shutil.copytree(TOY, tmp_path / "changed")
    file = tmp_path / "changed" / "model.safetensors"
    tensors = load_file(file)
    tensors[name] = change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return tmp_path / "changed"


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("lm_head.weight", lambda all: all["model.embed_tokens.weight"] + 1, "ties the head to the embedding"),
        ("model.layers.0.self_attn.extra.weight", lambda all: torch.ones(16), "unexpected tensor"),
        ("model.layers.0.mlp.up_proj.weight", lambda all: torch.ones(8, 8), r"has shape \[8, 8\]"),
        (
            "model.layers.0.mlp.up_proj.weight",
            lambda all: all["model.layers.0.mlp.up_proj.weight"].to(torch.float8_e4m3fn),
            "8-bit floats without scales",
        ),
    ],
)
def test_folders_that_a_start_refuses_are_not_converted(tmp_path: Path, name: str, change: Any, message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        quantize_folder(changed(tmp_path, name, change), tmp_path / "made", "int8")
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("into", [32, 34, 48, 64, 100])
def test_groups_that_are_not_full_come_back_as_they_were(tmp_path: Path, name: str, into: int) -> None:
    """Of fewer than 33 inputs the weights stay floats."""
    config = json.loads((TOY / "config.json").read_text()) | {"intermediate_size": into}
    shutil.copytree(TOY, tmp_path / "narrow")
    (tmp_path / "narrow" / "config.json").write_text(json.dumps(config))
    file, generator = tmp_path / "narrow" / "model.safetensors", torch.Generator().manual_seed(0)
    tensors = load_file(file)
    for each, tensor in tensors.items():
        if ".mlp." in each:
            size = (tensor.shape[0], into) if "down_proj" in each else (into, tensor.shape[1])
            tensors[each] = torch.randn(size, generator=generator)
    save_file(tensors, file, metadata={"format": "pt"})
    quantize_folder(tmp_path / "narrow", tmp_path / "made", name)
    down = "model.layers.0.mlp.down_proj.weight"
    found, form = open_source(tmp_path / "made").read(down), QUANTIZATIONS[name]
    if into == 32:
        assert torch.equal(torch.as_tensor(found), tensors[down])
        return
    expected = narrowed(tensors[down], form) if form is not None else None
    assert isinstance(found, QuantizedWeight) and isinstance(expected, QuantizedWeight)
    assert found.shape == (tensors[down].shape[0], into) and torch.equal(found.dequantized(), expected.dequantized())


def test_configs_of_pooling_are_copied(tmp_path: Path) -> None:
    """And nothing that lies outside of the folder."""
    shutil.copytree(TOY, tmp_path / "embedder")
    modules = [{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": "1_Pooling"}]
    (tmp_path / "embedder" / "modules.json").write_text(
        json.dumps([*modules, {"type": "x.Other", "path": "../secret"}])
    )
    for place in (tmp_path / "embedder" / "1_Pooling", tmp_path / "secret"):
        place.mkdir()
        (place / "config.json").write_text('{"pooling_mode_cls_token": true}')
    quantize_folder(tmp_path / "embedder", tmp_path / "new" / "made", "int8")
    assert read_embedding_config(tmp_path / "new" / "made").pooling == "cls"
    assert not (tmp_path / "new" / "secret").exists()


def test_full_disk_leaves_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_full(*_: Any, **__: Any) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(quantized_folder, "save_tensors", is_full)
    with pytest.raises(ConversionError, match=r"cannot write .*made: .*No space left"):
        quantize_folder(TOY, tmp_path / "made", "int8")
    assert not list(tmp_path.iterdir())


def test_command_names_the_folder_to_serve(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = tmp_path / "new" / "made"
    assert main([str(TOY), "--output", str(made), "--quantization", "int8"]) == 0
    assert f"--model-path {made}" in capsys.readouterr().out
    assert main([str(TOY), "--output", str(made), "--quantization", "int8"]) == 1
    assert "exists already" in capsys.readouterr().err
    for missing in (tmp_path / "nothing", TOY / "config.json"):
        assert main([str(missing), "--output", str(tmp_path / "again"), "--quantization", "int4"]) == 1
        assert capsys.readouterr().err.endswith(f"{missing} is no folder\n")
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
        ("weight_codes", lambda tensor: tensor[:, :-20]),
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
