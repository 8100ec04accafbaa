"""The Triton kernels compile to machine code, for each generation of cards and each kind of model."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doubles.compile_apart import compile_apart

COMPILE = """
import torch
from tests.doubles.triton_compile import compiling_for
from baton.runtime.layers import triton_ops
from baton.runtime.layers.ops import OpShape
from baton.runtime.layers.op_libraries import Trial

SHAPES = [
    OpShape(4096, 14336, num_heads=32, num_kv_heads=8, head_dim=128, qk_norm=False, eps=1e-5),  # Llama 3.1, 8B
    OpShape(1024, 3072, num_heads=16, num_kv_heads=8, head_dim=128, qk_norm=True, eps=1e-6),  # Qwen3, 0.6B
    OpShape(896, 4864, num_heads=14, num_kv_heads=2, head_dim=64, qk_norm=False, eps=1e-6),  # Qwen2.5, 0.5B
]
with compiling_for(capability) as compiled:
    for shape in SHAPES if capability == 90 else SHAPES[:1]:  # the language is the same for all of them
        dtypes = (torch.bfloat16, torch.float16, torch.float32)
        for dtype in dtypes if all_pairs or shape is SHAPES[0] else dtypes[:1]:
            for name in ("rms_norm", "add_rms_norm", "silu_and_mul", "rotate_and_store", "copy_kv"):
                Trial(shape, 2, dtype).found(name, getattr(triton_ops, name), torch.device("cpu"))
print(sorted(set(compiled)), len(compiled))
"""


@pytest.mark.parametrize(
    ("capabilities", "all_pairs"),
    [
        ((90,), False),
        pytest.param((90,), True, marks=pytest.mark.slow),
        pytest.param((80, 100), True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_kernels_compile(tmp_path: Path, capabilities: tuple[int, ...], all_pairs: bool) -> None:
    """Each shape and each type; all pairs of them in the slow test."""
    names = ["_copy_kv_kernel", "_rms_norm_kernel", "_rotate_and_store_kernel", "_silu_and_mul_kernel"]
    expected = {90: f"{names} {45 if all_pairs else 25}"}
    found = compile_apart(f"all_pairs = {all_pairs}\n{COMPILE}", tmp_path, capabilities)
    assert found == {capability: expected.get(capability, f"{names} 15") for capability in capabilities}
