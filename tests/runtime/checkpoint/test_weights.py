from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from baton.runtime.checkpoint.model_files import ModelLoadError
from baton.runtime.checkpoint.weights import fill_dummy, load_weights, mapped_tensor


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
            r"a\.weight \(model\.safetensors\) has shape \[2, 3\], .* asks for \[3, 2\]",
        ),
    ],
)
def test_mismatched_tensors_are_named(tmp_path, change, message):
    given = tensors()
    change(given)
    save_file(given, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=message):
        load_weights(views(), tmp_path)


def test_all_problems_are_named_at_once(tmp_path):
    save_file({"a.weight": torch.ones(3, 3), "x": torch.ones(1)}, tmp_path / "model.safetensors")
    message = r"2 missing tensor\(s\): b\.weight, c\.norm\.weight; 1 unexpected tensor\(s\): x; tensor a\.weight"
    with pytest.raises(ModelLoadError, match=message):
        load_weights(views(), tmp_path)


def test_missing_head_suggests_the_tied_one(tmp_path):
    save_file(tensors(), tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"missing tensor\(s\): lm_head.*set tie_word_embeddings to true"):
        load_weights(views() | {"lm_head.weight": torch.zeros(2)}, tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ["a.weight", "c.norm.weight"])
def test_weights_that_are_not_finite_are_named(tmp_path, name, value):
    given = tensors()
    given[name].view(-1)[1] = value
    save_file(given, tmp_path / "model.safetensors")
    message = rf"tensor {name} in \S+model\.safetensors holds 1 number\(s\) that are NaN or infinite, of \d"
    with pytest.raises(ModelLoadError, match=message):
        load_weights(views(), tmp_path)


def test_weights_too_large_for_the_dtype_name_another(tmp_path):
    given = tensors() | {"b.weight": torch.full((4,), 1e5, dtype=torch.bfloat16)}
    save_file(given, tmp_path / "model.safetensors")
    halves = {name: view.half() for name, view in views().items()}
    with pytest.raises(ModelLoadError, match=r"b\.weight .* up to 99840, .* infinite in float16; use --dtype bfloat16"):
        load_weights(halves, tmp_path)


def test_head_beside_a_tied_embedding_must_equal_it(tmp_path):
    embedding = torch.randn(5000, 2)
    given = tensors() | {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding.clone()}
    needed = views() | {"model.embed_tokens.weight": torch.zeros(5000, 2)}
    save_file(given, tmp_path / "model.safetensors")
    load_weights(needed, tmp_path)
    given["lm_head.weight"][4999, 1] += 1
    save_file(given, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"ties the head .*differs from model.embed_tokens.*to false"):
        load_weights(needed, tmp_path)


def test_text_part_of_a_multimodal_checkpoint_is_loaded(tmp_path):
    given, found = tensors(), {f"model.{name}": view for name, view in views().items()}
    stored = {f"language_model.model.{name}": tensor for name, tensor in given.items()}
    save_file(stored | {"vision_tower.conv.weight": torch.ones(1)}, tmp_path / "model.safetensors")
    load_weights(found, tmp_path)
    assert torch.equal(found["model.b.weight"], given["b.weight"])
    mapped = mapped_tensor(tmp_path, "model.b.weight")
    assert mapped is not None and torch.equal(mapped, given["b.weight"])
    assert mapped_tensor(tmp_path, "model.x") is None
    stored |= {"model.b.weight": torch.ones(4)}
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"holds model\.b\.weight twice, as \S*b\.weight and as \S*b\.weight"):
        load_weights(found, tmp_path)


def test_layers_that_predict_further_tokens_are_skipped(tmp_path, caplog):
    caplog.set_level("INFO")
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2, "num_nextn_predict_layers": 1}))
    save_file(tensors() | {"model.layers.2.eh_proj.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    load_weights(views(), tmp_path)
    assert "tensors that the model does not need: 1 of layers that predict several tokens" in caplog.text
    save_file(tensors() | {"model.layers.3.eh_proj.weight": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"unexpected tensor\(s\): model\.layers\.3"):
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


@pytest.mark.parametrize(
    "name, kind", [("pytorch_model.bin", "its weights as pickles"), ("a.pt", "as pickles"), ("q4.gguf", "a GGUF file")]
)
def test_weights_of_another_format_are_recognised(tmp_path, name, kind):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(ModelLoadError, match=f"{kind} \\({name}\\)"):
        load_weights(views(), tmp_path)


def test_dummy_weights_are_seeded_and_norms_are_one():
    first, second, other = views(), views(), views()
    fill_dummy(first)
    fill_dummy(second)
    fill_dummy(other, seed=1)
    assert torch.equal(first["a.weight"], second["a.weight"]) and not torch.equal(first["a.weight"], other["a.weight"])
    assert bool(first["a.weight"].any()) and bool((first["c.norm.weight"] == 1).all())
