"""Which implementations a device gets, and what is said where they cannot be had."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from baton.attention.backend import AttentionSpec
from baton.attention.flashinfer import library
from baton.attention.flashinfer.library import FlashInferUnavailable
from baton.attention.numba_paged.compiling import NumbaMissingError
from baton.memory_pool.kv_pool import MHAKVPool, uniform_shapes
from baton.runtime.checkpoint.model_files import ModelLoadError
from baton.runtime.config import ModelArgs
from baton.runtime.layers.embedding import widened_product
from baton.runtime.layers.ops import TORCH_OPS
from baton.runtime.model_config import DecoderTraits
from baton.runtime.runner import device_backends
from baton.runtime.runner.cuda_graph import CudaRecorder
from baton.runtime.runner.device_backends import TORCH_BACKENDS, DeviceBackends, choose_backends
from tests.doubles.lowered_processor import lower_to_avx2

SPEC = AttentionSpec(0, 4, 2, 64, 0.125)
SMALL = AttentionSpec(0, 4, 2, 32, 32**-0.5)
CPU = torch.device("cpu")
CUDA = torch.device("cuda")
CONFIG: Any = SimpleNamespace(  # what layer ops look at
    hidden_size=256,
    intermediate_size=512,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    rms_norm_eps=1e-5,
    traits=DecoderTraits(layer_windows=(None,)),
)


def choose(device: torch.device = CUDA, specs=(SPEC,), dtype=torch.bfloat16, **flags) -> DeviceBackends:
    args = ModelArgs(model_path="m", **flags)
    return choose_backends(args, CONFIG, specs, page_size=1, dtype=dtype, device=device)


@pytest.fixture
def a_gpu(monkeypatch):
    """One on which everything works."""
    monkeypatch.setattr(device_backends, "select_ops", lambda *_: TORCH_OPS)
    monkeypatch.setattr(library, "load_attention", lambda specs, **_: lambda pool, layers: "flashinfer")


def test_small_cpu_models_use_torch():
    backends = choose(CPU, [SMALL])
    assert (backends.ops, backends.attention, backends.recorder) == (TORCH_OPS, TORCH_BACKENDS.attention, None)


def test_flashinfer_is_refused_on_cpu():
    with pytest.raises(ModelLoadError, match="needs a CUDA device, not cpu; use auto"):
        choose(CPU, attention_backend="flashinfer")


def pool(spec: AttentionSpec) -> MHAKVPool:
    heads, dim = spec.num_kv_heads, spec.head_dim
    return MHAKVPool(num_tokens=8, page_size=1, shapes=uniform_shapes(1, heads, dim), dtype=torch.bfloat16, device=CPU)


def test_large_cpu_models_use_numba_kernel(caplog):
    pytest.importorskip("numba")
    backends = choose(CPU)
    assert backends.attention(pool(SPEC), [SPEC]).name == "numba"
    assert backends.recorder is not None and backends.recorder().name == "recorded steps" and backends.any_tokens
    assert choose(CPU, disable_cuda_graph=True).recorder is None
    assert choose(CPU, linear_backend="onednn").recorder is None, "torch's products cannot be recorded"
    assert backends.ops.rotate_and_store is not TORCH_OPS.rotate_and_store
    assert backends.ops.copy_kv is TORCH_OPS.copy_kv
    by_name = choose(CPU, attention_backend="torch_native")
    assert (by_name.ops, by_name.attention) == (TORCH_OPS, TORCH_BACKENDS.attention)
    assert choose(CPU, [SMALL]).attention is TORCH_BACKENDS.attention
    assert choose(CPU, [SMALL], attention_backend="numba").attention(pool(SMALL), [SMALL]).name == "numba"
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_logits_of_half_precision_are_not_rounded(caplog, monkeypatch):
    pytest.importorskip("numba")
    from baton.runtime.layers.numba_ops import logits

    assert isinstance(choose(CPU).logits, logits.ExactLogits)
    assert isinstance(choose(CPU, attention_backend="torch_native").logits, logits.ExactLogits)
    assert choose(CPU, [SMALL]).logits is widened_product
    in_float32 = choose_backends(ModelArgs(), CONFIG, [SPEC], page_size=1, dtype=torch.float32, device=CPU)
    assert in_float32.logits is None, "nothing rounds there"
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    monkeypatch.setattr(logits.ExactLogits, "_check", lambda self: 1 / 0)
    assert choose(CPU, attention_backend="torch_native").logits is None
    assert "logits are rounded to bfloat16: ZeroDivisionError" in caplog.text


def test_packed_weight_products_use_numba_kernel(caplog, monkeypatch):
    pytest.importorskip("numba")
    from baton.runtime.layers.numba_ops import blocks

    in_float32 = partial(choose, dtype=torch.float32)  # which is packed on every processor
    assert isinstance(in_float32(CPU).products, blocks.BlockProducts)
    assert in_float32(CPU, [SMALL]).products is None, "small models gain nothing"
    assert in_float32(CPU, attention_backend="torch_native").products is None
    assert in_float32(CPU, linear_backend="torch").products is None
    by_name = in_float32(CPU, [SMALL], attention_backend="torch_native", linear_backend="numba")
    assert isinstance(by_name.products, blocks.BlockProducts)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    with pytest.raises(ModelLoadError, match="--linear-backend numba: there is no kernel for float16; or use auto"):
        args = ModelArgs(linear_backend="numba")
        choose_backends(args, CONFIG, [SPEC], page_size=1, dtype=torch.float16, device=CPU)
    monkeypatch.setattr(blocks, "width_of_blocks", lambda *_: 1 / 0)
    assert in_float32(CPU).products is None
    assert "matrix products are oneDNN's own: ZeroDivisionError" in caplog.text
    caplog.clear()
    with pytest.raises(ModelLoadError, match=r"--linear-backend numba: ZeroDivisionError: .*; or use auto"):
        in_float32(CPU, [SMALL], linear_backend="numba")
    monkeypatch.setattr(blocks, "width_of_blocks", lambda *_: 64)
    monkeypatch.setattr(blocks, "block_kernel", cannot_compile)
    with pytest.raises(
        ModelLoadError, match=r"--linear-backend numba: Numba cannot .* pip install 'baton-serve\[cpu\]'"
    ):
        in_float32(CPU, [SMALL], linear_backend="numba")
    assert not caplog.records, "an error says it all"


def test_widened_weights_need_no_product_kernel(caplog, monkeypatch):
    pytest.importorskip("numba")
    from baton.runtime.layers.numba_ops import blocks

    lower_to_avx2(monkeypatch)
    monkeypatch.setattr(blocks, "width_of_blocks", blocks.width_of_blocks.__wrapped__)  # nothing found out before
    backends = choose(CPU)
    assert backends.products is None and backends.attention(pool(SPEC), [SPEC]).name == "numba"
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    with pytest.raises(ModelLoadError, match="--linear-backend numba: CannotPackError: oneDNN packs no bfloat16"):
        choose(CPU, linear_backend="numba")


def test_wrong_attention_kernel_is_not_used(monkeypatch, caplog):
    pytest.importorskip("numba")
    from baton.attention.numba_paged.backend import NumbaPagedBackend

    monkeypatch.setattr(NumbaPagedBackend, "run", lambda self, spec, q, sinks=None: torch.zeros_like(q))
    backends = choose(CPU)
    assert (backends.ops, backends.attention) == (TORCH_OPS, TORCH_BACKENDS.attention)
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert "torch's own kernels" in record.message and "decode" in record.message
    with pytest.raises(ModelLoadError, match="--attention-backend numba: AssertionError: decode"):
        choose(CPU, attention_backend="numba")


def cannot_compile(*_args, **_kwargs):
    """As a builder of kernels, none of which is kept, without Numba."""
    raise NumbaMissingError("Numba cannot be imported (no module); pip install 'baton-serve[cpu]'")


def test_missing_numba_warns_with_install_command(monkeypatch, caplog):
    from baton.attention.numba_paged import backend
    from baton.runtime.layers.numba_ops import logits

    monkeypatch.setattr(backend, "attention_kernel", cannot_compile)
    monkeypatch.setattr(logits, "logits_kernel", cannot_compile)
    backends = choose(CPU)
    assert (backends.ops, backends.attention) == (TORCH_OPS, TORCH_BACKENDS.attention) and backends.logits is None
    assert "pip install 'baton-serve[cpu]'" in caplog.text and "logits are rounded to bfloat16" in caplog.text


@pytest.mark.usefixtures("a_gpu")
def test_numba_attention_is_refused_on_gpu():
    with pytest.raises(ModelLoadError, match="numba is for a CPU; use auto"):
        choose(attention_backend="numba")


@pytest.mark.usefixtures("a_gpu")
def test_gpu_uses_flashinfer_and_cuda_graphs():
    backends = choose()
    pool: Any = None
    assert backends.recorder is CudaRecorder and backends.attention(pool, []) == "flashinfer"
    assert choose(disable_cuda_graph=True).recorder is None


@pytest.mark.usefixtures("a_gpu")
def test_steps_with_experts_are_not_captured(monkeypatch):
    some: Any = "some"
    monkeypatch.setattr(CONFIG, "traits", DecoderTraits(layer_windows=(None,), experts=some))
    backends = choose()
    pool: Any = None
    assert backends.recorder is None and backends.attention(pool, []) == "flashinfer"


@pytest.mark.usefixtures("a_gpu")
def test_torch_native_on_gpu_captures_no_graphs():
    """Its shapes change from step to step: nothing to capture."""
    backends = choose(attention_backend="torch_native")
    assert backends.recorder is None and backends.attention is TORCH_BACKENDS.attention


@pytest.mark.usefixtures("a_gpu")
def test_missing_flashinfer_logs_one_warning_with_reason(monkeypatch, caplog):
    def fail(specs, **_):
        raise FlashInferUnavailable("FlashInfer is not there; pip install 'baton-serve[cuda]'")

    monkeypatch.setattr(library, "load_attention", fail)
    backends = choose()
    assert backends.recorder is None and backends.attention is TORCH_BACKENDS.attention
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "pip install 'baton-serve[cuda]'" in record.message
    with pytest.raises(ModelLoadError, match="--attention-backend flashinfer: FlashInfer is not there"):
        choose(attention_backend="flashinfer")


def test_cpu_worker_imports_no_cuda_libraries():
    """Nor do its operations and draws; Numba only where it is used."""
    pytest.importorskip("numba")
    code = """
import sys, baton.runtime.worker, baton.runtime.runner.model_runner
assert "numba" not in sys.modules, "imported only where it is used"
from baton.attention.numba_paged.compiling import NumbaMissingError
from baton.attention.numba_paged.team import Team
from baton.runtime.config import ModelArgs
from baton.runtime.layers.op_libraries import select_ops
from baton.runtime.layers.ops import OpShape
from baton.runtime.runner.device_backends import choose_backends
from baton.runtime.sampling.op_providers import select_sampling_ops
from baton.runtime.sampling.ops import TORCH_OPS
import torch
cpu = torch.device("cpu")
choose_backends(ModelArgs(), None, [], page_size=1, dtype=torch.float32, device=cpu)
assert select_sampling_ops(cpu, 100) is TORCH_OPS
ops = select_ops(cpu, torch.float32, OpShape(512, 1376, 8, 4, 64, False, 1e-5), Team())
assert "numba_ops" in type(ops.rotate_and_store).__module__, ops
loaded = {"triton", "sgl_kernel", "flashinfer", "tvm_ffi"} & set(sys.modules)
assert not loaded, loaded
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
