"""The Triton kernels compile to machine code, for each generation of cards and each kind of model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

COMPILE = """
import sys
import torch
from triton_compile import compiling_for
from baton.runtime.layers import triton_ops
from baton.runtime.layers.op_trials import OpShape, Trial

SHAPES = [
    OpShape(4096, 14336, num_heads=32, num_kv_heads=8, head_dim=128, qk_norm=False, eps=1e-5),  # Llama 3.1, 8B
    OpShape(1024, 3072, num_heads=16, num_kv_heads=8, head_dim=128, qk_norm=True, eps=1e-6),  # Qwen3, 0.6B
    OpShape(896, 4864, num_heads=14, num_kv_heads=2, head_dim=64, qk_norm=False, eps=1e-6),  # Qwen2.5, 0.5B
]
with compiling_for(int(sys.argv[1])) as compiled:
    for shape in SHAPES:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for name in ("rms_norm", "add_rms_norm", "silu_and_mul", "rotate_and_store", "copy_kv"):
                Trial(shape, 2, dtype).found(name, getattr(triton_ops, name), torch.device("cpu"))
print(sorted(set(compiled)), len(compiled))
"""


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_compile(tmp_path, capability):
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT / "tests" / "doubles")}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(capability)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    names = ["_copy_kv_kernel", "_rms_norm_kernel", "_rotate_and_store_kernel", "_silu_and_mul_kernel"]
    assert done.stdout.strip() == f"{names} 45"
