"""Models with sliding windows in a pool of their own against transformers: what is behind a window is given back, and
soon overwritten, after each step."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.memory_pool.kv_pool import WindowedKVPool
from baton.runtime.config import ModelArgs
from baton.runtime.runner.model_runner import ModelRunner
from tests.doubles.forced_options import FORCED
from tests.doubles.model_driver import ModelDriver
from tests.doubles.tiny_models import TINY, save_reference
from tests.runtime.models.test_equality import check, reference_logits

pytestmark = pytest.mark.equality

CHUNK = 40


@pytest.fixture(scope="module", params=["gemma3", "gemma2", "gpt_oss", "mistral, window"])
def model(request, tmp_path_factory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("model")
    return save_reference(request.param, folder), folder


def make_runner(folder: Path, page_size: int, **args: Any) -> ModelRunner:
    runner = ModelRunner(
        ModelArgs(model_path=str(folder), device="cpu", **(FORCED | args)),
        context_length=0,
        num_rows=3,
        page_size=page_size,
        max_total_tokens=2048,
        chunked_prefill_size=CHUNK,
        window_ratio=0.2,
    )
    assert 0 < runner.window_tokens < 512 and runner.window == 20
    return runner


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("backend", ["torch_native", "numba"])
def test_logits_of_chunks_and_decodes(model, page_size, backend):
    """Three sequences of 230 tokens and less; together they take more slots than the pool for windows has."""
    reference, folder = model
    runner = make_runner(folder, page_size, attention_backend=backend)
    driver = ModelDriver(runner, page_size=page_size, seed=1)
    rng = np.random.default_rng(2)
    sequences = [driver.open(rng.integers(0, TINY["vocab_size"], length)) for length in (230, 212, 180)]
    while any(sequence.computed < len(sequence.ids) for sequence in sequences):
        left = [(sequence, len(sequence.ids) - sequence.computed) for sequence in sequences]
        spans = [(s, min(count, int(rng.choice([1, 7, CHUNK])))) for s, count in left if count and rng.random() < 0.7]
        if not spans:
            continue
        output = driver.step(spans)
        for row, (sequence, _) in enumerate(spans):
            check(output.logits[row], reference_logits(reference, sequence.ids[: sequence.computed])[-1])


def test_the_log_tells_the_bytes_of_both_pools(model, caplog):
    _, folder = model
    with caplog.at_level("INFO"):
        runner = make_runner(folder, 16, attention_backend="torch_native")
    pool = runner.kv_pool
    assert isinstance(pool, WindowedKVPool)
    for part, name in ((pool.full, "KV"), (pool.windows, "windows of 20 tokens:")):
        (found,) = re.findall(rf"{name} (\d+) tokens × (\d+) bytes", caplog.text)
        tokens, per_token = map(int, found)
        assert (tokens + 16) * per_token == sum(tensor.nbytes for tensor in (*part.k, *part.v))


def test_recorded_steps(model):
    """Decodes that run as recorded steps, if this processor records them."""
    reference, folder = model
    runner = make_runner(folder, 1, attention_backend="numba", linear_backend="numba")
    driver = ModelDriver(runner, seed=3)
    sequence = driver.open(np.random.default_rng(4).integers(0, TINY["vocab_size"], 90))
    driver.step([(sequence, CHUNK)])
    for _ in range(50):
        output = driver.step([(sequence, 1)])
        check(output.logits[0], reference_logits(reference, sequence.ids[: sequence.computed])[-1])


def test_a_token_that_is_not_finite_is_found(model):
    """Whether or not layers without a window show it too."""
    _, folder = model
    runner = make_runner(folder, 1, attention_backend="torch_native")
    driver = ModelDriver(runner, seed=5)
    sequence = driver.open(np.arange(60) % TINY["vocab_size"])
    driver.step([(sequence, CHUNK)])
    assert driver.windows is not None
    layer = min(runner.kv_pool.window_layers)  # type: ignore[attr-defined]
    slot = driver.windows.slots_of(driver.pool.rows[sequence.row, 30:31])
    with torch.inference_mode():
        runner.kv_pool.k[layer][int(slot[0])] = torch.nan
    batches = []
    forward = runner.forward
    runner.forward = lambda batch, *rest: batches.append(batch) or forward(batch, *rest)  # type: ignore[method-assign]
    driver.step([(sequence, 1)])
    assert runner.sound_tokens(batches[0], [0]) == {0: 30}
