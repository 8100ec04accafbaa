"""Steps that are recorded on a CPU against the same steps, called kernel by kernel: they are the same numbers, bit by
bit."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.doubles.cpu_graphs import count_replays
from tests.doubles.lowered_processor import has_bfloat16_blocks
from tests.doubles.model_driver import ModelDriver
from tests.doubles.step_comparison import CONFIG, compare

pytest.importorskip("numba")

from baton.attention.numba_paged.recording import Program
from baton.attention.torch_native import TorchNativeBackend
from baton.runtime.config import ModelArgs
from baton.runtime.layers import product_trials
from baton.runtime.layers.products import NUMBA, ONEDNN, PLAIN, ProductChoice
from baton.runtime.runner import cuda_graph, model_runner
from baton.runtime.runner.model_runner import ModelRunner

QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 4}
WINDOWS = {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True, "sliding_window": 20}
MODELS: dict[str, dict[str, Any]] = {
    "q and k are normed": {},
    "products have biases": QWEN2,
    "a window in one layer": WINDOWS | {"max_window_layers": 1, "num_hidden_layers": 3, "layer_types": None},
    "a tied head": {"tie_word_embeddings": True},
    "a gated delta net": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
    },
    "short convolutions": {
        "architectures": ["Lfm2ForCausalLM"],
        "layer_types": ["conv", "full_attention"],
        "norm_eps": 1e-5,
        "block_auto_adjust_ff_dim": False,
    },
    "mamba 2": {
        "architectures": ["BambaForCausalLM"],
        "attn_layer_indices": [1],
        "mamba_n_heads": 64,
        "mamba_d_head": 8,
        "mamba_d_state": 32,
        "mamba_n_groups": 2,
    },
}


def make_runner(folder: Path, page_size: int = 1, *, captures: bool = True, **changes: Any) -> ModelRunner:
    """captures: all steps at once, as a server does while it is idle."""
    args: dict[str, Any] = {"model_path": str(folder), "load_format": "dummy", "device": "cpu", "dtype": "float32"}
    args |= {"linear_backend": "numba"} | changes
    runner = ModelRunner(
        ModelArgs(**args),
        context_length=0,
        num_rows=24,
        page_size=page_size,
        max_total_tokens=24 * 512,
        max_running_requests=16,
    )
    while captures and runner._graphs is not None and runner._graphs.capture_next():
        pass
    return runner


@pytest.fixture(autouse=True)
def one_way_with_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial at the start finds out who attends to prompts faster, our kernel or torch. Where they take about the same
    time, two runners would not compute the same bits."""
    seconds = "baton.attention.numba_paged.library._seconds"
    monkeypatch.setattr(seconds, lambda backend, scene: float(isinstance(backend, TorchNativeBackend)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def both(folder: Path, page_size: int, **changes: Any) -> tuple[ModelRunner, ModelRunner]:
    plain = make_runner(folder, page_size, disable_cuda_graph=True, **changes)
    recorded = make_runner(folder, page_size, **changes)
    assert recorded.has_graphs and not plain.has_graphs
    return plain, recorded


@pytest.mark.parametrize(
    ("page_size", "dtype"),
    [(1, "float32"), (64, "float32"), *(pytest.param(size, "bfloat16", marks=has_bfloat16_blocks) for size in (1, 16))],
)
def test_random_steps(folder: Path, page_size: int, dtype: str) -> None:
    """Decodes and extends, short and long, in one step or apart."""
    replays = compare(*both(folder, page_size, dtype=dtype), page_size, atol=0.0)
    assert len(replays) > 10 and max(shape.tokens for shape in replays) <= model_runner.MAX_RECORDED


@pytest.mark.parametrize("kv", ["int8", "fp8"])
def test_random_steps_over_a_quantized_pool(folder: Path, kv: str) -> None:
    replays = compare(*both(folder, 16, kv_cache_dtype=kv), 16, steps=25, atol=0.0)
    assert len(replays) > 5


@pytest.mark.parametrize(
    ("late", "is_recorded"),
    [(ProductChoice.of(NUMBA), True), (ProductChoice((NUMBA, ONEDNN, NUMBA, ONEDNN)), True), (PLAIN, False)],
    ids=str,
)
def test_late_product_trials_update_recorded_steps(
    folder: Path, late: ProductChoice, is_recorded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The usual forms, Numba's for few rows, are used until then."""
    monkeypatch.setattr(product_trials, "SMALL_MODEL_BYTES", 0)
    monkeypatch.setattr(product_trials, "_seconds", lambda call: (call(), 1.0)[1])
    monkeypatch.setattr(product_trials, "usual_choice", lambda forms: ProductChoice.of(forms[-1]))
    runner, plain = make_runner(folder, linear_backend="auto"), make_runner(folder, linear_backend="torch")
    assert runner.has_late_work and not plain.has_late_work and plain.run_late_work() is None
    before = runner._graphs
    assert before is not None
    compare(plain, runner, 1, steps=8, atol=2e-4)
    monkeypatch.setattr(product_trials, "best_choice", lambda times: late)
    monkeypatch.setattr(runner._others, "busy_cores", lambda: 0.0)
    while runner._late_trials is not None:
        assert runner._graphs is before, "old graphs have the forms that the layers have together"
        runner.run_late_work()
    while runner.run_late_work() is not None:
        pass
    assert not runner.has_late_work and runner.has_graphs is is_recorded
    assert (runner._graphs is before) is (late == ProductChoice.of(NUMBA)), "captured again if a form has changed"
    if is_recorded:  # or there is nothing to replay
        compare(plain, runner, 1, steps=8, atol=2e-4)


def test_failed_late_trial_leaves_layers_unchanged(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(product_trials, "SMALL_MODEL_BYTES", 0)
    runner, plain = make_runner(folder, linear_backend="auto"), make_runner(folder, linear_backend="torch")
    monkeypatch.setattr(product_trials, "best_choice", lambda times: 1 // 0)
    monkeypatch.setattr(runner._others, "busy_cores", lambda: 0.0)
    returned: list[bool] = []
    monkeypatch.setattr(model_runner, "return_free_memory", lambda: returned.append(runner.has_late_work))
    while runner.run_late_work() is not None:
        assert not returned
    assert returned == [False], "once, after the last"
    assert "matrix products are not tried any further: ZeroDivisionError" in caplog.text
    assert runner.run_late_work() is None and runner.has_graphs
    compare(plain, runner, 1, steps=8, atol=2e-4)


def test_steps_are_recorded_when_idle_or_wanted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "WANTED", 3)
    runner, plain = make_runner(folder, captures=False), make_runner(folder, linear_backend="torch")
    graphs = runner._graphs
    assert graphs is not None and graphs.num_captured == 2 and runner.has_late_work
    drivers = [ModelDriver(each, seed=1) for each in (runner, plain)]
    rows = [[driver.open(np.arange(9) + i) for i in range(5)] for driver in drivers]
    captured = []
    for _ in range(4):
        found, expected = (driver.step([(row, 1) for row in of]).logits for driver, of in zip(drivers, rows))
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
        captured.append(graphs.num_captured)
    assert captured == [2, 2, 3, 3], "the third step of five tokens is worth a recording"
    before = dict(graphs._graphs)
    monkeypatch.setattr(runner._others, "busy_cores", lambda: 0.0)
    count = 0
    while runner.run_late_work() is not None:
        count += 1
        assert graphs.num_captured == 3 + count
    assert graphs.num_captured == model_runner.MAX_RECORDED and not runner.has_late_work
    assert all(graphs._graphs[shape] is graph for shape, graph in before.items())


def test_phases_of_a_start_are_reported(folder: Path) -> None:
    phases: list[str] = []
    args = ModelArgs(model_path=str(folder), load_format="dummy", device="cpu", linear_backend="numba")
    ModelRunner(args, context_length=0, num_rows=2, page_size=1, max_total_tokens=512, report_phase=phases.append)
    assert phases == ["compiling or loading kernels", "loading weights", "recording steps"]


def test_steps_that_cannot_be_recorded_run_unrecorded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    runner, plain = make_runner(folder, captures=False), make_runner(folder, linear_backend="torch")
    graphs = runner._graphs
    assert graphs is not None
    monkeypatch.setattr(graphs, "_capture", lambda shape: 1 // 0)
    while runner.run_late_work() is not None:
        pass
    assert graphs.num_captured == 2 and "no recorded steps of 47 tokens; each kernel is launched" in caplog.text
    compare(plain, runner, 1, steps=8, atol=2e-4)


@pytest.mark.parametrize("name", MODELS)
def test_recorded_steps_of_all_model_features(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | MODELS[name]))
    assert compare(*both(tmp_path, 1), 1, steps=25, atol=0.0)


@pytest.mark.parametrize("threads", [1, 3])
def test_recorded_steps_with_changed_thread_count(folder: Path, threads: int) -> None:
    """Which may change from step to step."""
    plain, recorded = both(folder, 1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        assert compare(plain, recorded, 1, steps=25, atol=0.0)
    finally:
        torch.set_num_threads(before)


def test_flags_choose_the_recorded_shapes(folder: Path) -> None:
    few = make_runner(folder, cuda_graph_max_bs=2)
    replays = count_replays(few)
    driver = ModelDriver(few)
    driver.generate([driver.open([1]), driver.open([2]), driver.open([3])], 3)
    assert not replays, "three tokens are too many"
    driver.generate([driver.open([1, 2])], 3)
    assert Counter({shape.tokens: count for shape, count in replays.items()}) == {2: 1, 1: 2}, "the prompt is one, too"


def test_unrecordable_products_disable_recorded_steps(tmp_path: Path) -> None:
    """33 × 3 outputs fill no blocks."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"hidden_size": 264}))
    runner = make_runner(tmp_path)
    assert not runner.has_graphs
    driver = ModelDriver(runner)
    driver.generate([driver.open([1, 2])], 3)


def test_wrong_recording_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = Program.run

    def skips_the_last(self: Program) -> None:
        self._whole.arguments[1] = len(self._calls) - 1
        run(self)

    monkeypatch.setattr(Program, "run", skips_the_last)
    assert not make_runner(folder).has_graphs
    assert "no recorded steps; each kernel is launched separately: a recorded step of 1 tokens gives" in caplog.text
