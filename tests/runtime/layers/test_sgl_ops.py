"""Our calls of sglang-kernel, against operations of the same names, schemas and meanings written in torch.

The schemas are those that sglang-kernel 0.4.4 registers. What its kernels compute is checked on a GPU only.
"""

from __future__ import annotations

import pytest
import torch

from baton.runtime.layers import sgl_ops
from baton.runtime.layers.op_libraries import Trial, tolerance
from baton.runtime.layers.ops import OpShape
from tests.doubles.fake_sgl_kernel import FakeSglKernel

CPU = torch.device("cpu")


def make_shape(*, intermediate=72, heads=4, kv_heads=2, head_dim=64, qk_norm=False) -> OpShape:
    return OpShape(96, intermediate, heads, kv_heads, head_dim, qk_norm, 1e-5)


def compare(name: str, trial: Trial) -> None:
    allowed = tolerance(trial.dtype)
    found = trial.found(name, sgl_ops.load(CPU)[name], CPU)
    for part, expected in zip(found, trial.expected(name), strict=True):
        torch.testing.assert_close(part, expected, atol=allowed, rtol=allowed)


@pytest.fixture
def kernel(monkeypatch):
    with FakeSglKernel(monkeypatch) as fake:
        yield fake


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("qk_norm", [False, True], ids=["plain", "qk_norm"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (1, 1), (7, 1)])
def test_rotate_and_store(kernel, heads, kv_heads, qk_norm, dtype):
    compare("rotate_and_store", Trial(make_shape(heads=heads, kv_heads=kv_heads, qk_norm=qk_norm), 7, dtype))
    assert kernel.calls == ["rotary_embedding"]


@pytest.mark.parametrize(
    ("name", "called"),
    [("rms_norm", "rmsnorm"), ("add_rms_norm", "fused_add_rmsnorm"), ("silu_and_mul", "silu_and_mul")],
)
def test_row_ops_match_torch_twin(kernel, name, called):
    compare(name, Trial(make_shape(), 5, torch.bfloat16))
    assert kernel.calls == [called]


@pytest.mark.parametrize(("name", "calls"), [("copy_kv", 1), ("transfer_kv", 2)])
def test_copies(kernel, name, calls):
    compare(name, Trial(make_shape(), 6, torch.bfloat16))
    assert kernel.calls == ["transfer_kv_all_layer"] * calls


def test_unsupported_layouts_go_through_torch(kernel):
    """Rows that do not begin at a multiple of 16 bytes; slots that are no whole words."""
    compare("silu_and_mul", Trial(make_shape(intermediate=71), 5, torch.bfloat16))
    compare("copy_kv", Trial(make_shape(kv_heads=1, head_dim=3), 6, torch.bfloat16))
    assert kernel.calls == []


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "silu_and_mul", "rotate_and_store", "transfer_kv"])
def test_zero_tokens_call_no_kernel(kernel, name):
    compare(name, Trial(make_shape(), 0, torch.float32))
    assert kernel.calls == []
