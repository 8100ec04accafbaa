"""Steps that run as graphs against the same steps launched one kernel at a time. On a CPU a graph computes again what a
CUDA graph would replay, and FlashInfer is a double; with a GPU both are real."""

from __future__ import annotations

import dataclasses
import gc
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from baton.attention.backend import AttentionBatch, GraphBackend, GraphKind, GraphShape, SharedPrefix
from baton.attention.flashinfer import backend as flashinfer
from baton.attention.flashinfer import kernel
from baton.runtime.config import ModelArgs
from baton.runtime.runner.cuda_graph import CudaRecorder
from baton.runtime.runner.device_backends import DeviceBackends
from baton.runtime.runner.model_runner import ModelRunner
from tests.doubles.cpu_graphs import Rerun, count_replays, graph_backends
from tests.doubles.model_driver import ModelDriver
from tests.doubles.step_comparison import CONFIG, compare


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture
def small_workspaces(monkeypatch):
    monkeypatch.setattr(kernel, "WORKSPACE_BYTES", 1 << 10)


def make_runner(folder: Path, backends: DeviceBackends | None, page_size: int, **changes: Any) -> ModelRunner:
    args: dict[str, Any] = {"model_path": str(folder), "load_format": "dummy", "cuda_graph_max_tokens": 64}
    return ModelRunner(
        ModelArgs(**(args | changes)),
        context_length=0,
        num_rows=24,
        page_size=page_size,
        max_total_tokens=24 * 512,
        max_running_requests=16,
        backends=backends,
    )


@pytest.mark.usefixtures("small_workspaces")
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_random_steps(folder, page_size):
    plain = make_runner(folder, None, page_size, device="cpu")
    graphs = make_runner(folder, graph_backends(), page_size, device="cpu")
    assert graphs.has_graphs and not plain.has_graphs
    replays = compare(plain, graphs, page_size, atol=1e-4)
    assert {shape.kind for shape in replays} == {GraphKind.DECODE, GraphKind.EXTEND}
    assert len(replays) >= 4, "of several sizes"


@pytest.mark.usefixtures("small_workspaces")
def test_flags_choose_the_captured_shapes(folder, capsys):
    none = make_runner(folder, graph_backends(), 1, device="cpu", cuda_graph_max_bs=0)
    assert not none.has_graphs
    few = make_runner(folder, graph_backends(), 1, device="cpu", cuda_graph_max_bs=2, cuda_graph_max_tokens=0)
    assert few._graphs is not None and set(few._graphs._graphs) == {
        GraphShape(GraphKind.DECODE, 1, 1),
        GraphShape(GraphKind.DECODE, 2, 2),
    }
    replays = count_replays(few)
    driver = ModelDriver(few)
    driver.generate([driver.open([1, 2]), driver.open([3]), driver.open([4])], 3)
    assert not replays, "three sequences are too many"
    driver.generate([driver.open([1, 2])], 3)
    assert replays == {GraphShape(GraphKind.DECODE, 1, 1): 2}


def test_a_replay_reads_the_current_inputs():
    x = torch.arange(3.0)
    output, replay = Rerun().record(lambda: x * 2)
    x += 1
    assert output.tolist() == [0, 2, 4]
    replay()
    assert output.tolist() == [2, 4, 6]


@pytest.mark.usefixtures("small_workspaces")
def test_failed_capture_falls_back_to_plain_steps(folder, caplog):
    class Broken:
        name = "CUDA graphs"

        def record(self, run):
            raise RuntimeError("operation not permitted when stream is capturing")

    backends = dataclasses.replace(graph_backends(), recorder=Broken)
    runner = make_runner(folder, backends, 1, device="cpu")
    assert not runner.has_graphs and gc.isenabled()
    assert "no CUDA graphs" in caplog.text and "not permitted when stream is capturing" in caplog.text
    driver = ModelDriver(runner)
    driver.generate([driver.open([1, 2])], 3)


@pytest.mark.usefixtures("small_workspaces")
def test_narrow_beams_use_a_decode_graph(folder, monkeypatch):
    monkeypatch.setattr(flashinfer, "SHARED_KEYS", 1)
    runner = make_runner(folder, graph_backends(), 1, device="cpu")  # 16 rows: no graph reads prefixes apart
    table = torch.zeros(25, 512, dtype=torch.int32)
    rows, ones = np.arange(12, dtype=np.int32), np.ones(12, dtype=np.int32)
    batch = AttentionBatch(table, rows, 300 * ones, ones, 24, [SharedPrefix(0, 12, 300)])
    assert isinstance(runner.attention, GraphBackend) and runner._graphs is not None
    assert runner.attention.graph_kind(batch) is GraphKind.SHARED
    assert runner._graphs.find_shape(batch) == GraphShape(GraphKind.DECODE, 16, 16)


@pytest.mark.gpu
def test_a_cuda_graph_reads_the_current_inputs():
    x = torch.arange(3.0, device="cuda")
    output, replay = CudaRecorder().record(lambda: x * 2)
    x += 1
    replay()
    assert output.tolist() == [2, 4, 6]


@pytest.mark.gpu
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_random_steps_on_the_device(folder, page_size):
    """bfloat16 rounds differently in steps of other shapes; the models are the same."""
    plain = make_runner(folder, None, page_size, device="cuda", disable_cuda_graph=True)
    graphs = make_runner(folder, None, page_size, device="cuda")
    assert graphs.has_graphs and not plain.has_graphs
    assert graphs.attention_name == plain.attention_name == "flashinfer"
    replays = compare(plain, graphs, page_size, atol=0.1)
    assert {shape.kind for shape in replays} == {GraphKind.DECODE, GraphKind.EXTEND}


@pytest.mark.gpu
def test_flashinfer_graphs_match_torch_on_gpu(folder):
    plain = make_runner(folder, None, 1, device="cuda", attention_backend="torch_native")
    graphs = make_runner(folder, None, 1, device="cuda")
    assert not plain.has_graphs
    compare(plain, graphs, 1, atol=0.1)
