"""Loads the kernel for CPUs if Numba is installed and what it compiles computes correctly on this processor."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from ...memory_pool.kv_pool import KVPool
from ..backend import AttentionBackend, AttentionSpec
from ..error_text import describe_error
from ..probe import BEAMS, DECODE, EXTEND, LONG, ProbeScene, ProbeStep, probe_backend
from ..torch_native import TorchNativeBackend
from ..trial_results import TrialResults
from .backend import ANY_EXTEND, SHORT_EXTEND, NumbaPagedBackend, kernel_rows
from .compiling import NumbaMissingError
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
    where = {"page_size": page_size, "dtype": dtype, "device": device, "kv_dtype": kv_dtype}
    by_length = {
        longest: partial(NumbaPagedBackend, team=team, longest_extend=longest) for longest in (SHORT_EXTEND, ANY_EXTEND)
    }
    logger.info("compiling or loading attention kernels; the first start takes up to half a minute")
    specs = [probed(spec) for spec in specs]
    try:
        probe_backend(by_length[SHORT_EXTEND], specs, (DECODE, EXTEND, BEAMS, LONG), **where)
        probe_backend(by_length[ANY_EXTEND], specs, (LONG,), **where)
    except NumbaMissingError as error:
        raise NumbaUnavailable(str(error)) from error
    except Exception as error:
        raise NumbaUnavailable(describe_error(error)) from error
    longest, found = _longest_extend(by_length, specs[0], **where)
    logger.info("attention kernels are ready after %.1f s; prompts by %s", time.monotonic() - began, found)
    return by_length[longest]


TRIAL = "prompt attention"
"""Kind of trial, see TrialResults."""
CLEARLY = 1.2
"""A result is kept for later starts if the slower way takes at least this multiple of the faster one's time: beside
busy processes the others are chance."""


def _longest_extend(
    by_length: Mapping[int, MakeAttention],
    spec: AttentionSpec,
    *,
    page_size: int,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype | None,
) -> tuple[int, str]:
    """The longest extend that the kernel computes, of those of ``by_length``, and a few words about it for the log."""
    short, long = sorted(by_length)
    results = TrialResults()
    layer = str(dataclasses.replace(spec, layer_id=0))
    types = [str(each).removeprefix("torch.") for each in (dtype, kv_dtype or dtype)]
    key = {"layer": layer, "page_size": page_size, "dtype": types[0], "kv_dtype": types[1]}
    names = {long: "the kernel", short: "torch"}
    found = results.find(TRIAL, key, lambda value: value in names.values())
    if found is not None:
        return (long if found == names[long] else short), f"{found}, as a trial at an earlier start found"
    scene = ProbeScene(PREFILL, spec, page_size=page_size, dtype=dtype, device=device, kv_dtype=kv_dtype)
    tiles = _seconds(TorchNativeBackend(scene.pool), scene)
    kernel = _seconds(by_length[long](scene.pool, [spec]), scene)
    longest = long if kernel < tiles else short
    if max(tiles, kernel) >= CLEARLY * min(tiles, kernel):
        results.keep(TRIAL, key, names[longest])
    times = f"{len(scene.q)} tokens of a layer: kernel {1e3 * kernel:.1f} ms, torch {1e3 * tiles:.1f} ms"
    return longest, f"{names[longest]} ({times})"


FEW_HEADS = {1: 7, 2: 10, 3: 9, 4: 8}
"""Rows of the kernel -> a number of heads over a latent that is attended with so many rows."""


def probed(spec: AttentionSpec) -> AttentionSpec:
    """The layer, with fewer of the many heads that read latents: its kernel is the same, and a start takes a second
    instead of half a minute."""
    if not spec.values_in_keys:
        return spec
    return dataclasses.replace(spec, num_heads=min(spec.num_heads, FEW_HEADS[kernel_rows(spec)]))


def _seconds(backend: AttentionBackend, scene: ProbeScene) -> float:
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        scene.run(backend)
        times.append(time.perf_counter() - began)
    return min(times)
