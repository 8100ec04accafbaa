"""The Triton kernels against their torch twins, in Triton's interpreter on the CPU."""

from __future__ import annotations

import pytest
import torch

from baton.runtime.layers.op_libraries import Trial, tolerance
from baton.runtime.layers.ops import TORCH_OPS, OpShape

CPU = torch.device("cpu")
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16


def make_shape(*, hidden=96, intermediate=72, heads=4, kv_heads=2, head_dim=64, qk_norm=False) -> OpShape:
    return OpShape(hidden, intermediate, heads, kv_heads, head_dim, qk_norm, 1e-5)


def compare(name: str, trial: Trial) -> None:
    from baton.runtime.layers import triton_ops

    allowed = tolerance(trial.dtype)
    found = trial.found(name, getattr(triton_ops, name), CPU)
    for part, expected in zip(found, trial.expected(name), strict=True):
        torch.testing.assert_close(part, expected, atol=allowed, rtol=allowed)


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize("qk_norm", [False, True], ids=["plain", "qk_norm"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (1, 1), (7, 1), (12, 4)])
def test_rotate_and_store(interpreter, heads, kv_heads, head_dim, qk_norm, dtype):
    shape = make_shape(heads=heads, kv_heads=kv_heads, head_dim=head_dim, qk_norm=qk_norm)
    compare("rotate_and_store", Trial(shape, 7, dtype, seed=heads))


@pytest.mark.parametrize("tokens", [1, 2, 33])
@pytest.mark.parametrize("head_dim", [8, 80, 96])
def test_rotate_and_store_of_odd_sizes(interpreter, head_dim, tokens):
    """Heads whose half is no power of two, and any number of tokens."""
    compare("rotate_and_store", Trial(make_shape(head_dim=head_dim, qk_norm=True), tokens, FLOAT32))


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16, FLOAT16], ids=str)
@pytest.mark.parametrize(("hidden", "intermediate"), [(64, 128), (96, 72), (1000, 1501)])
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "silu_and_mul"])
def test_row_ops_match_torch_twin(interpreter, name, hidden, intermediate, dtype):
    compare(name, Trial(make_shape(hidden=hidden, intermediate=intermediate), 5, dtype))


@pytest.mark.parametrize(("kv_heads", "head_dim"), [(2, 64), (1, 4), (3, 200)])
def test_copy_kv_is_exact(interpreter, kv_heads, head_dim):
    from baton.runtime.layers import triton_ops

    trial = Trial(make_shape(kv_heads=kv_heads, head_dim=head_dim), 9, BFLOAT16)
    for part, expected in zip(trial.found("copy_kv", triton_ops.copy_kv, CPU), trial.expected("copy_kv"), strict=True):
        assert torch.equal(part, expected)


def test_small_slots_are_copied_without_the_kernel(interpreter, monkeypatch):
    """6 bytes are no whole words; torch copies them."""
    from baton.runtime.layers import triton_ops

    monkeypatch.setattr(triton_ops, "_launch", pytest.fail)
    compare("copy_kv", Trial(make_shape(kv_heads=1, head_dim=3), 9, BFLOAT16))


@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm", "silu_and_mul", "rotate_and_store"])
def test_zero_tokens_launch_no_kernel(interpreter, monkeypatch, name):
    from baton.runtime.layers import triton_ops

    monkeypatch.setattr(triton_ops, "_launch", pytest.fail)
    trial = Trial(make_shape(), 0, FLOAT32)
    found = trial.found(name, getattr(triton_ops, name), CPU)
    assert [part.shape for part in found] == [part.shape for part in trial.expected(name)]


def test_torch_ops_pass_the_op_trial():
    trial = Trial(make_shape(qk_norm=True), 6, BFLOAT16)
    for name in ("rms_norm", "add_rms_norm", "silu_and_mul", "rotate_and_store", "copy_kv", "transfer_kv"):
        allowed = tolerance(BFLOAT16)
        for part, expected in zip(trial.found(name, getattr(TORCH_OPS, name), CPU), trial.expected(name), strict=True):
            torch.testing.assert_close(part, expected, atol=allowed, rtol=allowed)
