"""Which implementation each op gets where libraries are whole, missing, broken or wrong."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from baton.attention.numba_paged import compiling
from baton.attention.numba_paged.team import Team
from baton.runtime.layers import sgl_ops
from baton.runtime.layers.op_libraries import (
    LIBRARIES,
    OP_NAMES,
    SGL,
    TRITON,
    Library,
    load_sgl,
    load_triton,
    probe,
    select_ops,
)
from baton.runtime.layers.ops import TORCH_OPS, Ops, OpShape
from tests.doubles.fake_sgl_kernel import FakeSglKernel

CPU = torch.device("cpu")
OF_A_GPU = set(OP_NAMES) - {"look_up", "add"}
"""Torch's own are as good there."""
SHAPE = OpShape(96, 72, num_heads=4, num_kv_heads=2, head_dim=64, qk_norm=True, eps=1e-5)


def refuse(reason: Exception) -> Any:
    def load(device: torch.device) -> Mapping[str, Any]:
        raise reason

    return load


NO_TRITON = Library(TRITON, refuse(ImportError("no triton here\nand a second line")))
NO_SGL = Library(SGL, refuse(OSError("undefined symbol: torch_something")))
FAKE_SGL = Library(SGL, load_sgl)


def chosen(ops: Ops, library: Mapping[str, Any]) -> set[str]:
    """Names of the ops that came from the library (partials compare by what they call)."""
    functions = {name: getattr(function, "func", function) for name, function in library.items()}
    return {name for name in OP_NAMES if getattr(getattr(ops, name), "func", getattr(ops, name)) is functions.get(name)}


def run_probe(caplog, *libraries: Library) -> tuple[Ops, str, list[str]]:
    """-> ops, the info line, warnings"""
    caplog.clear()
    with caplog.at_level(logging.INFO, logger="baton.runtime.layers.op_libraries"):
        ops = probe(libraries, SHAPE, torch.bfloat16, CPU)
    (info,) = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    return ops, info, [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_all_working_sglang_kernel_ops_are_chosen(caplog, monkeypatch):
    with FakeSglKernel(monkeypatch):
        ops, info, warnings = run_probe(caplog, FAKE_SGL, NO_TRITON)
        assert chosen(ops, sgl_ops.load(CPU)) == OF_A_GPU
    assert info.startswith("layer ops: rms_norm sglang-kernel, add_rms_norm sglang-kernel")
    # What it lacks is Triton, the first choice for two ops.
    assert len(warnings) == 1 and "triton cannot be used (ImportError: no triton here)" in warnings[0]


def test_triton_is_used_without_sglang_kernel(caplog, interpreter):
    ops, info, warnings = run_probe(caplog, NO_SGL, Library(TRITON, load_triton))
    assert chosen(ops, load_triton(CPU)) == OF_A_GPU - {"transfer_kv"}
    assert ops.transfer_kv is TORCH_OPS.transfer_kv and "rms_norm triton" in info and "transfer_kv torch" in info
    assert len(warnings) == 1 and "undefined symbol" in warnings[0] and "pip install 'baton-serve[cuda]'" in warnings[0]


def test_missing_op_libraries_leave_torch_and_one_warning(caplog):
    ops, info, warnings = run_probe(caplog, NO_SGL, NO_TRITON)
    assert ops == TORCH_OPS
    assert all(f"{name} torch" in info for name in OP_NAMES)
    assert len(warnings) == 1 and "sglang-kernel cannot be used" in warnings[0] and "triton cannot" in warnings[0]
    assert f"this is torch {torch.__version__}" in warnings[0]


def raises(*_: object) -> None:
    raise RuntimeError("no kernel image is available for execution on the device\nCompile with TORCH_USE_CUDA_DSA")


def writes_nonsense(out: torch.Tensor, *_: object) -> None:
    out.fill_(7)


def writes_nothing(*_: object) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "lost", "said"),
    [
        ({"rmsnorm": None}, "rms_norm", "rms_norm of sglang-kernel failed (AttributeError"),
        (
            {"silu_and_mul": raises},
            "silu_and_mul",
            "silu_and_mul of sglang-kernel failed (RuntimeError: no",
        ),
        ({"fused_add_rmsnorm": writes_nonsense}, "add_rms_norm", "add_rms_norm of sglang-kernel gives wrong numbers"),
        ({"rotary_embedding": writes_nothing}, "rotate_and_store", "rotate_and_store of sglang-kernel gives wrong"),
    ],
    ids=["missing", "raising", "nonsense", "nothing"],
)
def test_one_broken_op_falls_back_alone(caplog, monkeypatch, change, lost, said):
    with FakeSglKernel(monkeypatch, **change):
        ops, info, warnings = run_probe(caplog, FAKE_SGL)
        assert chosen(ops, sgl_ops.load(CPU)) == OF_A_GPU - {lost}
    assert getattr(ops, lost) is getattr(TORCH_OPS, lost) and f"{lost} torch" in info
    assert len(warnings) == 1 and said in warnings[0] and "\n" not in warnings[0]


def test_broken_op_is_taken_from_next_library(caplog, monkeypatch, interpreter):
    with FakeSglKernel(monkeypatch, rmsnorm=writes_nonsense):
        ops, info, warnings = run_probe(caplog, FAKE_SGL, Library(TRITON, load_triton))
        assert chosen(ops, load_triton(CPU)) == {"rms_norm", "rotate_and_store", "copy_kv"}
        assert chosen(ops, sgl_ops.load(CPU)) == {"add_rms_norm", "silu_and_mul", "transfer_kv"}
    assert "rms_norm triton, add_rms_norm sglang-kernel" in info
    assert len(warnings) == 1 and "rms_norm of sglang-kernel gives wrong numbers" in warnings[0]


def test_working_first_choices_log_no_warning(caplog, monkeypatch, interpreter):
    with FakeSglKernel(monkeypatch):
        _, _, warnings = run_probe(caplog, *LIBRARIES)
    assert warnings == []


def test_real_loader_without_sglang_kernel_installed(caplog):
    if importlib.util.find_spec("sgl_kernel") is not None:
        pytest.skip("sglang-kernel is installed")
    _, _, warnings = run_probe(caplog, FAKE_SGL, NO_TRITON)
    assert "sglang-kernel cannot be used (ModuleNotFoundError: No module named 'sgl_kernel')" in warnings[0]


def test_cpu_without_numba_uses_torch_and_warns(caplog, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "numba", None)
    monkeypatch.setattr(compiling, "_parents", lambda: iter([tmp_path]))  # no kernel is kept
    for name in [name for name in sys.modules if ".numba_ops" in name]:
        monkeypatch.delitem(sys.modules, name)
    with caplog.at_level(logging.INFO, logger="baton.runtime.layers.op_libraries"):
        assert select_ops(CPU, torch.float32, SHAPE, Team()) == TORCH_OPS
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "numba cannot be used (NumbaMissingError" in warning and "pip install 'baton-serve[cpu]'" in warning
