"""The runner around a tiny model with dummy weights; numbers are compared in test_equality.py."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from baton.runtime.checkpoint.model_files import ModelLoadError
from baton.runtime.config import ModelArgs
from baton.runtime.models.decoder import Decoder
from baton.runtime.runner import model_runner
from baton.runtime.runner.model_runner import ModelRunner
from baton.scheduler.batch import KVCopies
from tests.doubles.model_driver import ModelDriver

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
}


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def make_runner(
    folder: Path,
    *,
    context_length=0,
    num_rows=4,
    page_size=1,
    max_total_tokens=512,
    chunked_prefill_size=2048,
    **changes: Any,
) -> ModelRunner:
    args: dict[str, Any] = {"model_path": str(folder), "load_format": "dummy", "device": "cpu"}
    return ModelRunner(
        ModelArgs(**(args | changes)),
        context_length=context_length,
        num_rows=num_rows,
        page_size=page_size,
        max_total_tokens=max_total_tokens,
        chunked_prefill_size=chunked_prefill_size,
    )


def test_model_runner_attributes(folder):
    runner = make_runner(folder, context_length=100, page_size=16, max_total_tokens=250)
    assert (runner.max_total_tokens, runner.config.context_length, runner.device.type) == (240, 100, "cpu")
    assert runner.dtype == torch.float32 and make_runner(folder, dtype="auto").dtype == torch.float32
    assert runner.req_to_token.shape == (4, 100) and runner.kv_pool.num_slots == 256


@pytest.mark.parametrize("attention", ["auto", "numba"])
@pytest.mark.parametrize("tied", [False, True])
def test_half_precision_logits_are_summed_in_float32(tmp_path, attention, tied):
    """By whatever computes them: of the head's product nothing is rounded."""
    if attention == "numba":
        pytest.importorskip("numba")
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": tied}))
    runner = make_runner(tmp_path, dtype="bfloat16", attention_backend=attention)
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert isinstance(runner._model, Decoder)
    views = {name: view for name, view in runner._model.checkpoint_views().items() if isinstance(view, torch.Tensor)}
    weight = views["model.embed_tokens.weight" if tied else "lm_head.weight"].double()
    normed = hidden.double() / (hidden.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = (normed * views["model.norm.weight"].double()) @ weight.t()
    torch.testing.assert_close(runner.compute_logits(hidden), expected.float(), atol=1e-5, rtol=1e-5)


def test_chunked_prefill_size_is_found_while_idle_for_the_next_start(folder, monkeypatch, caplog):
    assert make_runner(folder, chunked_prefill_size=0).chunked_prefill_size == 2048, "small models are not tried"
    monkeypatch.setattr(model_runner, "SMALL_MODEL_BYTES", 0)
    monkeypatch.setattr(model_runner, "chunk_trial", chunk_trial)
    asked = make_runner(folder, chunked_prefill_size=33)
    assert asked.chunked_prefill_size == 33 and not asked.has_late_work, "who asks for a number gets it"
    short = make_runner(folder, chunked_prefill_size=0)
    assert short.chunked_prefill_size == 2048, "a step has room for many prompts where all are short"
    monkeypatch.setattr(model_runner, "SMALLEST_CHUNK", 32)
    first = make_runner(folder, chunked_prefill_size=0, page_size=16)
    assert first.chunked_prefill_size == 32 and first.has_late_work
    busy, waits = [0.0, 0.9, 0.0, 0.1], []
    monkeypatch.setattr(first._others, "busy_cores", lambda: busy.pop(0))
    with caplog.at_level(logging.INFO):
        while (wait := first.run_late_work()) is not None:
            waits += [wait] if wait else []
    assert waits == [model_runner.FIRST_WAIT_S] and not busy, "beside a busy process it is tried again"
    assert first.chunked_prefill_size == 32 and not first.has_late_work, "the scheduler was built for it"
    assert "from the next start on, steps compute 128 prompt tokens at most, now 32; tokens/s by size" in caplog.text
    second = make_runner(folder, chunked_prefill_size=0, page_size=16)
    assert second.chunked_prefill_size == 128 and not second.has_late_work
    assert make_runner(folder, chunked_prefill_size=0, page_size=1).has_late_work, "other pages, other results"


def chunk_trial(compute, largest):
    """Finds the context's length best."""
    for tokens in (32, largest):
        compute(tokens)
        yield
    return largest, {largest: 1.0}


def test_failing_trial_of_prompt_steps_leaves_the_server_running(folder, monkeypatch, caplog):
    monkeypatch.setattr(model_runner, "SMALL_MODEL_BYTES", 0)
    monkeypatch.setattr(model_runner, "SMALLEST_CHUNK", 32)
    monkeypatch.setattr(model_runner, "chunk_trial", lambda compute, largest: 1 // 0)
    runner = make_runner(folder, chunked_prefill_size=0)
    while runner.run_late_work() is not None:
        pass
    assert not runner.has_late_work and "sizes of prompt steps are not tried: ZeroDivisionError" in caplog.text


def test_the_pool_size_is_logged(folder, caplog):
    with caplog.at_level(logging.INFO):
        make_runner(folder)
    assert "attention torch_native; memory: weights" in caplog.text and "KV 512 tokens × " in caplog.text


def test_a_pool_sized_from_memory_holds_a_context(folder):
    runner = make_runner(folder, max_total_tokens=0, mem_fraction_static=0.01)
    assert runner.max_total_tokens >= runner.config.context_length


def test_rows_that_do_not_sample_have_no_logits(folder):
    driver = ModelDriver(make_runner(folder))
    a, b = driver.open(range(20)), driver.open(range(9))
    output = driver.step([(a, 10), (b, 9)], samples=[False, True])
    assert output.logits.shape == (1, 50) and output.logits.dtype == torch.float32
    assert output.logprob_hidden is None
    output = driver.step([(a, 5)], samples=[False])
    assert output.logits.shape == (0, 50)
    alone = driver.step([(driver.open(range(9)), 9)])
    torch.testing.assert_close(alone.logits, driver.step([(driver.open(range(9)), 9)]).logits)


def test_logprob_hidden_gives_logits_of_requested_tokens(folder):
    runner = make_runner(folder)
    driver = ModelDriver(runner)
    a, b = driver.open(range(8)), driver.open(range(5))
    output = driver.step([(a, 8), (b, 5)], logprob_starts=[6, 5])
    assert output.logprob_hidden is not None
    logits = runner.compute_logits(output.logprob_hidden)
    assert logits.shape == (2, 50) and logits.dtype == torch.float32
    torch.testing.assert_close(logits[1], output.logits[0])


def test_copies_happen_before_the_step(folder):
    """A fork: the child's first tokens are copies of the parent's, two of them moved in a circle."""
    driver = ModelDriver(make_runner(folder), seed=None)
    ids = np.arange(10, dtype=np.int32)
    parent, child = driver.open(ids), driver.open(ids)
    driver.step([(parent, 9)])
    own = driver.pool.rows[parent.row, :9].copy()
    targets = own + 100
    driver.pool.write(child.row, 0, targets)
    child.computed = 9
    expected = driver.step([(parent, 1)]).logits
    found = driver.step([(child, 1)], copies=[KVCopies(source=own, target=targets)]).logits
    torch.testing.assert_close(found, expected)
    # Swap two slots in one go: sources are read before targets are written.
    again = driver.open(ids)
    swapped = targets.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    driver.pool.write(again.row, 0, swapped)
    again.computed = 9
    swap = KVCopies(source=targets[[0, 1]], target=targets[[1, 0]])
    torch.testing.assert_close(driver.step([(again, 1)], copies=[swap]).logits, expected)


@torch.inference_mode()
def test_sound_tokens_end_before_first_non_finite_kv(folder):
    runner = make_runner(folder)
    driver = ModelDriver(runner, seed=3)
    sequences = [driver.open(range(start, start + 20)) for start in (0, 10, 20)]
    driver.step([(sequence, 20) for sequence in sequences])
    rows = np.array([sequence.row for sequence in sequences], dtype=np.int32)
    batch: Any = SimpleNamespace(req_pool_indices=rows, seq_lens=np.array([20, 20, 12], dtype=np.int32), states=None)
    assert runner.sound_tokens(batch, [0, 2]) == {0: 0, 2: 0}, "nothing shows which token it was"
    for sequence, position in zip(sequences, (7, 0, 12)):
        runner.kv_pool.v[-1][driver.pool.rows[sequence.row, position], 0, 0] = torch.nan
    # The last is behind the row's end; and where the first token is bad, none before it is sound.
    assert runner.sound_tokens(batch, [0, 1, 2]) == {0: 7, 1: 0, 2: 0}


def test_reused_rows_and_slots_do_not_affect_results(folder):
    """Rows and slots are used again; what was in them before must not matter."""
    runner = make_runner(folder, num_rows=1)
    first = ModelDriver(runner, seed=None)
    fresh = first.step([(first.open(range(30)), 30)]).logits
    second = ModelDriver(runner, seed=None)
    other = second.open(range(40, 49))
    second.step([(other, 9)])
    second.close(other)
    third = ModelDriver(runner, seed=None)
    torch.testing.assert_close(third.step([(third.open(range(30)), 30)]).logits, fresh)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_length": 129}, "--context-length 129"),
        ({"max_total_tokens": 2**50}, "--max-total-tokens"),
        ({"model_path": "/nowhere"}, "no such folder"),
        ({"load_format": "auto"}, "no .*safetensors"),
    ],
)
def test_options_that_cannot_be_served_are_refused(folder, options, message):
    with pytest.raises(ModelLoadError, match=message):
        make_runner(folder, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_without_a_gpu_is_refused(folder):
    with pytest.raises(ModelLoadError, match="--device cpu"):
        make_runner(folder, device="cuda")
