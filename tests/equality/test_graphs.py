"""Steps padded to graphs, with attention planned for FlashInfer, say what plain steps say; under pressure too.

The kernels are a double's, computed by torch; plans, padding, fixed buffers and what is shared between graphs are real.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from baton.attention.backend import GraphKind
from baton.attention.flashinfer import backend as flashinfer
from baton.attention.flashinfer import kernel
from baton.scheduler.request_spec import ContinuationSpec
from baton.scheduler.sampling_params import SamplingParams
from tests.doubles.cpu_graphs import count_replays, graph_backends
from tests.doubles.local_worker import LocalWorker
from tests.doubles.mixed_requests import assert_same_answers, mixed_requests, some_items
from tests.doubles.specs import make_spec

pytestmark = pytest.mark.equality

TOY = Path(__file__).parents[2] / "examples" / "toy_model"
SEED = 11
GRAPHS = {"cuda_graph_max_tokens": 96}


@pytest.fixture(autouse=True)
def small_scale(monkeypatch):
    """Two beams over a page are worth reading their prefix apart, so that all three kinds of graphs occur."""
    monkeypatch.setattr(flashinfer, "SHARED_KEYS", 16)
    monkeypatch.setattr(kernel, "WORKSPACE_BYTES", 1 << 10)


@pytest.mark.parametrize(
    "overlap, options",
    [
        (False, {"page_size": 1, "chunked_prefill_size": 90}),
        (True, {"page_size": 16, "chunked_prefill_size": 33}),
        (False, {"page_size": 64, "chunked_prefill_size": 64, "max_running_requests": 9}),
        (True, {"page_size": 16, "chunked_prefill_size": 64, "enable_mixed_chunk": True}),
        (True, {"page_size": 1, "max_total_tokens": 400, "max_running_requests": 20, "chunked_prefill_size": 90}),
    ],
    ids=str,
)
def test_graph_steps_equal_plain_steps(overlap: bool, options: dict[str, Any]) -> None:
    items = some_items(SEED)
    plain = LocalWorker(TOY, **{**options, "enable_mixed_chunk": False})
    worker = LocalWorker(TOY, overlap=overlap, backends=graph_backends(), model_options=GRAPHS, **options)
    assert worker.info["cuda_graphs"] and worker.info["attention_backend"] == "flashinfer"
    replays = count_replays(worker.step_runner._runner)
    for each in (plain, worker):
        each.scheduler._reserve._ratio = 0.0  # so that a small pool is over-committed
    expected, found = plain.run(mixed_requests(SEED), items=items), worker.run(mixed_requests(SEED), items=items)
    assert_same_answers(mixed_requests(SEED), expected, found)
    kinds = {shape.kind for shape in replays}
    assert GraphKind.EXTEND in kinds
    if not options.get("enable_mixed_chunk"):  # there the searches end last, and so are in every decode step
        assert GraphKind.DECODE in kinds
    if options.get("max_running_requests", 64) >= 64:
        assert GraphKind.SHARED in kinds


@pytest.mark.parametrize("page_size", [1, 16])
def test_flashinfer_backend_without_graphs_equals_plain_steps(page_size: int) -> None:
    """FlashInfer's backend, every step launched by itself."""
    items = some_items(SEED)
    plain = LocalWorker(TOY, page_size=page_size)
    worker = LocalWorker(TOY, backends=graph_backends(graphs=False), page_size=page_size)
    expected, found = plain.run(mixed_requests(SEED), items=items), worker.run(mixed_requests(SEED), items=items)
    assert_same_answers(mixed_requests(SEED), expected, found)


@pytest.mark.parametrize("page_size", [1, 16])
def test_continuation_suffix_runs_as_a_graph(page_size: int) -> None:
    """Also the beam search it ends in."""
    prompt, suffix = np.arange(100, 160, dtype=np.int32), np.array([5, 6, 7], dtype=np.int32)
    greedy = SamplingParams(temperature=0.0, max_new_tokens=20, ignore_eos=True)
    first = make_spec("first", prompt, greedy, retain_ttl=100.0)
    search = SamplingParams(beam_width=8, n=8, max_new_tokens=3)
    second = make_spec("second", suffix, search, continuation=ContinuationSpec("first", 0, "finish", False, None))
    answers = []
    for backends in (None, graph_backends()):
        worker = LocalWorker(TOY, backends=backends, model_options=GRAPHS, page_size=page_size)
        replays = count_replays(worker.step_runner._runner) if backends else {}
        answers.append(worker.run([first]) + worker.run([second]))
        if backends:
            extends = [shape.tokens for shape in replays if shape.kind is GraphKind.EXTEND]
            assert extends == [64, 8], "the prompt, then the suffix and the last sampled token"
            assert answers[-1][1].inheritance is not None
    assert_same_answers([first, second], *answers)
