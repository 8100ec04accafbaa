"""The kernel compiles to machine code, for each generation of cards and each page size."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

COMPILE = """
import sys
import torch
from triton_compile import compiling_for
from baton.attention.triton_kv_indices import build_kv_indices

def zeros(*size):
    return torch.zeros(*size, dtype=torch.int32)

with compiling_for(int(sys.argv[1])) as compiled:
    for page_size in (1, 16, 64):
        build_kv_indices(zeros(4, 640), zeros(3), zeros(3), zeros(4), zeros(99), page_size=page_size, most_pages=9)
print(len(compiled))
"""


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernel_compiles(tmp_path, capability):
    pytest.importorskip("triton")
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT / "tests" / "doubles")}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(capability)], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "3"
