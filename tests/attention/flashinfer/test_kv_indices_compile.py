"""The kernel compiles to machine code, for each generation of cards and each page size."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doubles.compile_apart import compile_apart

COMPILE = """
import torch
from tests.doubles.triton_compile import compiling_for
from baton.attention.flashinfer.triton_kv_indices import build_kv_indices

def zeros(*size):
    return torch.zeros(*size, dtype=torch.int32)

with compiling_for(capability) as compiled:
    for page_size in (1, 16, 64):
        build_kv_indices(zeros(4, 640), zeros(3), zeros(3), zeros(4), zeros(99), page_size=page_size, most_pages=9)
print(len(compiled))
"""


@pytest.mark.parametrize("capabilities", [(90,), pytest.param((80, 100), marks=pytest.mark.slow)], ids=str)
def test_kernel_compiles(tmp_path: Path, capabilities: tuple[int, ...]) -> None:
    assert compile_apart(COMPILE, tmp_path, capabilities) == dict.fromkeys(capabilities, "3")
