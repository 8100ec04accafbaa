"""Every architecture against transformers: tiny random float32 models, scattered slots, chunks, ragged batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.runtime.checkpoint.model_files import ModelLoadError
from baton.runtime.config import ModelArgs
from baton.runtime.runner.model_runner import ModelRunner
from tests.doubles.forced_options import FORCED
from tests.doubles.model_driver import ModelDriver
from tests.doubles.tiny_models import MODELS, TINY, make_reference, save_reference

pytestmark = pytest.mark.equality


@pytest.fixture(scope="module", params=MODELS.keys())
def model(request, tmp_path_factory) -> tuple[Any, Path]:
    """(transformers model, folder with its config and its weights in several shards)"""
    folder = tmp_path_factory.mktemp("model")
    reference = save_reference(request.param, folder)
    assert len(list(folder.glob("*.safetensors"))) > 1
    return reference, folder


def make_runner(folder: Path, *, page_size: int = 1, **args: Any) -> ModelRunner:
    model_args = ModelArgs(model_path=str(folder), device="cpu", **(FORCED | args))
    return ModelRunner(model_args, context_length=0, num_rows=8, page_size=page_size, max_total_tokens=4096)


@torch.no_grad()
def reference_logits(reference, ids: np.ndarray) -> torch.Tensor:
    """float32 [tokens, vocab]"""
    return reference(torch.from_numpy(ids.astype(np.int64))[None]).logits[0]


def check(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("page_size, products", [(1, "torch"), (16, "onednn"), (1, "transposed"), (64, "numba")])
def test_logits_of_prefill_chunks_and_decode(model, page_size, products):
    """Rows with prefixes of all kinds share the steps; every token's logits are compared."""
    reference, folder = model
    runner = make_runner(folder, page_size=page_size, linear_backend=products)
    driver = ModelDriver(runner, page_size=page_size, seed=1)
    rng = np.random.default_rng(2)
    a, b, c = (driver.open(rng.integers(0, TINY["vocab_size"], length)) for length in (230, 33, 7))
    steps = [
        [(a, 170)],
        [(b, 1), (a, 20), (c, 3)],
        [(c, 1), (a, 1), (b, 1)],
        [(b, 30), (c, 2), (a, 37)],
        [(a, 1), (b, 1)],
        [(a, 1)],
    ]
    for spans in steps:
        starts = [sequence.computed for sequence, _ in spans]
        output = driver.step(spans, logprob_starts=[0] * len(spans))
        assert output.logprob_hidden is not None
        every_token = runner.compute_logits(output.logprob_hidden).split([count for _, count in spans])
        for row, (start, (sequence, count)) in enumerate(zip(starts, spans, strict=True)):
            expected = reference_logits(reference, sequence.ids[: start + count])
            check(every_token[row], expected[start:])
            check(output.logits[row], expected[-1])


def test_greedy_tokens_match_reference(model):
    """Token for token, alone and in a batch; a differing token passes only where the reference itself is undecided."""
    reference, folder = model
    runner = make_runner(folder)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, TINY["vocab_size"], length).astype(np.int32) for length in (5, 40, 64)]
    driver = ModelDriver(runner, seed=4)
    batch = [driver.open(prompt) for prompt in prompts]
    driver.generate(batch, 24)
    alone = [driver.open(prompt) for prompt in prompts]
    for sequence in alone:
        driver.generate([sequence], 24)
    for sequence in batch + alone:
        length = len(sequence.ids) - 24
        logits = reference_logits(reference, sequence.ids)[length - 1 : -1]
        taken = logits.gather(1, torch.from_numpy(sequence.ids[length:].astype(np.int64))[:, None])[:, 0]
        assert bool((logits.amax(-1) - taken < 1e-4).all())
        assert int((logits.argmax(-1) != torch.from_numpy(sequence.ids[length:])).sum()) <= 1


def test_greedy_output_equals_transformers_generate(model):
    """The reference's own loop with its own cache, not only its forward."""
    reference, folder = model
    driver = ModelDriver(make_runner(folder), seed=5)
    prompt = np.random.default_rng(6).integers(0, TINY["vocab_size"], 30)
    sequence = driver.open(prompt)
    driver.generate([sequence], 16)
    expected = reference.generate(torch.from_numpy(prompt)[None], max_new_tokens=16, do_sample=False)[0]
    assert sequence.ids.tolist() == expected.tolist()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "gemma3", "granite", "olmo2", "glm4", "gpt_oss", "glm4_moe", "deepseek_v3", "llama4"]
)
def test_half_precision_is_as_close_to_float32_as_the_reference(name, dtype, tmp_path):
    """Half precision has no exact answer: our error against float32 may be at most twice transformers' own."""
    architecture, changes = MODELS[name]
    reference = make_reference(architecture, changes, initializer_range=0.05)
    reference.save_pretrained(tmp_path)
    ids = np.random.default_rng(7).integers(0, TINY["vocab_size"], 90)
    exact = reference_logits(reference, ids)
    theirs = reference_logits(type(reference).from_pretrained(tmp_path, dtype=dtype), ids).float()
    try:
        runner = make_runner(tmp_path, dtype=dtype)
    except ModelLoadError as error:
        if FORCED["linear_backend"] == "auto":
            raise
        pytest.skip(str(error))  # the whole run is forced to a form that needs a newer processor for this
    driver = ModelDriver(runner, seed=8)
    output = driver.step([(driver.open(ids), len(ids))], logprob_starts=[0])
    assert output.logprob_hidden is not None and runner.dtype == output.logprob_hidden.dtype == getattr(torch, dtype)
    ours = runner.compute_logits(output.logprob_hidden)
    assert (ours - exact).abs().mean() <= 2 * (theirs - exact).abs().mean()


def test_half_precision_checkpoint_runs_in_float32_on_cpu(tmp_path):
    import transformers

    make_reference("Llama", {}).to(torch.bfloat16).save_pretrained(tmp_path)
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    runner = make_runner(tmp_path)
    assert runner.config.dtype == "bfloat16" and runner.dtype == torch.float32
    driver = ModelDriver(runner)
    ids = np.arange(40)
    check(driver.step([(driver.open(ids), 40)]).logits[0], reference_logits(reference, ids)[-1])


@pytest.mark.parametrize("name", ["deepseek_v2_lite", "deepseek_v3"])
def test_latents_are_all_that_is_kept(name, tmp_path, caplog):
    """A token takes layers × (latent + rotary part) numbers, and the start-up log says so; transformers' code keeps
    keys and values of each head."""
    save_reference(name, tmp_path)
    with caplog.at_level("INFO"):
        runner = make_runner(tmp_path)
    size = 3 * (20 + 8) * 4
    assert runner.kv_pool.bytes_per_token == size and f"× {size} bytes" in caplog.text
    assert sum(tensor.nbytes for tensor in runner.kv_pool.layers.k) == size * runner.kv_pool.num_slots
    foreign = make_runner(tmp_path, model_impl="transformers")
    assert foreign.kv_pool.bytes_per_token == 3 * 6 * ((10 + 8) + 6) * 4


@pytest.mark.one_in(2)
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("chunk", [1, 7, 60])
def test_latents_by_the_kernel_for_cpus(chunk, page_size, tmp_path):
    """Prompts in chunks and a decode by Numba, as wide models are computed."""
    pytest.importorskip("numba")
    reference = save_reference("deepseek_v3", tmp_path)
    runner = make_runner(tmp_path, page_size=page_size, attention_backend="numba")
    assert runner.attention_name == "numba"
    driver = ModelDriver(runner, page_size=page_size, seed=9)
    rows = [driver.open(np.random.default_rng(length).integers(0, TINY["vocab_size"], length)) for length in (61, 62)]
    for start in range(0, 60, chunk):
        driver.step([(row, min(chunk, 60 - start)) for row in rows])
    found = driver.step([(row, 1) for row in rows]).logits
    for row, logits in zip(rows, found, strict=True):
        check(logits, reference_logits(reference, row.ids[:61])[-1])
