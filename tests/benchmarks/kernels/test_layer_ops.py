from __future__ import annotations

import sys

import torch

from baton.runtime.layers.op_libraries import OP_NAMES
from baton.runtime.layers.ops import OpShape
from benchmarks.kernels import layer_ops


def test_table_lists_every_layer_op_and_token_count(monkeypatch, capsys):
    tiny = OpShape(64, 48, num_heads=2, num_kv_heads=1, head_dim=16, qk_norm=True, eps=1e-5)
    monkeypatch.setattr(layer_ops, "MODELS", {"llama-3.1-8b": tiny})
    options = ["--device", "cpu", "--dtype", "float32", "--tokens", "1", "5", "--repeat", "1"]
    monkeypatch.setattr(sys, "argv", ["layer_ops.py", *options])
    layer_ops.main()
    lines = capsys.readouterr().out.splitlines()
    assert torch.__version__ in lines[0] and lines[1].split() == ["us", "per", "call", "tokens", "torch", "GB/s"]
    rows = [line.split()[:2] for line in lines[2:]]
    assert rows == [[name, tokens] for name in OP_NAMES if name != "transfer_kv" for tokens in ("1", "5")]


def test_bytes_moved_per_call():
    shape = OpShape(64, 48, num_heads=2, num_kv_heads=1, head_dim=16, qk_norm=False, eps=1e-5)
    assert layer_ops.bytes_moved("add_rms_norm", shape, 3, 0, 2) == 2 * 4 * 64 * 3
    assert layer_ops.bytes_moved("rotate_and_store", shape, 3, 0, 2) == 2 * 2 * 64 * 3
    assert layer_ops.bytes_moved("copy_kv", shape, 3, 5, 2) == 2 * 4 * layer_ops.LAYERS * 16 * 5
