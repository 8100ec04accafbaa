"""Loads the kernel for CPUs if Numba is installed and what it compiles computes correctly on this processor."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch

from ...memory_pool.kv_pool import KVPool
from ..backend import AttentionBackend, AttentionSpec
from ..error_text import describe_error
from ..probe import BEAMS, DECODE, EXTEND, LONG, ProbeScene, ProbeStep, probe_backend
from ..torch_native import TorchNativeBackend
from .team import Team

logger = logging.getLogger(__name__)

MakeAttention = Callable[[KVPool, Sequence[AttentionSpec]], AttentionBackend]


PREFILL = ProbeStep("prefill", ((512, 512),))
"""Both ways are timed on this."""
ROUNDS = 4


class NumbaUnavailable(RuntimeError):
    """The kernel cannot be used; the message says why, and what to install or change."""


def load_attention(
    specs: Sequence[AttentionSpec],
    *,
    team: Team,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype | None = None,
) -> MakeAttention:
    """A backend factory, once its kernels have passed the probe. kv_dtype: see `ProbeScene`. Raises
    NumbaUnavailable."""
    began = time.monotonic()
    try:
        from .backend import ANY_EXTEND, SHORT_EXTEND, NumbaPagedBackend
    except ImportError as error:  # not installed, or not for this numpy
        raise NumbaUnavailable(f"Numba cannot be imported ({error}); pip install 'baton-serve[cpu]'") from error
    where = {"page_size": page_size, "dtype": dtype, "device": device, "kv_dtype": kv_dtype}
    by_length = {
        longest: partial(NumbaPagedBackend, team=team, longest_extend=longest) for longest in (SHORT_EXTEND, ANY_EXTEND)
    }
    logger.info("compiling or loading attention kernels; the first start takes up to half a minute")
    specs = [probed(spec) for spec in specs]
    try:
        probe_backend(by_length[SHORT_EXTEND], specs, (DECODE, EXTEND, BEAMS, LONG), **where)
        probe_backend(by_length[ANY_EXTEND], specs, (LONG,), **where)
    except Exception as error:
        raise NumbaUnavailable(describe_error(error)) from error
    scene = ProbeScene(PREFILL, specs[0], **where)
    tiles = _seconds(TorchNativeBackend(scene.pool), scene)
    kernel = _seconds(by_length[ANY_EXTEND](scene.pool, specs[:1]), scene)
    longest = ANY_EXTEND if kernel < tiles else SHORT_EXTEND
    logger.info(
        "attention kernels are ready after %.1f s; prompts by %s (%d tokens of a layer: kernel %.1f ms, torch %.1f ms)",
        time.monotonic() - began,
        "the kernel" if longest == ANY_EXTEND else "torch",
        len(scene.q),
        1e3 * kernel,
        1e3 * tiles,
    )
    return by_length[longest]


FEW_HEADS = {1: 7, 2: 10, 3: 9, 4: 8}
"""Rows of the kernel -> a number of heads over a latent that is attended with so many rows."""


def probed(spec: AttentionSpec) -> AttentionSpec:
    """The layer, with fewer of the many heads that read latents: its kernel is the same, and a start takes a second
    instead of half a minute."""
    if not spec.values_in_keys:
        return spec
    from .backend import kernel_rows

    return dataclasses.replace(spec, num_heads=min(spec.num_heads, FEW_HEADS[kernel_rows(spec)]))


def _seconds(backend: AttentionBackend, scene: ProbeScene) -> float:
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        scene.run(backend)
        times.append(time.perf_counter() - began)
    return min(times)
