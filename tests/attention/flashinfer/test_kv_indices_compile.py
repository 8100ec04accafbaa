"""The kernel compiles to machine code, for each generation of cards and each page size."""

from __future__ import annotations

import pytest
from compile_apart import compile_apart

COMPILE = """
import sys
import torch
from triton_compile import compiling_for
from baton.attention.flashinfer.triton_kv_indices import build_kv_indices

def zeros(*size):
    return torch.zeros(*size, dtype=torch.int32)

with compiling_for(int(sys.argv[1])) as compiled:
    for page_size in (1, 16, 64):
        build_kv_indices(zeros(4, 640), zeros(3), zeros(3), zeros(4), zeros(99), page_size=page_size, most_pages=9)
print(len(compiled))
"""


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernel_compiles(tmp_path, capability):
    printed = compile_apart(COMPILE, capability, tmp_path)
    assert printed == "3"
