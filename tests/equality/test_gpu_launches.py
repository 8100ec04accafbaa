"""On a GPU no launch of an overlapped worker waits, with the real model runner, attention, graphs and draws; torch's
own check sees to that. The same run on a CPU shows that the test does what it says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.runtime.step_runner import StepInFlight
from baton.scheduler.batch import ScheduleBatch
from tests.doubles.local_worker import LocalWorker
from tests.doubles.mixed_requests import mixed_requests, some_items

TOY = Path(__file__).parents[2] / "examples" / "toy_model"
SEED = 3


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The toy model's tokenizer and vocabulary, in a shape that kernels are made for; the weights are dummies."""
    for file in TOY.glob("*token*.json"):
        shutil.copy(file, tmp_path)
    shape = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    config = json.loads((TOY / "config.json").read_text()) | shape
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("disable_cuda_graph", [False, True], ids=["graphs", "no graphs"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_overlapped_launches_never_synchronise(monkeypatch, model, device, disable_cuda_graph):
    """The second of two equal runs is watched: in the first, kernels are compiled and memory is taken."""
    kind: dict[str, Any] = {"device": device, "dtype": "bfloat16" if device == "cuda" else "float32"}
    kind |= {"load_format": "dummy", "disable_cuda_graph": disable_cuda_graph}
    worker = LocalWorker(model, overlap=True, model_options=kind, disable_radix_cache=True, chunked_prefill_size=64)
    worker.run(mixed_requests(SEED), items=some_items(SEED))

    launch, watched = worker.step_runner.launch, []

    def watching(batch: ScheduleBatch, previous: StepInFlight | None) -> StepInFlight:
        if batch.beams or device == "cpu":
            return launch(batch, previous)
        watched.append(batch.mode)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(batch, previous)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(worker.step_runner, "launch", watching)
    answers = worker.run(mixed_requests(SEED), items=some_items(SEED))
    assert all(answer.finish is not None for answer in answers)
    assert device == "cpu" or len(set(watched)) == 2
