"""Decides on a CPU between bfloat16 and float32, by the time that a model's matrix products take in either.

Processors with arithmetic of their own for it (avx512_bf16, AMX) are up to twice as fast, as a step reads half the
memory. On others nothing is tried: the model is computed in float32, from weights that stay narrow (`narrow_dtype`).
Weights of the model's largest shape are multiplied in either type, each in its fastest form, by one row and by as many
as a prompt has; on one thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

import torch

from ...attention import processor
from ...attention.trial_results import TrialResults
from ..model_config import ModelConfig
from .linear import Linear
from .product_trials import SMALL_MODEL_BYTES, Timer, time_forms, usable_forms

logger = logging.getLogger(__name__)

TRIAL = "dtype"
"""Kind of trial, see TrialResults."""
ROWS = (1, 32, 512)
WORTH_IT = 0.8
"""bfloat16 must take less than this share of float32's time, on average over ROWS: it rounds more."""
NO_LOSS = 1.1
"""And at none of them more than this."""
LAYERS = 4
"""Number of weights multiplied in turn: together more than a level-2 cache holds, in either type."""

CPU = torch.device("cpu")
FLOAT, BRAIN = torch.float32, torch.bfloat16


QUIET_SHARE = 0.8
"""The trial must have had a core for this share of its time, or its result is not kept for later starts."""


def cpu_dtype(config: ModelConfig, timer: Timer | None = None, results: TrialResults | None = None) -> torch.dtype:
    """The dtype for a checkpoint on this processor: its own if that is bfloat16 and worth it, else float32. results: of
    earlier trials."""
    if config.dtype != "bfloat16" or _product_bytes(config) < SMALL_MODEL_BYTES:
        return FLOAT
    if not processor.multiplies(BRAIN):
        logger.info("dtype float32: this processor has no arithmetic for the checkpoint's bfloat16")
        return FLOAT
    results = results or TrialResults(threads=1)
    key = {"hidden": config.hidden_size, "intermediate": config.intermediate_size}
    found = results.find(TRIAL, key, lambda value: value in ("float32", "bfloat16"))
    if found is not None:
        logger.info("dtype %s, as a trial at an earlier start found", found)
        return getattr(torch, found)
    began, cpu_began, threads = time.perf_counter(), time.thread_time(), torch.get_num_threads()
    torch.set_num_threads(1)  # beside busy processes several threads would mostly measure how they wait for each other
    try:
        times = {dtype: _seconds(config, dtype, timer) for dtype in (FLOAT, BRAIN)}
    finally:
        torch.set_num_threads(threads)
    found = BRAIN if is_worth_it(times[BRAIN], times[FLOAT]) else FLOAT
    name, seconds = str(found).removeprefix("torch."), time.perf_counter() - began
    if time.thread_time() - cpu_began >= QUIET_SHARE * seconds:
        results.keep(TRIAL, key, name)
    shares = ", ".join(f"{rows}: {times[BRAIN][rows] / times[FLOAT][rows]:.2f}" for rows in ROWS)
    logger.info(
        "dtype %s, tried in %.1f s: share of float32's time that bfloat16 takes, by rows: %s",
        name,
        seconds,
        shares,
    )
    return found


def is_worth_it(brain: Mapping[int, float], plain: Mapping[int, float]) -> bool:
    """Rows -> seconds, of either type."""
    shares = [brain[rows] / plain[rows] for rows in plain]
    return sum(shares) < WORTH_IT * len(shares) and max(shares) <= NO_LOSS


def narrow_dtype(config: ModelConfig, dtype: torch.dtype) -> torch.dtype | None:
    """The 16-bit floats that weights stay, because the processor does not multiply them: the model's dtype, or the
    checkpoint's where the model is computed in float32. None if there are none, or the model is small."""
    stored = dtype if dtype != FLOAT else getattr(torch, config.dtype)
    if processor.multiplies(stored) or _product_bytes(config) < SMALL_MODEL_BYTES:
        return None
    return stored


def _product_bytes(config: ModelConfig) -> int:
    """Bytes of the layers' weights (all but the head's), in bfloat16."""
    attention = 2 * (config.num_heads + config.num_kv_heads) * config.head_dim
    return 2 * config.num_layers * config.hidden_size * (attention + 3 * config.intermediate_size)


def _seconds(config: ModelConfig, dtype: torch.dtype, timer: Callable[..., float] | None) -> dict[int, float]:
    """Rows -> the time of the fastest form."""
    layers = []
    for _ in range(LAYERS):
        layer = Linear(
            config.hidden_size, {"gate_up": 2 * config.intermediate_size}, bias=False, dtype=dtype, device=CPU
        )
        assert layer.weight is not None
        layer.weight.fill_(0.01)
        layers.append(layer)
    forms, _ = usable_forms(layers[0].weight)
    return {rows: min(time_forms(layers, rows, forms, timer).values()) for rows in ROWS}
