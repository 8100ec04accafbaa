"""Loads the kernel for CPUs if Numba is installed and what it compiles computes correctly on this processor."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import torch

from ...memory_pool.kv_pool import MHAKVPool
from ..backend import AttentionBackend, AttentionSpec
from ..probe import BEAMS, DECODE, EXTEND, LONG, probe_backend

logger = logging.getLogger(__name__)

MakeAttention = Callable[[MHAKVPool, Sequence[AttentionSpec]], AttentionBackend]


class NumbaUnavailable(RuntimeError):
    """The kernel cannot be used; the message says why, and what to install or change."""


def load_attention(
    specs: Sequence[AttentionSpec], *, page_size: int, dtype: torch.dtype, device: torch.device
) -> MakeAttention:
    """A backend factory, once its kernels have passed the probe. Raises NumbaUnavailable."""
    began = time.monotonic()
    try:
        from .backend import NumbaPagedBackend
    except ImportError as error:  # not installed, or not for this numpy
        raise NumbaUnavailable(f"Numba cannot be imported ({error}); pip install 'baton[cpu]'") from error
    try:
        where = {"page_size": page_size, "dtype": dtype, "device": device}
        probe_backend(NumbaPagedBackend, specs, (DECODE, EXTEND, BEAMS, LONG), **where)
    except Exception as error:
        raise NumbaUnavailable(f"{type(error).__name__}: {str(error).splitlines()[0][:200]}") from error
    logger.info("attention kernels are ready after %.1f s", time.monotonic() - began)
    return NumbaPagedBackend
