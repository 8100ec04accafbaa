"""Chooses the implementation of `StateOps`: tries the device's kernels with a small step of the model's sizes.

    CPU     Numba's kernels: all that a model needs work, or none is used, since only whole steps can be recorded
    GPU     flash-linear-attention's, each for itself

As in `op_libraries.py`, kernels that fail or compute other numbers than torch are replaced by torch, with one warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from ....attention.error_text import describe_error
from ....attention.numba_paged.team import Team
from ....memory_pool.state_pool import StatePool, StateTensor
from ....scheduler.batch import StateRows
from ...model_config import GatedDeltaTraits, Mamba2Traits, ModelConfig, ShortConvTraits
from .ops import DeltaHeads, SsdHeads, StateOps
from .state_batch import StateBatch, plan_states
from .torch_states import TORCH_STATES

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
ROUNDINGS = 16
"""A result may be off by so many times what rounding a number around one costs."""

TRIAL_ROWS = StateRows(
    sources=np.array([1, 0], dtype=np.int32),
    rows=np.array([0, 0, 1, 1], dtype=np.int32),
    ends=np.array([1, 3, 1, 4], dtype=np.int32),
    slots=np.array([2, 1, 3, 4], dtype=np.int32),
)
"""Three tokens, whose state is kept after the first and then written over the one that they start from; and four that
begin, cut in the same place. So a wave has segments of one token, and the next has longer ones."""
TRIAL_LENS = np.array([3, 4], dtype=np.int32)
TRIAL_TOKENS = 7
TRIAL_STATES = 4
WRITTEN = slice(1, 1 + TRIAL_STATES)
"""The slots of a trial."""


def select_states(config: ModelConfig, dtype: torch.dtype, team: Team) -> StateOps:
    """For a CPU: Numba's kernels if the model needs any and they all work, else torch's operations."""
    if not config.traits.uses_states:
        return TORCH_STATES
    try:
        from .numba_states import load  # here: for a CPU only

        ops = load(dtype, team)
        trouble = "; ".join(find_trouble(ops, config, dtype, CPU).values())
    except Exception as error:  # compiled code may raise anything
        ops, trouble = TORCH_STATES, describe_error(error)
    if trouble:
        logger.warning("torch computes layers with states, which takes several times as long: %s", trouble)
        return TORCH_STATES
    logger.info("layers with states: numba")
    return ops


def select_gpu_states(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> StateOps:
    """For a GPU: flash-linear-attention's kernels where the model needs them and they work, torch's operations for all
    others."""
    if config.traits.recurrent is None:
        return TORCH_STATES
    try:
        from .fla_states import load  # here: only where there is a GPU

        ops = load()
    except Exception as error:  # importing compiled code may raise anything
        logger.warning(
            "torch computes layers with states, which takes several times as long: flash-linear-attention cannot be "
            "used (%s); pip install 'baton-serve[cuda]'",
            describe_error(error),
        )
        return TORCH_STATES
    trouble = find_trouble(ops, config, dtype, device)
    if trouble:
        logger.warning("torch computes parts of the layers with states: %s", "; ".join(trouble.values()))
    else:
        logger.info("layers with states: flash-linear-attention")
    return replace(ops, **{name: getattr(TORCH_STATES, name) for name in trouble})


def find_trouble(ops: StateOps, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> dict[str, str]:
    """What is wrong with these operations for a model, by their names: those that raise, or do not compute what torch
    does on a CPU."""
    allowed = ROUNDINGS * max(torch.finfo(dtype).eps, 2**-20)
    trouble: dict[str, str] = {}
    for name, trial in _trials(config, dtype).items():
        try:
            found = trial(ops, dtype, device)
        except Exception as error:  # compiled code may raise anything
            trouble[name] = f"{name} fails ({describe_error(error)})"
            continue
        for part, wanted in zip(found, trial(TORCH_STATES, torch.float32, CPU), strict=True):
            if not torch.allclose(part.float().to(CPU), wanted.float(), atol=allowed, rtol=allowed):
                trouble[name] = f"{name} gives wrong numbers"
    return trouble


Trial = Callable[[StateOps, torch.dtype, torch.device], list[torch.Tensor]]
"""Calls an operation with numbers in a dtype on a device: its result, and the states that it writes."""


def _trials(config: ModelConfig, dtype: torch.dtype) -> dict[str, Trial]:
    """The operations that a model needs, with its sizes."""
    traits, recurrent = config.traits, config.traits.recurrent
    trials: dict[str, Trial] = {}
    if traits.output_gate:
        width = config.num_heads * config.head_dim
        trials["sigmoid_gate"] = lambda ops, kind, device: [
            ops.sigmoid_gate(*_Numbers(dtype, kind, device).some(2, width))
        ]
    if isinstance(recurrent, ShortConvTraits):
        trials["short_conv"] = _conv_trial(
            dtype, config.hidden_size, recurrent.kernel, silu=False, bias=recurrent.bias, is_gated=True
        )
    if isinstance(recurrent, GatedDeltaTraits):
        heads = DeltaHeads(recurrent.key_heads, recurrent.value_heads, recurrent.key_size, recurrent.value_size)
        trials["short_conv"] = _conv_trial(dtype, heads.channels, recurrent.kernel, silu=True, bias=False)
        trials["gated_delta"] = _delta_trial(dtype, heads)
        width = heads.value_heads * heads.value_size
        trials["gated_norm"] = _norm_trial(dtype, width, heads.value_size, norms_first=True)
    if isinstance(recurrent, Mamba2Traits):
        heads = SsdHeads(recurrent.heads, recurrent.head_size, recurrent.groups, recurrent.state_size, recurrent.limits)
        trials["short_conv"] = _conv_trial(dtype, heads.channels, recurrent.kernel, silu=True, bias=recurrent.conv_bias)
        trials["ssd"] = _ssd_trial(dtype, heads)
        if recurrent.norm_groups:
            size = heads.width // recurrent.norm_groups
            trials["gated_norm"] = _norm_trial(dtype, heads.width, size, norms_first=recurrent.norms_first)
        else:
            trials["silu_gate"] = lambda ops, kind, device: [
                ops.silu_gate(*_Numbers(dtype, kind, device).some(2, heads.width))
            ]
    return trials


class _Numbers:
    """Random numbers that a dtype holds exactly, so that all implementations get the same."""

    def __init__(self, dtype: torch.dtype, kind: torch.dtype, device: torch.device) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._dtype, self._kind, self._device = dtype, kind, device

    def some(self, count: int, width: int) -> list[torch.Tensor]:
        """So many of [TRIAL_TOKENS, width], parts of one projection."""
        wide = torch.randn(TRIAL_TOKENS, count * width, generator=self._generator)
        return list(wide.to(self._dtype).to(self._device, self._kind).split(width, dim=1))

    def weights(self, *size: int) -> torch.Tensor:
        return torch.rand(*size, generator=self._generator).to(self._dtype).to(self._device, self._kind)

    def exact(self, *size: int) -> torch.Tensor:
        """float32"""
        return (torch.rand(*size, generator=self._generator) + 0.1).to(self._device)

    def step(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[StateBatch, torch.Tensor]:
        """A step of TRIAL_ROWS, and its only layer's only states."""
        pool = StatePool(TRIAL_STATES, [{"state": StateTensor(shape, dtype)}], self._device)
        state = pool.layers[0]["state"]
        state[1].copy_(torch.randn(*shape, generator=self._generator).to(self._dtype))
        return plan_states(pool, TRIAL_ROWS, TRIAL_LENS), state


def _conv_trial(
    dtype: torch.dtype, channels: int, kernel: int, *, silu: bool, bias: bool, is_gated: bool = False
) -> Trial:
    def trial(ops: StateOps, kind: torch.dtype, device: torch.device) -> list[torch.Tensor]:
        numbers = _Numbers(dtype, kind, device)
        states, conv = numbers.step((kernel - 1, channels), kind)
        x, before, after = numbers.some(3, channels)
        weight, biases = numbers.weights(kernel, channels), numbers.weights(channels) if bias else None
        gates = {"before": before, "after": after} if is_gated else {}
        return [ops.short_conv(x, weight, biases, conv, states, silu=silu, **gates), conv[WRITTEN]]

    return trial


def _delta_trial(dtype: torch.dtype, heads: DeltaHeads) -> Trial:
    def trial(ops: StateOps, kind: torch.dtype, device: torch.device) -> list[torch.Tensor]:
        numbers, count = _Numbers(dtype, kind, device), heads.value_heads
        states, recurrent = numbers.step((count, heads.key_size, heads.value_size), torch.float32)
        (qkv,), (a, b) = numbers.some(1, heads.channels), numbers.some(2, count)
        args = qkv, a, b, numbers.exact(count), numbers.exact(count)
        return [ops.gated_delta(*args, heads, recurrent, states), recurrent[WRITTEN]]

    return trial


def _ssd_trial(dtype: torch.dtype, heads: SsdHeads) -> Trial:
    def trial(ops: StateOps, kind: torch.dtype, device: torch.device) -> list[torch.Tensor]:
        numbers = _Numbers(dtype, kind, device)
        states, recurrent = numbers.step((heads.heads, heads.head_size, heads.state_size), torch.float32)
        (xbc,), (dt,) = numbers.some(1, heads.channels), numbers.some(1, heads.heads)
        rate, dt_bias, skip = (numbers.exact(heads.heads) for _ in range(3))
        # Sums of products of all channels are of the order of one.
        found = ops.ssd(xbc, dt, rate, dt_bias, skip, heads, recurrent, states)
        return [found / heads.state_size**0.5, recurrent[WRITTEN]]

    return trial


def _norm_trial(dtype: torch.dtype, width: int, size: int, *, norms_first: bool) -> Trial:
    def trial(ops: StateOps, kind: torch.dtype, device: torch.device) -> list[torch.Tensor]:
        numbers = _Numbers(dtype, kind, device)
        y, z = numbers.some(2, width)
        return [ops.gated_norm(y, z, numbers.weights(width), 1e-6, size, norms_first=norms_first)]

    return trial


def _gate_trial(name: str, dtype: torch.dtype, width: int) -> Trial:
    def trial(ops: StateOps, kind: torch.dtype, device: torch.device) -> list[torch.Tensor]:
        return [getattr(ops, name)(*_Numbers(dtype, kind, device).some(2, width))]

    return trial
