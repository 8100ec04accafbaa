"""Models with weights in few bits against transformers with the same numbers, its inputs rounded in the same way."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from baton.attention.numba_paged.vectors import LANES
from baton.entrypoints.engine import Engine
from baton.runtime.config import ModelArgs
from baton.runtime.layers.numba_ops import packed_products
from baton.runtime.layers.numba_ops.narrow_products import NarrowBlocks
from baton.runtime.layers.quantize import narrowed, quantize
from baton.runtime.layers.quantized_weights import FLOAT8, INT4, INT8, WeightForm
from baton.runtime.layers.weight_slots import widened
from baton.runtime.models.decoder import Decoder
from baton.runtime.runner.model_runner import ModelRunner
from baton.runtime.runner.quantized_folder import quantize_folder
from tests.doubles.lowered_processor import lower_to_avx2
from tests.doubles.model_driver import ModelDriver
from tests.doubles.quantized_checkpoints import FORMATS, write_packed
from tests.doubles.tiny_models import MODELS, make_reference

pytestmark = pytest.mark.equality

TOY = Path(__file__).parents[2] / "examples" / "toy_model"
NEW_TOKENS = 24
TIE = 0.03
"""A rounded input lies now and then in the middle of two numbers, and arithmetic in another order chooses the other."""
PROMPTS = [[5, 17, 300, 41, 9, 1001, 3], [1699, 88, 12, 12, 700, 60, 61, 62, 63, 1204, 15], list(range(40, 300))]


def rounded(x: torch.Tensor) -> torch.Tensor:
    """To 8 bits, in spans of 32."""
    spans = x.unflatten(-1, (-1, 32))
    scales = spans.abs().amax(-1, keepdim=True) / 127
    return (torch.where(scales > 0, (spans / scales).round(), 0.0) * scales).flatten(-2)


def rounding_reference(folder: Path) -> Any:
    """transformers' model, every product of which rounds its inputs."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))
    return model


@torch.inference_mode()
def check(engine: Engine, model: Any, tie: float = TIE) -> None:
    """Greedy tokens are the reference's, but where its two best logits differ by less than ``tie``."""
    options = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    together = engine.generate(input_ids=PROMPTS, sampling_params=options)
    for prompt, answer in zip(PROMPTS, together):
        tokens = answer["output_ids"]
        scores = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        chosen = scores.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert len(tokens) == NEW_TOKENS and bool((scores.amax(1) - chosen < tie).all()), (prompt, tokens)
        # The same row alone, from what the cache still has, and in pieces: not one number differs.
        assert engine.generate(input_ids=prompt, sampling_params=options)["output_ids"] == tokens


@pytest.mark.parametrize(
    ("name", "form", "backend"),
    [
        *(("int8", INT8, "auto"), ("int4", INT4, "auto"), ("fp8", FLOAT8, "auto")),
        *(("int8", INT8, "torch"), ("fp8", FLOAT8, "torch")),
    ],
)
def test_quantised_when_loaded(name: str, form: WeightForm, backend: Any) -> None:
    """And with torch's products, which read the weights as floats and round no input."""
    model = rounding_reference(TOY)
    with torch.no_grad():
        for module in model.modules():
            is_head = module is model.get_output_embeddings()
            if backend == "torch" or (form == FLOAT8 and not is_head):
                module._forward_pre_hooks.clear()
            if isinstance(module, nn.Linear):
                narrow = narrowed(module.weight, INT8 if is_head else form)
                module.weight = nn.Parameter(widened(narrow, torch.float32))
        model.get_input_embeddings().weight = model.get_output_embeddings().weight
    with Engine(
        model_path=str(TOY),
        quantization=name,
        dtype="float32",
        kv_cache_dtype="float32",
        max_total_tokens=2048,
        chunked_prefill_size=100,
        linear_backend=backend,
    ) as engine:
        check(engine, model, 1e-4 if backend == "torch" else TIE)


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_converted_folders_give_the_same_logprobs(name: str, tmp_path: Path) -> None:
    """Bit for bit those of a start that quantises."""
    quantize_folder(TOY, tmp_path / "made", name)
    options: Any = {"temperature": 0.0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    found = []
    for settings in ({"model_path": str(TOY), "quantization": name}, {"model_path": str(tmp_path / "made")}):
        with Engine(max_total_tokens=2048, **settings) as engine:  # type: ignore[arg-type]
            answers = engine.generate(input_ids=PROMPTS, sampling_params=options, return_logprob=True)
        found.append([(each["output_ids"], each["meta_info"]["output_token_logprobs"]) for each in answers])
    assert found[0] == found[1]


def test_keys_and_values_in_bfloat16() -> None:
    """The default beside weights in few bits: alone, from the cache and in pieces a row's numbers are the same."""
    model = rounding_reference(TOY)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight = nn.Parameter(quantize(module.weight, INT8).dequantized())
        model.get_input_embeddings().weight = model.get_output_embeddings().weight
    with Engine(model_path=str(TOY), quantization="int8", max_total_tokens=2048, chunked_prefill_size=100) as engine:
        check(engine, model, tie=0.1)


@pytest.mark.parametrize("name", ["gptq4-zeros", "awq64"])
def test_packed_checkpoints_as_they_are(tmp_path: Path, name: str) -> None:
    write_packed(TOY, tmp_path / "packed", tmp_path / "widened", FORMATS[name])
    model = rounding_reference(tmp_path / "widened")
    head = model.get_output_embeddings()
    head._forward_pre_hooks.clear()  # the file has floats for it
    floats: Any = {"dtype": "float32", "kv_cache_dtype": "float32"}
    with Engine(model_path=str(tmp_path / "packed"), max_total_tokens=2048, **floats) as engine:
        check(engine, model)


def test_floats_when_another_product_is_asked_for(tmp_path: Path) -> None:
    """The oracle of the kernels: nothing is rounded but the weights."""
    from transformers import AutoModelForCausalLM

    write_packed(TOY, tmp_path / "packed", tmp_path / "widened", FORMATS["w4a16"])
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "widened", dtype=torch.float32)
    options = {"temperature": 0.0, "max_new_tokens": 2}
    floats: Any = {"dtype": "float32", "kv_cache_dtype": "float32", "linear_backend": "torch"}
    with Engine(model_path=str(tmp_path / "packed"), max_total_tokens=2048, **floats) as engine:
        found = engine.generate(input_ids=PROMPTS[0], sampling_params=options, return_logprob=True)
    with torch.inference_mode():
        scores = model(torch.tensor([PROMPTS[0]])).logits[0, -1].log_softmax(-1)
    assert abs(found["meta_info"]["output_token_logprobs"][0][0] - float(scores.max())) < 1e-4


@pytest.mark.parametrize("name", ["fp8-outputs", "fp8-tensor", "fp8-blocks", "deepseek-fp8"])
def test_8_bit_floats_stay_so(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is rounded beyond what the checkpoint has rounded."""
    from transformers import AutoModelForCausalLM

    write_packed(TOY, tmp_path / "packed", tmp_path / "widened", FORMATS[name])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "widened", dtype=torch.float32)
    packed, pack_float8 = [], packed_products.pack_float8
    monkeypatch.setattr(packed_products, "pack_float8", lambda weight: packed.append(weight) or pack_float8(weight))
    floats: Any = {"dtype": "float32", "kv_cache_dtype": "float32"}
    with Engine(model_path=str(tmp_path / "packed"), max_total_tokens=2048, **floats) as engine:
        assert len(packed) >= 4 * model.config.num_hidden_layers  # qkv, o, gate and up, down
        check(engine, model, tie=1e-3)


@pytest.mark.parametrize("stored", ["bfloat16", "float16"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_weights_of_16_bits_are_computed_in_float32(
    stored: str, is_tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the processor does not multiply them, nothing is rounded but what the checkpoint has rounded."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TOY, dtype=torch.float32)
    if not is_tied:
        model.config.tie_word_embeddings = False
        head = nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False)
        model.lm_head = head
        nn.init.normal_(head.weight, std=0.05, generator=torch.Generator().manual_seed(0))
    model.to(getattr(torch, stored)).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOY / name, tmp_path)
    lower_to_avx2(monkeypatch)
    monkeypatch.setattr("baton.runtime.layers.dtype_trial.SMALL_MODEL_BYTES", 0)
    packed: list[tuple[int, int]] = []
    pack_floats = packed_products.pack_floats

    def noted(weight: torch.Tensor) -> NarrowBlocks:
        assert weight.dtype == getattr(torch, stored)
        out, into = weight.shape
        packed.append((out, into))
        return pack_floats(weight)

    monkeypatch.setattr(packed_products, "pack_floats", noted)
    with Engine(
        model_path=str(tmp_path), max_total_tokens=2048, chunked_prefill_size=100, attention_backend="numba"
    ) as engine:
        of_model = [size for size in packed if size != (32, 64)]  # less those that probe the kernel
        assert len(of_model) == 4 * model.config.num_hidden_layers + 1  # qkv, o, gate and up, down; the head
        check(engine, AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32), tie=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("key", MODELS)
def test_weights_of_16_bits_of_every_family(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits are those of plain floats; no layer that computes its weights anew reads them in the wrong form."""
    make_reference(*MODELS[key]).to(torch.bfloat16).save_pretrained(tmp_path)
    lower_to_avx2(monkeypatch)
    monkeypatch.setattr("baton.runtime.layers.dtype_trial.SMALL_MODEL_BYTES", 0)
    found = []
    for backend in ("auto", "torch"):
        args = ModelArgs(model_path=str(tmp_path), device="cpu", dtype="float32", linear_backend=backend)
        runner = ModelRunner(args, context_length=0, num_rows=4, page_size=1, max_total_tokens=512, max_states=8)
        assert isinstance(runner._model, Decoder)
        linears = [linear for layer in runner._model.layers for linear in layer.linears if not linear.is_shared]
        packed = [linear for linear in linears if linear.packed is not None]
        assert packed == [each for each in linears if backend == "auto" and each.in_features % LANES == 0]
        driver = ModelDriver(runner, seed=1)
        sequence = driver.open(np.arange(1, 38, dtype=np.int32))
        prompt = driver.step([(sequence, 37)]).logits
        sequence.ids = np.append(sequence.ids, np.int32(7))
        found.append(torch.cat((prompt, driver.step([(sequence, 1)]).logits)))
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=0.0)
