"""Checkpoints of GPTQ, AWQ, compressed-tensors and fp8: numbers, refusals, and contradictions of config and tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from baton.runtime.checkpoint.model_files import ModelLoadError
from baton.runtime.checkpoint.weight_source import open_source
from baton.runtime.checkpoint.weights import load_weights, mapped_tensor
from baton.runtime.layers.quantized_weights import ExpertsWeight, Float8Weight, PackedWeight, QuantizedWeight
from baton.runtime.layers.weight_slots import ExpertsSlot, WeightSlot, widened
from tests.doubles.quantized_checkpoints import FORMATS, Format, Tensors

OUT, INTO = 192, 256
LAYER = "model.layers.0.self_attn.q_proj"

FORMS = {
    "gptq4": "int4, groups of 32", "gptq4-zeros": "int4, groups of 64 with minima",
    "gptq4-v2": "int4, groups of 128 with minima", "gptq4-outputs": "int4, groups of 128",
    "gptq8": "int8, groups of 64", "gptq8-zeros": "int8, groups of 128 with minima", "gptq8-outputs": "int8",
    "awq32": "int4, groups of 32 with minima", "awq64": "int4, groups of 64 with minima",
    "awq128": "int4, groups of 128 with minima", "w4a16": "int4, groups of 128",
    "w4a16-zeros": "int4, groups of 64 with minima", "w4a16-plain-zeros": "int4, groups of 32 with minima",
    "w8a16": "int8", "w8a16-groups": "int8, groups of 32", "w8a8": "int8",
    "w8a8-zeros": "int8, groups of 128 with minima",
}  # fmt: skip
"""Of each format of integers, the form of its weights."""

ROUNDED = ("awq32", "w4a16-plain-zeros")
"""Formats with minima of groups so small that their tables are float16."""


def write(folder: Path, form: Format, tensors: Tensors, **config: Any) -> None:
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": form.config | config}))


def made(form: Format, *, scale: float = 0.05) -> tuple[Tensors, torch.Tensor]:
    weight = torch.randn(OUT, INTO, generator=torch.Generator().manual_seed(1)) * scale
    return form.write(LAYER, weight)


def read_packed(folder: Path, name: str = f"{LAYER}.weight") -> PackedWeight:
    weight = open_source(folder).read(name)
    assert isinstance(weight, QuantizedWeight | Float8Weight)
    return weight


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_are_those_of_the_file(tmp_path, name):
    tensors, numbers = made(FORMATS[name])
    write(tmp_path, FORMATS[name], tensors | {"model.norm.weight": torch.ones(INTO)})
    source = open_source(tmp_path)
    assert set(source.tensors) == {f"{LAYER}.weight", "model.norm.weight"}
    stored = source.tensors[f"{LAYER}.weight"]
    assert stored.shape == (OUT, INTO) and stored.is_packed and not source.tensors["model.norm.weight"].is_packed
    weight = source.read(f"{LAYER}.weight")
    assert isinstance(weight, QuantizedWeight | Float8Weight) and weight.shape == (OUT, INTO)
    if isinstance(weight, QuantizedWeight):
        assert str(weight.form) == FORMS[name]
    else:
        assert weight.group == (64 if name == "fp8-blocks" else 128 if name == "deepseek-fp8" else 0)
    if name in ROUNDED:
        assert isinstance(weight, QuantizedWeight) and weight.scales is not None
        steps = weight.scales.float().max() * weight.rows.max()
        assert (weight.dequantized() - numbers).abs().max() < 16 * steps * 2**-11
    else:
        torch.testing.assert_close(weight.dequantized(), numbers, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["gptq4", "w8a8", "deepseek-fp8"])
def test_destinations_are_tensors_or_slots(tmp_path, name):
    class Slot:
        shape = OUT, INTO
        stored: torch.Tensor | PackedWeight | ExpertsWeight | None = None

        def store(self, weight: torch.Tensor | PackedWeight | ExpertsWeight) -> None:
            self.stored = weight

    tensors, _ = made(FORMATS[name])
    write(tmp_path, FORMATS[name], tensors)
    slot, view = Slot(), torch.zeros(2, OUT, INTO, dtype=torch.bfloat16)
    load_weights({f"{LAYER}.weight": slot}, tmp_path)
    assert isinstance(slot.stored, Float8Weight if name == "deepseek-fp8" else QuantizedWeight)
    load_weights({f"{LAYER}.weight": view}, tmp_path)
    assert all(torch.equal(copy, slot.stored.dequantized().bfloat16()) for copy in view)
    assert mapped_tensor(tmp_path, f"{LAYER}.weight") is None


def test_plain_weights_fill_slots(tmp_path):
    class Slot:
        shape = 3, 2

        def store(self, weight: torch.Tensor | PackedWeight | ExpertsWeight) -> None:
            assert isinstance(weight, torch.Tensor)
            self.stored = weight.clone()

    slot, given = Slot(), torch.randn(3, 2)
    save_file({"a.weight": given}, tmp_path / "model.safetensors")
    load_weights({"a.weight": slot}, tmp_path)
    assert torch.equal(slot.stored, given)
    save_file({"a.weight": given / 0}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"a\.weight .* holds 6 number\(s\) that are NaN or infinite"):
        load_weights({"a.weight": slot}, tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor", "value", "message"),
    [
        ("gptq4", "scales", float("nan"), r"has 192 scale\(s\) or code\(s\) that are NaN"),
        ("w8a8", "weight_scale", float("inf"), r"has 1 scale\(s\)"),
        ("deepseek-fp8", "weight", float("nan"), r"has 256 scale\(s\) or code\(s\)"),
    ],
)
def test_numbers_that_are_not_finite_are_refused(tmp_path, name, tensor, value, message):
    tensors, _ = made(FORMATS[name])
    tensors[f"{LAYER}.{tensor}"][0] = value
    write(tmp_path, FORMATS[name], tensors)
    with pytest.raises(ModelLoadError, match=message):
        load_weights({f"{LAYER}.weight": torch.zeros(OUT, INTO)}, tmp_path)


def test_scales_beyond_half_precision_keep_their_digits(tmp_path):
    """bfloat16 scales of small groups reach further than float16; rows take the range."""
    form = FORMATS["w8a16-groups"]
    tensors, numbers = made(form, scale=1e9)
    tensors[f"{LAYER}.weight_scale"][1] = 0
    numbers[1] = 0
    write(tmp_path, form, tensors)
    weight = read_packed(tmp_path)
    torch.testing.assert_close(weight.dequantized(), numbers, rtol=1e-6, atol=0)


def test_modules_may_be_packed_apart(tmp_path):
    form = FORMATS["w4a16"]
    weights = torch.randn(2, OUT, INTO)
    tensors, first = form.write("model.layers.0.mlp.up_proj", weights[0])
    eight, second = FORMATS["w8a16"].write("model.layers.1.mlp.up_proj", weights[1])
    groups = form.config["config_groups"] | {
        "group_1": FORMATS["w8a16"].config["config_groups"]["group_0"] | {"targets": [r"re:.*layers\.1\..*"]}
    }
    write(tmp_path, form, tensors | eight, config_groups=groups)
    for layer, numbers in enumerate((first, second)):
        assert torch.allclose(read_packed(tmp_path, f"model.layers.{layer}.mlp.up_proj.weight").dequantized(), numbers)


def test_parts_may_lie_in_different_files(tmp_path):
    form = FORMATS["awq64"]
    tensors, numbers = made(form)
    write(tmp_path, form, {})
    (tmp_path / "model.safetensors").unlink()
    names = {}
    for number, (name, tensor) in enumerate(tensors.items()):
        save_file({name: tensor}, tmp_path / f"{number}.safetensors")
        names[name] = f"{number}.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert torch.allclose(read_packed(tmp_path).dequantized(), numbers)


def test_biases_of_zero_that_quantisers_add_are_left_out(tmp_path, caplog):
    caplog.set_level("INFO")
    form = FORMATS["gptq4"]
    tensors, _ = made(form)
    tensors[f"{LAYER}.bias"] = torch.zeros(OUT)
    write(tmp_path, form, tensors)
    load_weights({f"{LAYER}.weight": torch.zeros(OUT, INTO)}, tmp_path)
    assert "1 of biases of quantised layers, all of them 0" in caplog.text
    tensors[f"{LAYER}.bias"][3] = 1
    write(tmp_path, form, tensors)
    with pytest.raises(ModelLoadError, match=r"1 unexpected tensor\(s\): .*q_proj\.bias"):
        load_weights({f"{LAYER}.weight": torch.zeros(OUT, INTO)}, tmp_path)


def cut(name: str, part: slice) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[f"{LAYER}.{name}"] = tensors[f"{LAYER}.{name}"][part].contiguous()

    return change


def without(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        del tensors[f"{LAYER}.{name}"]

    return change


@pytest.mark.parametrize(
    ("name", "change", "config", "message"),
    [
        ("gptq4", cut("scales", slice(4)), {}, r"group_size 32\) needs scales \[8, 192\]; it has qweight I32"),
        ("gptq4", cut("qzeros", slice(4)), {}, r"needs zero points I32 \[8, 24\]"),
        ("gptq4", lambda t: None, {"group_size": 64}, r"group_size 64\) needs scales \[4, 192\]"),
        ("gptq4", lambda t: None, {"bits": 8}, r"8 bits, .* needs scales"),
        ("gptq4", without("scales"), {}, r"needs scales of a floating-point type"),
        ("awq64", without("qzeros"), {}, r"needs qzeros"),
        ("awq64", lambda t: None, {"quant_method": "gptq", "sym": True}, r"packed as awq.*declares .* gptq there"),
        ("gptq4", lambda t: None, {"quant_method": "awq"}, r"packed as gptq.*declares .* awq there"),
        ("w4a16", without("weight_shape"), {}, r"needs weight_shape"),
        ("w8a8", cut("weight_scale", slice(7)), {}, r"needs scales \[192, 1\]"),
        ("deepseek-fp8", cut("weight_scale_inv", slice(1)), {}, r"needs scales \[2, 2\], for blocks of \[128, 128\]"),
        ("deepseek-fp8", lambda t: None, {"quant_method": "awq", "bits": 4, "group_size": 64}, r"packed as float8"),
        ("deepseek-fp8", lambda t: None, {"weight_block_size": [0, 1]}, r"\(fp8\) cannot be understood"),
        ("gptq4", lambda t: None, {"bits": "x"}, r"\(gptq\) cannot be understood: ValueError"),
    ],
)  # fmt: skip
def test_metadata_that_contradict_the_tensors(tmp_path, name, change, config, message):
    tensors, _ = made(FORMATS[name])
    change(tensors)
    write(tmp_path, FORMATS[name], tensors, **config)
    with pytest.raises(ModelLoadError, match=message):
        open_source(tmp_path)


def test_contradictions_that_only_numbers_show(tmp_path):
    tensors, _ = made(FORMATS["gptq4"])
    tensors[f"{LAYER}.g_idx"] = tensors[f"{LAYER}.g_idx"].flip(0).contiguous()
    write(tmp_path, FORMATS["gptq4"], tensors)
    with pytest.raises(ModelLoadError, match=r"q_proj assigns inputs to groups .* desc_act false"):
        open_source(tmp_path).read(f"{LAYER}.weight")
    tensors, _ = made(FORMATS["w4a16"])
    tensors[f"{LAYER}.weight_shape"] = torch.tensor([OUT, INTO - 1])
    write(tmp_path, FORMATS["w4a16"], tensors)
    with pytest.raises(ModelLoadError, match=r"q_proj has weight_shape \[192, 255\], but \[192, 256\] codes"):
        open_source(tmp_path).read(f"{LAYER}.weight")


def test_declared_quantisation_without_packed_tensors(tmp_path):
    write(tmp_path, FORMATS["gptq4"], {f"{LAYER}.weight": torch.ones(2, 2)})
    with pytest.raises(ModelLoadError, match=r"declares quantised weights \(gptq\), but no tensor is packed"):
        open_source(tmp_path)


WEIGHTS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}


def compressed(**weights: Any) -> dict[str, Any]:
    form = weights.pop("format", "pack-quantized")
    groups = {"group_0": {"targets": ["Linear"], "weights": WEIGHTS | weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, r"quantised weights \(bitsandbytes\) are not supp"),
        ({"load_in_8bit": True}, r"quantised weights \(bitsandbytes\)"),
        ({"quant_method": "hqq"}, r"\(hqq\) are not supported; supported are GPTQ and AWQ .*Use another release"),
        ("strange", r"\(strange\) are not supported"),
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, r"GPTQ of 3 bits is not supported; 4 and 8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}, r"desc_act .*not supported; take"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, r"checkpoint_format 'marlin' is not"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"x": {}}}, r"settings by module \(dynamic\)"),
        ({"quant_method": "awq", "bits": 8, "group_size": 128}, r"AWQ of 8 bits is not supported; 4"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, r"version 'gemv' packs"),
        (compressed(format="marlin-24"), r"format 'marlin-24' \(group_0\) is not supported; pack-quantized"),
        (compressed(num_bits=3), r"pack-quantized with weights of 3 bits \(int\)"),
        (compressed(actorder="group"), r"actorder 'group' .*not supported"),
        (compressed(strategy="tensor_group"), r"strategy 'tensor_group'"),
        (compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, r"sparse weights \(sparse-24"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, r"kind 'e5m2' are not supported; e4m3 is"),
    ],
)
def test_formats_that_are_not_read_are_refused_by_name(tmp_path, config, message):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    save_file({f"{LAYER}.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=message):
        open_source(tmp_path)


@pytest.mark.parametrize(("name", "file"), [("gptq8", "quantize_config.json"), ("awq64", "quant_config.json")])
def test_settings_may_be_in_a_file_of_their_own(tmp_path, name, file):
    form = FORMATS[name]
    tensors, numbers = made(form)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        ModelLoadError, match=r"few bits \(.*q_proj\.qweight\), but its config\.json has no quantization"
    ):
        open_source(tmp_path)
    old = {"group_size": "q_group_size", "bits": "w_bit"} if file == "quant_config.json" else {}
    settings = {old.get(key, key): value for key, value in form.config.items() if key != "quant_method"}
    (tmp_path / file).write_text(json.dumps(settings))
    assert torch.allclose(read_packed(tmp_path).dequantized(), numbers)


def test_targets_name_modules_of_the_whole_model(tmp_path):
    form = FORMATS["w8a16"]
    tensors, numbers = form.write(f"model.language_model.{LAYER.removeprefix('model.')}", torch.randn(OUT, INTO))
    group = form.config["config_groups"]["group_0"]
    targets = [f"model.language_model.{LAYER.removeprefix('model.')}"]
    write(tmp_path, form, tensors, config_groups={"group_0": group | {"targets": targets}})
    assert torch.allclose(read_packed(tmp_path).dequantized(), numbers)


def write_experts(folder: Path, seed: int = 3) -> tuple[Tensors, torch.Tensor]:
    """Random experts of gpt-oss and the numbers that transformers makes of them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (3, 40, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(118, 124, (3, 40, 2), dtype=torch.uint8, generator=generator)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors = {f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": torch.ones(3, 40)}
    write(folder, Format({"quant_method": "mxfp4"}, lambda *_: ({}, torch.zeros(0))), tensors)
    return tensors, convert_moe_packed_tensors(blocks.clone(), scales.clone())


def test_experts_of_gpt_oss_are_widened(tmp_path):
    _, numbers = write_experts(tmp_path)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    source = open_source(tmp_path)
    assert set(source.tensors) == {name, f"{name}_bias"} and source.tensors[name].shape == (3, 64, 40)
    views = {name: torch.zeros(3, 64, 40), f"{name}_bias": torch.zeros(3, 40)}
    load_weights(views, tmp_path)
    assert torch.equal(views[name], numbers.float()) and numbers.shape == (3, 64, 40)


def test_experts_of_gpt_oss_stay_packed_in_slots(tmp_path):
    _, numbers = write_experts(tmp_path)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    halves = [[WeightSlot(16, 64, None), WeightSlot(24, 64, None)] for _ in range(3)]
    slot, bias = ExpertsSlot(halves, is_transposed=True), torch.zeros(3, 40)
    assert slot.shape == (3, 64, 40)
    load_weights({name: slot, f"{name}_bias": bias}, tmp_path)
    for expert, pair in enumerate(halves):
        weights = [each.weight for each in pair]
        assert all(isinstance(each, QuantizedWeight) and each.form.codebook == "mxfp4" for each in weights)
        whole = torch.cat([widened(each, torch.float32) for each in weights])
        assert torch.equal(whole, numbers[expert].float().t())
    assert slot.nbytes < numbers.nbytes / 3


def test_experts_without_their_scales_are_refused(tmp_path):
    tensors, _ = write_experts(tmp_path)
    for change in (None, torch.ones(3, 40, 1, dtype=torch.uint8), torch.ones(3, 40, 2)):
        changed = {name: tensor for name, tensor in tensors.items() if change is not None or "scales" not in name}
        if change is not None:
            changed["model.layers.0.mlp.experts.gate_up_proj_scales"] = change
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(ModelLoadError, match=r"experts\.gate_up_proj \(mxfp4\) need blocks U8 .*scales U8"):
            open_source(tmp_path)


def test_act_order_without_groups_is_harmless(tmp_path):
    form = FORMATS["gptq4-outputs"]
    tensors, numbers = made(form)
    write(tmp_path, form, tensors, desc_act=True)
    assert torch.allclose(read_packed(tmp_path).dequantized(), numbers)


def test_scheme_of_the_kv_cache_is_ignored_with_a_line(tmp_path, caplog):
    caplog.set_level("INFO")
    tensors, _ = made(FORMATS["w8a8"])
    tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    write(tmp_path, FORMATS["w8a8"], tensors, kv_cache_scheme={"num_bits": 8})
    assert set(open_source(tmp_path).tensors) == {f"{LAYER}.weight"}
    assert "kv_cache_scheme is ignored" in caplog.text


def test_8_bit_floats_in_groups_have_all_their_scales(tmp_path):
    weights = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 64}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    config |= {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}
    codes, scales = torch.randn(OUT, INTO).to(torch.float8_e4m3fn), torch.rand(OUT, INTO // 64) + 0.5
    tensors = {f"{LAYER}.weight": codes, f"{LAYER}.weight_scale": scales}
    write(tmp_path, Format(config, lambda *_: ({}, torch.zeros(0))), tensors)
    assert torch.equal(read_packed(tmp_path).dequantized(), codes.float() * scales.repeat_interleave(64, dim=1))


def test_module_with_a_packed_and_a_plain_weight_is_refused(tmp_path):
    tensors, _ = made(FORMATS["awq64"])
    write(tmp_path, FORMATS["awq64"], tensors | {f"{LAYER}.weight": torch.zeros(OUT, INTO)})
    with pytest.raises(ModelLoadError, match="has a packed weight and a plain one"):
        open_source(tmp_path)


@pytest.mark.parametrize("method", [[], {}, 7, ["awq"]])
def test_methods_that_are_no_names_are_refused(tmp_path, method):
    write(tmp_path, Format({"quant_method": method}, lambda *_: ({}, torch.zeros(0))), {"a.weight": torch.zeros(2, 2)})
    with pytest.raises(ModelLoadError, match=r"quantised weights \(.*\) are not supported"):
        open_source(tmp_path)
