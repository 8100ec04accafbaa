"""What Baton asks of flash-linear-attention and causal-conv1d, with stand-ins for both; and what it does where they
fail."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from baton.runtime.checkpoint.hf_config import load_model_config
from baton.runtime.layers.states import fla_states
from baton.runtime.layers.states.ops import StateOps
from baton.runtime.layers.states.selection import select_gpu_states
from baton.runtime.layers.states.torch_states import TORCH_STATES
from tests.doubles import fake_fla
from tests.doubles.state_steps import SCENES, Row
from tests.doubles.state_twins import (
    CONVOLUTIONS,
    DELTAS,
    SCANS,
    check_gated_delta,
    check_short_conv,
    check_ssd,
)
from tests.doubles.tiny_models import save_reference

CPU = torch.device("cpu")
FLOAT, BRAIN = torch.float32, torch.bfloat16
TOLERANCE = {FLOAT: 1e-4, BRAIN: 3e-2}


@pytest.fixture(params=SCENES)
def rows(request: pytest.FixtureRequest) -> list[Row]:
    return SCENES[request.param]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    return fake_fla.install(monkeypatch)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("channels, taps, silu, has_bias, is_gated", CONVOLUTIONS)
@pytest.mark.parametrize("with_conv1d", [True, False])
def test_short_conv(monkeypatch, rows, dtype, channels, taps, silu, has_bias, is_gated, with_conv1d):
    calls = fake_fla.install(monkeypatch, with_conv1d=with_conv1d)
    ops, allowed = fla_states.load(), TOLERANCE[dtype]
    check_short_conv(ops, rows, dtype, channels, taps, silu, has_bias, is_gated, allowed=allowed)
    assert with_conv1d or "causal_conv1d_update" not in calls
    if with_conv1d and all(row.length == 1 for row in rows):
        assert calls == ["causal_conv1d_update"]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads, by_channel", DELTAS, ids=str)
def test_gated_delta(calls, rows, dtype, heads, by_channel):
    check_gated_delta(fla_states.load(), rows, dtype, heads, by_channel, allowed=TOLERANCE[dtype])
    if all(row.length == 1 for row in rows):
        assert calls == ["fused_recurrent_kda" if by_channel else "fused_recurrent_gated_delta_rule"]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("heads", SCANS, ids=str)
def test_ssd(calls, rows, dtype, heads):
    check_ssd(fla_states.load(), rows, dtype, heads, allowed=TOLERANCE[dtype])
    if all(row.length == 1 for row in rows):
        assert calls == ["fused_recurrent_simple_gla"]


# -- selection ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def select(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> Callable[[str], StateOps]:
    """name -> the operations that are chosen for a tiny model."""

    def choose(name: str) -> StateOps:
        save_reference(name, tmp_path)
        caplog.set_level(logging.INFO)
        caplog.clear()
        return select_gpu_states(load_model_config(tmp_path, context_length=0), FLOAT, CPU)

    return choose


@pytest.mark.parametrize("name", ["lfm2", "qwen3_next", "granite_hybrid", "mamba2"])
def test_kernels_that_compute_what_torch_does_are_chosen(calls, select, caplog, name):
    ops = select(name)
    assert ops.short_conv != TORCH_STATES.short_conv and ops.gated_norm is TORCH_STATES.gated_norm
    assert not ops.is_recordable
    assert [record.levelname for record in caplog.records] == ["INFO"]


def test_without_the_package_torch_computes_all(monkeypatch, select, caplog):
    monkeypatch.setitem(sys.modules, "fla.modules.causal_conv1d", None)
    assert select("qwen3_next") is TORCH_STATES
    assert "pip install 'baton-serve[cuda]'" in caplog.text


def test_a_kernel_that_raises_is_replaced_alone(monkeypatch, select, caplog):
    def chunk_gated_delta_rule(*_, **__):
        raise RuntimeError("no kernel for this card")

    fake_fla.install(monkeypatch, chunk_gated_delta_rule=chunk_gated_delta_rule)
    ops = select("qwen3_next")
    assert ops.gated_delta is TORCH_STATES.gated_delta and ops.short_conv != TORCH_STATES.short_conv
    assert "no kernel for this card" in caplog.text


def test_a_kernel_with_other_numbers_is_replaced_alone(monkeypatch, select, caplog):
    def chunk_simple_gla(*args, **kwargs):
        found, states = fake_fla.chunk_simple_gla(*args, **kwargs)
        return found, states.flip(0)

    fake_fla.install(monkeypatch, chunk_simple_gla=chunk_simple_gla)
    ops = select("granite_hybrid")
    assert ops.ssd is TORCH_STATES.ssd and "ssd gives wrong numbers" in caplog.text


def test_a_model_without_states_needs_no_package(monkeypatch, select, caplog):
    monkeypatch.setitem(sys.modules, "fla.modules.causal_conv1d", None)
    assert select("llama") is TORCH_STATES and not caplog.records


def test_modelling_that_transformers_imports_meanwhile_does_not_keep_the_stand_ins(calls, monkeypatch):
    spec = importlib.util.find_spec("transformers.models.qwen3_next.modeling_qwen3_next")
    assert spec is not None and spec.loader is not None
    modelling = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, modelling)
    spec.loader.exec_module(modelling)
    rows = torch.ones(1, 3, 2, 16)
    found, _ = modelling.torch_chunk_gated_delta_rule(rows, rows, rows, g=-rows[..., 0], beta=rows[..., 0])
    assert found.shape == rows.shape and not calls
