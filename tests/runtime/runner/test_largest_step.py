"""The step that a GPU's memory is planned by, run on a CPU: it fits its pool, and makes workspaces grow for graphs; and
the number of prompt tokens in a step on a CPU."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator
from typing import Any

import pytest
import torch

from baton.attention.flashinfer import kernel
from baton.attention.flashinfer.backend import FlashInferBackend
from baton.attention.flashinfer.library import build_kv_indices
from baton.memory_pool.kv_pool import MHAKVPool, uniform_shapes
from baton.runtime.checkpoint.hf_config import load_model_config
from baton.runtime.checkpoint.weights import fill_dummy
from baton.runtime.config import ModelArgs
from baton.runtime.layers.ops import TORCH_OPS
from baton.runtime.models.decoder import Decoder
from baton.runtime.runner import model_runner
from baton.runtime.runner.cuda_graph import GraphCatalog
from baton.runtime.runner.device_backends import TORCH_BACKENDS, DeviceBackends
from baton.runtime.runner.largest_step import FEW, LONGEST_STEP_S, ROUNDS, SMALLEST_CHUNK, chunk_trial, run_largest_step
from baton.runtime.runner.model_runner import ModelRunner
from tests.doubles.cpu_graphs import graph_backends
from tests.doubles.fake_flashinfer import FakeFlashInfer

CPU = torch.device("cpu")
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
SHAPES = GraphCatalog(max_sequences=100, max_tokens=128, group=2)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("tokens, rows", [(100, 7), (20, 90)], ids=str)
def test_profiled_largest_step_fits_its_pool(folder, monkeypatch, page_size, tokens, rows):
    """A prefill may be shorter than the largest graph, and than the rows that are sampled."""
    monkeypatch.setattr(kernel, "WORKSPACE_BYTES", 1 << 10)
    config = load_model_config(folder, context_length=0)
    model = Decoder(config, TORCH_OPS, dtype=torch.float32, device=CPU)
    fill_dummy(model.checkpoint_views())
    made: list[FlashInferBackend] = []
    seen: set[int] = set()
    look_up = model.embed_tokens
    monkeypatch.setattr(model, "embed_tokens", lambda ids: seen.update(ids.tolist()) or look_up(ids))

    def attention(pool, specs):
        library = FakeFlashInfer(workspace_per_row=20).library
        made.append(FlashInferBackend(pool, specs, library, build_kv_indices, max_graph_pages=4096))
        return made[0]

    for backends, shapes in (
        (TORCH_BACKENDS, []),
        (DeviceBackends(TORCH_OPS, attention, None), SHAPES.largest_of_each_kind),
    ):
        pool = MHAKVPool(
            num_tokens=-(-tokens // page_size) * page_size,
            page_size=page_size,
            shapes=uniform_shapes(2, 2, 8),
            dtype=torch.float32,
            device=CPU,
        )
        seen.clear()
        vocab_size = config.vocab_size
        run_largest_step(model, backends, pool, vocab_size=vocab_size, tokens=tokens, rows=rows, shapes=shapes)
        assert len(seen) == min(tokens, vocab_size), "equal tokens would all go to the same experts"
        assert all(k[page_size : page_size + tokens].any(dim=(1, 2)).all() for k in pool.k), "every token has its slot"
    assert len(made[0]._arena.workspace) >= 128 * 20, "as the largest graph needs it"


def test_profiled_memory_is_subtracted_from_the_pool(folder, monkeypatch):
    """As on a GPU: the step is really run, and its pool is not counted."""
    monkeypatch.setattr(kernel, "WORKSPACE_BYTES", 1 << 10)
    taken = 5_000_000

    def profiled(device, run) -> int:
        run()
        return taken

    monkeypatch.setattr(model_runner, "profiled_bytes", profiled)
    plans = []
    plan_memory = model_runner.plan_memory

    def plan(*args, **kwargs):
        plans.append(kwargs)
        return plan_memory(*args, **kwargs)

    monkeypatch.setattr(model_runner, "plan_memory", plan)
    args = ModelArgs(model_path=str(folder), load_format="dummy", device="cpu")
    ModelRunner(
        args,
        context_length=0,
        num_rows=4,
        page_size=16,
        max_total_tokens=512,
        chunked_prefill_size=100,
        backends=graph_backends(),
    )
    (plan_of,) = plans
    per_token = 2 * 2 * 2 * 8 * 4
    assert plan_of["bytes_per_token"] == per_token
    assert plan_of["activation_bytes"] == taken - (112 + 16) * per_token, "seven pages, and one of padding"
    assert plan_of["graph_bytes"] > 0


def finished(run: Generator[None, None, tuple[int, dict[int, float]]]) -> tuple[int, dict[int, float]]:
    """The result of a trial."""
    while True:
        try:
            next(run)
        except StopIteration as end:
            return end.value


def chosen_chunk(seconds: Callable[[int], float], largest: int = 2048) -> tuple[int, list[int]]:
    """Returns the size, and the sizes of the steps that were computed after those of a few tokens. Time is the test's
    own."""
    now, computed = 0.0, []

    def compute(tokens: int) -> None:
        nonlocal now
        now += seconds(tokens)
        computed.append(tokens)

    size, tried = finished(chunk_trial(compute, largest, lambda: now))
    assert computed[:ROUNDS] == [-(-min(SMALLEST_CHUNK, largest) // FEW)] * ROUNDS
    assert sorted(computed[ROUNDS:]) == sorted([*tried] * ROUNDS)
    computed = computed[ROUNDS:]
    assert all(found == pytest.approx(seconds(tokens)) for tokens, found in tried.items())
    return size, sorted(set(computed))


def test_the_chunk_stays_small_where_more_tokens_are_no_faster() -> None:
    assert chosen_chunk(lambda tokens: tokens / 5000) == (256, [256, 512])


def test_the_chunk_grows_while_that_is_faster() -> None:
    """The speed grows by a tenth, a tenth, and 4 %."""
    rates = {256: 5000, 512: 5500, 1024: 6050, 2048: 6290}
    assert chosen_chunk(lambda tokens: tokens / rates.get(tokens, 5000)) == (1024, [256, 512, 1024, 2048])


def test_the_chunk_never_exceeds_the_largest_size() -> None:
    assert chosen_chunk(lambda tokens: 0.1, largest=1024) == (1024, [256, 512, 1024])
    assert chosen_chunk(lambda tokens: 0.01, largest=100) == (100, [100])


def test_no_step_takes_too_long() -> None:
    """However much faster larger steps would be. A slow machine does not even try them."""
    assert chosen_chunk(lambda tokens: LONGEST_STEP_S * tokens / 400) == (SMALLEST_CHUNK, [SMALLEST_CHUNK])


def test_a_slow_machine_computes_a_few_tokens_at_most() -> None:
    """A request may arrive meanwhile."""
    computed: list[int] = []
    size, tried = finished(chunk_trial(computed.append, 2048, iter([0.0, 1.0, 1.0, 1.5, 1.5, 2.5]).__next__))
    assert size == SMALLEST_CHUNK and tried == {32: 0.5} and computed == [32] * ROUNDS


def test_the_fastest_run_of_each_size_counts() -> None:
    """Another process had the cores for a moment."""
    times = iter([0.01] * 3 + [0.05, 9.0, 0.05, 9.0, 0.08, 0.1, 0.2, 0.2, 9.0])
    now = 0.0

    def compute(tokens: int) -> None:
        nonlocal now
        now += next(times)

    size, tried = finished(chunk_trial(compute, 1024, lambda: now))
    assert size == 512 and tried == pytest.approx({256: 0.05, 512: 0.08, 1024: 0.2})
