"""Models with recurrent states against transformers: chunks of all sizes, states in and out of place, inside of a
chunk, and shared by forks."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from baton.memory_pool.state_pool import state_bytes
from baton.runtime.checkpoint.model_files import ModelLoadError
from baton.runtime.config import ModelArgs
from baton.runtime.runner.model_runner import ModelRunner
from tests.doubles.forced_options import FORCED
from tests.doubles.model_driver import ModelDriver
from tests.doubles.tiny_models import TINY, save_reference
from tests.runtime.models.test_equality import check, reference_logits

pytestmark = pytest.mark.equality

HYBRIDS = ["lfm2", "qwen3_next", "qwen3_5", "granite_hybrid", "falcon_h1", "nemotron_h", "mamba2"]


@pytest.fixture(scope="module", params=HYBRIDS)
def model(request, tmp_path_factory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("model")
    return save_reference(request.param, folder), folder


def make_runner(folder: Path, **changes: Any) -> ModelRunner:
    args = ModelArgs(model_path=str(folder), device="cpu", model_impl="baton", **(FORCED | changes))
    return ModelRunner(args, context_length=0, num_rows=12, page_size=1, max_total_tokens=2048, max_states=64)


def prompt(length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(0, TINY["vocab_size"], length)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("chunk", [1, 7, 64, 100])
def test_chunks_of_two_interleaved_prompts(model, chunk, in_place):
    reference, folder = model
    runner = make_runner(folder)
    driver = ModelDriver(runner)
    rows = [driver.open(prompt(length)) for length in ((100, 81) if chunk > 1 else (12, 9))]
    while any(row.computed < len(row.ids) for row in rows):
        spans = [(row, min(chunk, len(row.ids) - row.computed)) for row in rows if row.computed < len(row.ids)]
        starts = [row.computed for row, _ in spans]
        output = driver.step(spans, logprob_starts=[0] * len(spans), in_place=in_place)
        assert output.logprob_hidden is not None
        found = runner.compute_logits(output.logprob_hidden).split([count for _, count in spans])
        for (row, count), start, logits in zip(spans, starts, found, strict=True):
            check(logits, reference_logits(reference, row.ids[: start + count])[start:])


@pytest.mark.one_in(3)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_by_the_kernels_for_cpus(model, chunk, caplog):
    """Prompts and a decode by Numba, as wide models are computed."""
    pytest.importorskip("numba")
    reference, folder = model
    with caplog.at_level("INFO"):
        runner = make_runner(folder, attention_backend="numba")
    assert "layers with states: numba" in caplog.text
    driver = ModelDriver(runner)
    rows = [driver.open(prompt(length)) for length in (61, 62)]
    for start in range(0, 60, chunk):
        driver.step([(row, min(chunk, 60 - start)) for row in rows])
    found = driver.step([(row, 1) for row in rows]).logits
    for row, logits in zip(rows, found, strict=True):
        check(logits, reference_logits(reference, row.ids[:61])[-1])


@pytest.mark.one_in(2)
@pytest.mark.parametrize("backend", ["torch_native", "numba"])
def test_half_precision_is_as_close_to_float32_as_the_reference(model, backend):
    """Our error against float32 may be at most twice transformers' own."""
    reference, folder = model
    ids = prompt(90)
    exact = reference_logits(reference, ids)
    theirs = reference_logits(copy.deepcopy(reference).to(torch.bfloat16), ids).float()
    try:
        runner = make_runner(folder, attention_backend=backend, dtype="bfloat16")
    except ModelLoadError as error:
        if FORCED["linear_backend"] == "auto":
            raise
        pytest.skip(str(error))  # the whole run is forced to a form that needs a newer processor for this
    output = (driver := ModelDriver(runner)).step([(driver.open(ids), 90)], logprob_starts=[0])
    assert output.logprob_hidden is not None
    ours = runner.compute_logits(output.logprob_hidden)
    assert (ours - exact).abs().mean() <= 2 * (theirs - exact).abs().mean()


def test_forks_continue_states_within_a_chunk(model):
    """One chunk writes states after 1, 2, 17 and 90 of its tokens; each is continued twice, by chunks and tokens."""
    reference, folder = model
    driver = ModelDriver(make_runner(folder))
    trunk = driver.open(prompt(95))
    driver.step([(trunk, 5)])
    driver.step([(trunk, 90)], ends=[[1, 2, 17]])
    for length in (6, 7, 22, 95):
        forks = [driver.fork(trunk, length, prompt(3 + each)) for each in range(2)]
        for count in (2, 1):
            output = driver.step([(fork, count) for fork in forks])
            for fork, logits in zip(forks, output.logits, strict=True):
                check(logits, reference_logits(reference, fork.ids[: fork.computed])[-1])


@pytest.mark.parametrize("is_transposed", [False, True])
def test_experts_in_one_tensor(is_transposed, tmp_path):
    """As the files of Qwen3.5-MoE on the hub have them; transformers saves each by itself."""
    reference = save_reference("qwen3_5_moe", tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    (tmp_path / "model.safetensors.index.json").unlink()
    tensors = {
        name: value.transpose(1, 2).contiguous() if is_transposed and ".experts." in name else value
        for name, value in reference.state_dict().items()
    }
    assert tensors["model.layers.0.mlp.experts.gate_up_proj"].dim() == 3
    save_file(tensors, tmp_path / "model.safetensors")
    ids = prompt(20)
    driver = ModelDriver(make_runner(tmp_path))
    check(driver.step([(driver.open(ids), 20)]).logits[0], reference_logits(reference, ids)[-1])


def test_a_draft_keeps_a_state_at_each_of_its_tokens(model):
    """As a step that verifies guesses writes them, all from one source."""
    reference, folder = model
    driver = ModelDriver(make_runner(folder))
    trunk = driver.open(prompt(30))
    driver.step([(trunk, 24)])
    driver.step([(trunk, 6)], ends=[[1, 2, 3, 4, 5]], in_place=False)
    for length in range(24, 31):
        fork = driver.fork(trunk, length, prompt(1))
        check(driver.step([(fork, 1)]).logits[0], reference_logits(reference, fork.ids)[-1])


def test_states_take_what_the_sizes_say(model):
    reference, folder = model
    runner = make_runner(folder)
    kinds = getattr(reference.config, "layer_types", None) or reference.config.layers_block_type
    with_states = sum(kind not in ("full_attention", "mlp") for kind in kinds)
    with_kv = sum(kind in ("full_attention", "hybrid") for kind in kinds)
    assert runner.state_pool is not None
    assert len(runner.state_pool.layers) == with_states and len(runner.kv_pool.k) == with_kv
    shapes = runner._model.state_shapes
    assert runner.state_pool.bytes_per_state == state_bytes(shapes)
    if reference.config.model_type == "qwen3_next":
        conv = 3 * (2 * 2 * 24 + 6 * 12)
        assert runner.state_pool.bytes_per_state == 4 * 2 * (conv + 6 * 24 * 12)
