"""Models computed by transformers' own code on Baton's pools: equal to transformers alone, or refused by name."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.runtime.checkpoint.model_files import ModelLoadError, UnsupportedModelError
from baton.runtime.config import ModelArgs
from baton.runtime.layers import product_trials
from baton.runtime.layers.products import ONEDNN, PLAIN, ProductChoice
from baton.runtime.runner import model_runner, transformers_model
from baton.runtime.runner.model_runner import ModelRunner
from baton.runtime.runner.module_standins import EmbeddingStandin, GatedMLPStandin, LinearStandin, NormStandin
from baton.runtime.runner.transformers_model import OTHER_MASK, MaskRule, TransformersModel, attend, trace_mask
from tests.doubles.model_driver import ModelDriver
from tests.doubles.tiny_models import TINY, make_reference

pytestmark = pytest.mark.equality

LATENT = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "num_key_value_heads": 6,
}
SHARED_KV = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 20,
    "head_dim": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 131,
    "laurel_rank": 4,
    "activation_sparsity_pattern": [0.0] * 4,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8, "sliding_window": 20}
WIDE = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 64}
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "soft caps, windows": ("Gemma2", "", {"head_dim": 8, "sliding_window": 20, "query_pre_attn_scalar": 8}),
    "sinks, experts": ("GptOss", "", {**EXPERTS, "rope_parameters": YARN}),
    "values narrower than keys": ("DeepseekV3", "", LATENT),
    "layers that share KV": ("Gemma3nText", "Gemma3nForCausalLM", SHARED_KV),
    "learned positions": ("OPT", "", {"ffn_dim": 80, "word_embed_proj_dim": 48}),
    "scaled logits": ("Granite", "", {"logits_scaling": 2.0}),
}


def make_runner(folder: Path, **settings: Any) -> ModelRunner:
    names = ("attention_backend", "dtype", "load_format", "linear_backend", "model_impl")
    args: dict[str, Any] = {"model_impl": "transformers"}
    args |= {name: settings.pop(name) for name in names if name in settings}
    model_args = ModelArgs(model_path=str(folder), device="cpu", **args)
    given: dict[str, Any] = {"context_length": 0, "num_rows": 8, "page_size": 1, "max_total_tokens": 4096} | settings
    return ModelRunner(model_args, **given)


def base_of(runner: ModelRunner) -> Any:
    """What turns ids into hidden states: transformers' module, or the whole native model."""
    model = runner._model
    return model._base if isinstance(model, TransformersModel) else model


@pytest.fixture(scope="module", params=MODELS.keys())
def model(request, tmp_path_factory) -> tuple[Any, Path]:
    name, architecture, changes = MODELS[request.param]
    folder = tmp_path_factory.mktemp("model")
    reference = make_reference(name, changes, architecture=architecture or f"{name}ForCausalLM")
    reference.save_pretrained(folder, max_shard_size="40KB")
    return reference, folder


@pytest.mark.parametrize("page_size", [1, 16])
def test_chunks_and_decodes_of_foreign_models(model, page_size):
    """Rows with prefixes of all kinds share the steps; every token's logits are compared."""
    reference, folder = model
    runner = make_runner(folder, page_size=page_size)
    assert isinstance(runner._model, TransformersModel)
    driver, rng = ModelDriver(runner, page_size=page_size, seed=1), np.random.default_rng(2)
    a, b, c = (driver.open(rng.integers(0, TINY["vocab_size"], length)) for length in (110, 33, 7))
    for spans in ([(a, 50)], [(b, 1), (a, 20), (c, 3)], [(c, 1), (a, 1), (b, 1)], [(b, 30), (c, 2), (a, 37)], [(a, 1)]):
        starts = [sequence.computed for sequence, _ in spans]
        output = driver.step(spans, logprob_starts=[0] * len(spans))
        assert output.logprob_hidden is not None
        every_token = runner.compute_logits(output.logprob_hidden).split([count for _, count in spans])
        for row, (start, (sequence, count)) in enumerate(zip(starts, spans, strict=True)):
            ids = torch.from_numpy(sequence.ids[: start + count].astype(np.int64))[None]
            with torch.no_grad():
                expected = reference(ids).logits[0]
            torch.testing.assert_close(every_token[row], expected[start:], atol=2e-4, rtol=1e-4)
            torch.testing.assert_close(output.logits[row], expected[-1], atol=2e-4, rtol=1e-4)


def save(folder: Path, name: str, **changes: Any) -> None:
    import transformers

    config = getattr(transformers, f"{name}Config")(**(TINY | changes))
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def test_shared_kv_takes_no_memory_of_its_own(tmp_path):
    reference = make_reference("Gemma3nText", SHARED_KV, architecture="Gemma3nForCausalLM")
    reference.save_pretrained(tmp_path)
    runner = make_runner(tmp_path)
    assert [spec.layer_id for spec in runner._model.specs] == [0, 1, 0, 1] and len(runner.kv_pool.k) == 2
    assert [spec.sliding_window for spec in runner._model.specs] == [20, None, 20, None]


def test_auto_takes_transformers_for_unknown_architectures_only(tmp_path):
    save(tmp_path / "own", "Qwen3", head_dim=8)
    save(tmp_path / "foreign", "StableLm")
    for folder, foreign in (("own", False), ("foreign", True)):
        args = ModelArgs(model_path=str(tmp_path / folder), device="cpu")
        runner = ModelRunner(args, context_length=0, num_rows=2, page_size=1, max_total_tokens=64)
        assert isinstance(runner._model, TransformersModel) is foreign
    args = ModelArgs(model_path=str(tmp_path / "foreign"), device="cpu", model_impl="baton")
    with pytest.raises(UnsupportedModelError, match="StableLmForCausalLM is not supported"):
        ModelRunner(args, context_length=0, num_rows=2, page_size=1, max_total_tokens=64)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        (
            "DeepseekV32",
            {"qk_rope_head_dim": 4, "num_key_value_heads": 6, "n_routed_experts": 8},
            r"DeepseekV32ForCausalLM has sparse attention \(indexed_attention\): its layers choose the tokens",
        ),
        ("Bloom", {}, "BloomForCausalLM: transformers' code for it does not run with another attention function"),
        ("Llama4Text", {"attention_chunk_size": 32, "num_local_experts": 2}, "neither causal nor a sliding window"),
    ],
)
def test_models_that_cannot_be_served_are_refused_by_name(tmp_path, name, changes, message):
    save(tmp_path, name, **changes)
    with pytest.raises(ModelLoadError, match=message):
        make_runner(tmp_path)


def test_model_that_computes_other_logits_is_refused(tmp_path, monkeypatch):
    """A model that keeps something else between its tokens would do the same."""

    def forgetful(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
        return attend(module, query, key, value)[0] * 0.5, None

    save(tmp_path, "StableLm", initializer_range=0.2)
    make_runner(tmp_path)
    monkeypatch.setattr(transformers_model, "attend", forgetful)
    with pytest.raises(ModelLoadError, match="its logits differ from transformers'"):
        make_runner(tmp_path)


@pytest.mark.parametrize("form", ["torch", "transposed", "onednn", "numba"])
@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"use_bias": True}], ids=["", "tied", "bias"])
def test_products_of_every_form(tmp_path, form: str, changes: dict[str, Any]) -> None:
    """The layers are Baton's. If a tied head repacks its weight, tokens are looked up in the file."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "vocab_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    save(tmp_path, "StableLm", initializer_range=0.2, **sizes, **changes)
    plain = make_runner(tmp_path, linear_backend="torch")
    runner = make_runner(tmp_path, linear_backend=form)
    ids = np.arange(20) * 7 % 192
    expected, found = (ModelDriver(each, seed=1) for each in (plain, runner))
    wanted = expected.step([(expected.open(ids), 20)]).logits
    torch.testing.assert_close(found.step([(found.open(ids), 20)]).logits, wanted, atol=1e-3, rtol=1e-4)
    model = runner._model
    assert isinstance(model, TransformersModel)
    linears = dict(model._linears)
    assert len(linears) == 3 * 6 + 1 and not any(isinstance(each, torch.nn.Linear) for each in model._base.modules())
    assert {linear.form(1) for linear in linears.values()} == {form}
    assert all((linear.weight is None) == (form in ("onednn", "numba")) for linear in linears.values())
    standins = [each for each in model._base.modules() if isinstance(each, LinearStandin)]
    assert len(standins) == 3 * 5 and not any(each.originals for each in standins), "weights are kept twice"
    is_repacked = "tie_word_embeddings" in changes and form in ("onednn", "numba")
    assert any(isinstance(each, EmbeddingStandin) for each in model._base.modules()) is is_repacked


def test_modelling_that_reads_some_weights_keeps_those_layers(tmp_path, monkeypatch):
    from transformers.models.stablelm.modeling_stablelm import StableLmMLP

    forward = StableLmMLP.forward
    monkeypatch.setattr(StableLmMLP, "forward", lambda self, x: forward(self, x.to(self.down_proj.weight.dtype)))
    save(tmp_path, "StableLm", initializer_range=0.2)
    model = make_runner(tmp_path, linear_backend="onednn")._model
    assert isinstance(model, TransformersModel)
    kept = {name for name, module in model._base.named_modules() if type(module) is torch.nn.Linear}
    assert kept == {f"layers.{layer}.mlp.down_proj" for layer in range(3)}
    assert {linear.form(1) for linear in model._linears.values()} == {"onednn"}
    targets = {name.rpartition(".")[2] for name in model.adapter_targets()}
    assert targets == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}


def test_modelling_that_takes_no_other_layers_keeps_its_own(tmp_path, monkeypatch):
    from transformers.models.stablelm.modeling_stablelm import StableLmMLP

    forward = StableLmMLP.forward

    def checked(self: Any, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(self.down_proj, torch.nn.Linear)
        return forward(self, x)

    monkeypatch.setattr(StableLmMLP, "forward", checked)
    save(tmp_path, "StableLm", initializer_range=0.2)
    runner = make_runner(tmp_path)
    model = runner._model
    assert isinstance(model, TransformersModel) and not model.adapter_targets()
    assert any(type(module) is torch.nn.Linear for module in model._base.modules())
    assert runner.compute_logits(torch.ones(1, TINY["hidden_size"])).isfinite().all()
    with pytest.raises(ModelLoadError, match="--linear-backend onednn: the modelling of StableLmForCausalLM"):
        make_runner(tmp_path, linear_backend="onednn")


def test_missing_tensor_is_named(tmp_path):
    from safetensors.torch import load_file, save_file

    save(tmp_path, "StableLm")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"1 missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        make_runner(tmp_path)


def test_dummy_weights_are_the_same_each_time(tmp_path):
    save(tmp_path, "StableLm")
    (tmp_path / "model.safetensors").unlink()
    first, second = (make_runner(tmp_path, load_format="dummy") for _ in range(2))
    hidden = torch.ones(1, TINY["hidden_size"])
    assert torch.equal(first.compute_logits(hidden), second.compute_logits(hidden))


def test_dynamic_frequencies_do_not_depend_on_the_batch(tmp_path):
    """A short row beside a long one, past the original context: alone it gives the same logits."""
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32}
    save(tmp_path, "Starcoder2", rope_parameters=rope, initializer_range=0.2, sliding_window=None)
    runner = make_runner(tmp_path)
    ids = [np.random.default_rng(row).integers(0, TINY["vocab_size"], length) for row, length in enumerate((9, 90))]
    alone, together = ModelDriver(runner, seed=1), ModelDriver(runner, seed=2)
    expected = alone.step([(alone.open(ids[0]), 9)]).logits[0]
    found = together.step([(together.open(ids[1]), 90), (together.open(ids[0]), 9)]).logits[1]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


class TestMaskRules:
    def rule(self, window: int | None, **config: Any) -> MaskRule | str:
        def mask(batch: Any, head: Any, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
            visible = key <= query
            return visible if window is None else visible & (key > query - window)

        return trace_mask(mask_function=mask, config=type("Config", (), config)())

    def test_causal_and_windows_are_told_apart(self):
        assert self.rule(None, sliding_window=8) == MaskRule(None)
        assert self.rule(8, sliding_window=8) == MaskRule(8)

    def test_window_of_unknown_size_is_another_mask(self):
        assert self.rule(7, sliding_window=8) == OTHER_MASK


def test_tied_embedding_keeps_its_matrix_where_the_file_has_other_rows(tmp_path, monkeypatch):
    make_reference("StableLm", {"tie_word_embeddings": True}).save_pretrained(tmp_path)
    monkeypatch.setattr(model_runner, "mapped_tensor", lambda folder, name: torch.zeros(TINY["vocab_size"], 48))
    runner = make_runner(tmp_path, linear_backend="onednn")
    assert not any(isinstance(module, EmbeddingStandin) for module in base_of(runner).modules())


def test_norms_and_mlps_of_transformers_are_replaced(tmp_path):
    """By the kernels of the processor: the model is wide enough for them."""
    reference = make_reference("Llama", {**WIDE, "head_dim": 64, "vocab_size": 192})
    reference.save_pretrained(tmp_path)
    runner = make_runner(tmp_path)
    modules = list(base_of(runner).modules())
    norms = [each for each in modules if isinstance(each, NormStandin)]
    mlps = [each for each in modules if isinstance(each, GatedMLPStandin)]
    assert (len(norms), len(mlps)) == (2 * 3 + 1, 3)
    assert all(each._op is not None for each in norms) and all(hasattr(each._activation, "_kernel") for each in mlps)
    driver = ModelDriver(runner, page_size=1, seed=1)
    sequence = driver.open(np.arange(3, 40))
    found = [driver.step([(sequence, count)]).logits[0] for count in (30, 1, 6)]
    with torch.no_grad():
        expected = reference(torch.arange(3, 40)[None]).logits[0].float()
    for logits, position in zip(found, (29, 30, 36), strict=True):
        torch.testing.assert_close(logits, expected[position], atol=2e-4, rtol=1e-4)


def test_mlp_that_is_read_from_outside_is_left_alone(tmp_path, monkeypatch):
    """The layers that the MLP was made of take their places again, on the memory of the one product."""
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    forward = LlamaDecoderLayer.forward

    def read(self: Any, x: torch.Tensor, **kwargs: Any) -> Any:
        return forward(self, x + 0 * self.mlp.gate_proj(x)[..., :1], **kwargs)

    monkeypatch.setattr(LlamaDecoderLayer, "forward", read)
    reference = make_reference("Llama", {})
    reference.save_pretrained(tmp_path)
    runner = make_runner(tmp_path)
    assert not any(isinstance(each, GatedMLPStandin) for each in base_of(runner).modules())
    driver = ModelDriver(runner, page_size=1, seed=1)
    sequence = driver.open(np.arange(3, 40))
    with torch.no_grad():
        expected = reference(torch.arange(3, 40)[None]).logits[0, -1]
    torch.testing.assert_close(driver.step([(sequence, 37)]).logits[0], expected, atol=2e-4, rtol=1e-4)


@torch.no_grad()
def test_modules_that_layers_share_have_one_standin(tmp_path, monkeypatch):
    """Else a matrix is kept for the one that is not replaced, and adapters change one of the layers."""

    def share(model: Any, _: int = 0) -> None:
        first, second, third = model.model.layers
        third.mlp, second.self_attn.q_proj, second.input_layernorm = (
            first.mlp, first.self_attn.q_proj, first.input_layernorm
        )  # fmt: skip

    reference = make_reference("Llama", {**WIDE, "head_dim": 64, "vocab_size": 192})
    reference.save_pretrained(tmp_path)
    share(reference)
    monkeypatch.setattr(transformers_model, "fix_rope", share)  # the last change to a model before it is served
    runner = make_runner(tmp_path, linear_backend="onednn")
    first, second, third = base_of(runner).layers
    assert third.mlp is first.mlp and isinstance(first.mlp, GatedMLPStandin)
    assert second.self_attn.q_proj is first.self_attn.q_proj and isinstance(first.self_attn.q_proj, LinearStandin)
    assert second.input_layernorm is first.input_layernorm and isinstance(first.input_layernorm, NormStandin)
    driver = ModelDriver(runner, page_size=1, seed=1)
    found = driver.step([(driver.open(np.arange(3, 40)), 37)]).logits[0]
    torch.testing.assert_close(found, reference(torch.arange(3, 40)[None]).logits[0, -1], atol=2e-4, rtol=1e-4)


class InFloat32(torch.nn.Module):
    def __init__(self, linear: torch.nn.Module) -> None:
        super().__init__()
        self.linear = linear.float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.float()).to(x.dtype)


def test_layers_kept_in_another_dtype_are_left_alone(tmp_path, monkeypatch):
    """Products are chosen for one dtype."""

    def widen(model: Any, _: int) -> None:
        for layer in model.model.layers:
            layer.self_attn.o_proj = InFloat32(layer.self_attn.o_proj)

    make_reference("Llama", {**WIDE, "head_dim": 64, "vocab_size": 192}).bfloat16().save_pretrained(tmp_path)
    monkeypatch.setattr(product_trials, "SMALL_MODEL_BYTES", 0)
    monkeypatch.setattr(transformers_model, "fix_rope", widen)  # the last change to a model before it is served
    runner = make_runner(tmp_path, dtype="bfloat16")
    left = [each for each in base_of(runner).modules() if type(each) is torch.nn.Linear]
    assert len(left) == TINY["num_hidden_layers"]
    assert not any("o_proj" in name for name in runner._model.adapter_targets())


@pytest.mark.parametrize("model_impl", ["baton", "transformers"])
def test_tied_head_that_is_repacked_late_leaves_no_second_matrix(tmp_path, monkeypatch, model_impl):
    """All are left for later."""
    changes = {**WIDE, "head_dim": 64, "vocab_size": 192, "tie_word_embeddings": True}
    make_reference("Llama", changes).save_pretrained(tmp_path)
    monkeypatch.setattr(product_trials, "SMALL_MODEL_BYTES", 0)
    monkeypatch.setattr(product_trials, "usual_choice", lambda forms: PLAIN)
    monkeypatch.setattr(product_trials, "best_choice", lambda times: ProductChoice.of(ONEDNN))
    runner = make_runner(tmp_path, model_impl=model_impl)
    matrix = weakref.ref(base_of(runner).embed_tokens.weight)
    driver = ModelDriver(runner, page_size=1, seed=1)
    before = driver.step([(driver.open(np.arange(20)), 20)]).logits
    assert runner.has_late_work
    monkeypatch.setattr(runner._others, "busy_cores", lambda: 0.0)
    while runner.run_late_work() is not None:
        pass
    gc.collect()
    assert matrix() is None, "the matrix is kept beside the packed one"
    torch.testing.assert_close(driver.step([(driver.open(np.arange(20)), 20)]).logits, before, atol=1e-4, rtol=1e-4)


class EverySecondRow(torch.nn.Module):
    """As experts, which compute some tokens only."""

    def __init__(self, linear: torch.nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x[:, ::2]).repeat_interleave(2, dim=1)[:, : x.shape[1]]


def test_layers_of_some_tokens_cannot_have_adapters(tmp_path, monkeypatch):
    """Their rows are not those of the step, by which each token has its adapter."""

    def thin_out(model: Any, _: int) -> None:
        model.model.layers[0].mlp.down_proj = EverySecondRow(model.model.layers[0].mlp.down_proj)

    make_reference("Llama", {}).save_pretrained(tmp_path)
    whole = make_runner(tmp_path)._model.adapter_targets().keys()
    monkeypatch.setattr(transformers_model, "fix_rope", thin_out)  # the last change to a model before it is served
    runner = make_runner(tmp_path)
    assert isinstance(base_of(runner).layers[0].mlp.down_proj.linear, LinearStandin)
    assert whole - runner._model.adapter_targets().keys() == {"model.layers.0.mlp.down_proj"}
