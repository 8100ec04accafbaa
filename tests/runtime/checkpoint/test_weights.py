from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from baton.runtime.checkpoint.model_files import ModelLoadError
from baton.runtime.checkpoint.weights import fill_dummy, load_weights


def views() -> dict[str, torch.Tensor]:
    return {"a.weight": torch.zeros(3, 2), "b.weight": torch.zeros(4), "c.norm.weight": torch.zeros(5, 2)}


def tensors() -> dict[str, torch.Tensor]:
    return {"a.weight": torch.randn(3, 2), "b.weight": torch.randn(4), "c.norm.weight": torch.randn(2)}


def save_shards(folder, shards: list[dict[str, torch.Tensor]]) -> None:
    names = {}
    for number, shard in enumerate(shards):
        save_file(shard, folder / f"part-{number}.safetensors")
        names |= dict.fromkeys(shard, f"part-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def test_shards_fill_views_and_repeat_rows(tmp_path):
    given, found = tensors(), views()
    save_shards(tmp_path, [{"a.weight": given["a.weight"]}, {k: given[k] for k in ("b.weight", "c.norm.weight")}])
    load_weights(found, tmp_path)
    assert torch.equal(found["a.weight"], given["a.weight"]) and torch.equal(found["b.weight"], given["b.weight"])
    assert all(torch.equal(row, given["c.norm.weight"]) for row in found["c.norm.weight"])


def test_single_file_without_index_is_converted_to_dtype(tmp_path):
    given, found = tensors(), views()
    save_file({name: value.to(torch.bfloat16) for name, value in given.items()}, tmp_path / "model.safetensors")
    load_weights(found, tmp_path)
    assert torch.equal(found["b.weight"], given["b.weight"].to(torch.bfloat16).float())


def test_computed_and_tied_tensors_are_skipped(tmp_path):
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2), "lm_head.weight": torch.ones(2)}
    save_file(tensors() | extra, tmp_path / "model.safetensors")
    load_weights(views(), tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("b.weight"), r"1 missing tensor\(s\): b\.weight"),
        (lambda t: t.update({"x.bias": torch.ones(1)}), r"1 unexpected tensor\(s\): x\.bias"),
        (
            lambda t: t.update({"a.weight": torch.ones(2, 3)}),
            r"a\.weight has shape \[2, 3\], .* asks for \[3, 2\]",
        ),
    ],
)
def test_mismatched_tensors_are_named(tmp_path, change, message):
    given = tensors()
    change(given)
    save_file(given, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=message):
        load_weights(views(), tmp_path)


def test_broken_weight_folders_are_refused(tmp_path):
    with pytest.raises(ModelLoadError, match=r"no \*\.safetensors file.*--load-format dummy"):
        load_weights(views(), tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    with pytest.raises(ModelLoadError, match=r"model\.safetensors cannot be read"):
        load_weights(views(), tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a.weight": "part-7.safetensors"}}))
    with pytest.raises(ModelLoadError, match=r"lacks part-7\.safetensors"):
        load_weights(views(), tmp_path)
    index.write_text("[]")
    with pytest.raises(ModelLoadError, match="no safetensors index"):
        load_weights(views(), tmp_path)


@pytest.mark.parametrize("name, kind", [("pytorch_model.bin", "pickles"), ("a.pt", "pickles"), ("q4.gguf", "GGUF")])
def test_weights_of_another_format_are_recognised(tmp_path, name, kind):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelLoadError, match=f"weights as {kind} \\({name}\\)"):
        load_weights(views(), tmp_path)


def test_dummy_weights_are_seeded_and_norms_are_one():
    first, second, other = views(), views(), views()
    fill_dummy(first)
    fill_dummy(second)
    fill_dummy(other, seed=1)
    assert torch.equal(first["a.weight"], second["a.weight"]) and not torch.equal(first["a.weight"], other["a.weight"])
    assert bool(first["a.weight"].any()) and bool((first["c.norm.weight"] == 1).all())
