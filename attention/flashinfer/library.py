"""Loads FlashInfer if it is installed and computes correctly on this device.

FlashInfer compiles its kernels at first use (nvcc, ninja; a minute or two, then kept in ~/.cache/flashinfer). That is
done here, at start, so that no client waits for it.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import logging
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ...memory_pool.kv_pool import KVPool
from ..backend import AttentionBackend, AttentionSpec
from ..probe import BEAMS, DECODE, EXTEND, LONG, probe_backend
from .backend import FlashInferBackend
from .kernel import FlashInferLibrary

logger = logging.getLogger(__name__)

VERSION = "0.6.12"
HEAD_DIMS = (64, 128, 256)
MIN_CAPABILITY = (8, 0)
LOG_LINES = 15
"""Lines to log of a failed compilation."""

MakeAttention = Callable[[KVPool, Sequence[AttentionSpec]], AttentionBackend]


class FlashInferUnavailable(RuntimeError):
    """FlashInfer cannot be used; the message says why, and what to install or change."""


def load_attention(
    specs: Sequence[AttentionSpec], *, page_size: int, dtype: torch.dtype, device: torch.device
) -> MakeAttention:
    """A backend factory, once its kernels have passed the probe on this device. Raises FlashInferUnavailable."""
    for spec in specs:
        check_supported(spec, dtype, torch.cuda.get_device_capability(device))
    library = import_library(has_fa3=torch.cuda.get_device_capability(device)[0] == 9)
    check_compiler()
    build_kv_indices = choose_kv_indices(device)

    def factory(library: FlashInferLibrary) -> MakeAttention:
        return lambda pool, layers: FlashInferBackend(pool, layers, library, build_kv_indices)

    logger.info("preparing FlashInfer kernels; compiling takes a minute or two the first time")
    began = time.monotonic()
    where = {"page_size": page_size, "dtype": dtype, "device": device}
    try:
        # Probe FA3 separately: only it needs Hopper, and the rest works without it.
        probe_backend(factory(dataclasses.replace(library, has_fa3=False)), specs, (DECODE, EXTEND, BEAMS), **where)
    except Exception as error:
        raise FlashInferUnavailable(f"FlashInfer fails on this device: {log_end(error)}") from error
    if library.has_fa3:
        try:
            probe_backend(factory(library), specs, (LONG,), **where)
        except Exception as error:
            logger.warning("long prefills run on FlashInfer's FA2 kernels, FA3 fails here: %s", log_end(error))
            library = dataclasses.replace(library, has_fa3=False)
    logger.info("FlashInfer kernels are ready after %.0f s", time.monotonic() - began)
    return factory(library)


def check_supported(spec: AttentionSpec, dtype: torch.dtype, capability: tuple[int, int]) -> None:
    """Raises FlashInferUnavailable for dtypes, kinds of layers or cards that FlashInfer has no kernels for."""
    if dtype not in (torch.float16, torch.bfloat16):
        name = str(dtype).removeprefix("torch.")
        raise FlashInferUnavailable(f"FlashInfer computes in half precision, not {name}; use --dtype bfloat16")
    if spec.head_dim not in HEAD_DIMS:
        known = ", ".join(map(str, HEAD_DIMS))
        raise FlashInferUnavailable(f"FlashInfer has kernels for heads of {known}, this model's have {spec.head_dim}")
    if spec.has_sinks or spec.value_size != spec.head_dim:
        what = "sinks" if spec.has_sinks else f"values of {spec.value_size} numbers beside keys of {spec.head_dim}"
        raise FlashInferUnavailable(f"Baton attends to layers with {what} by torch, not by FlashInfer")
    if spec.chunk is not None:
        raise FlashInferUnavailable("Baton attends in chunks (Llama 4) by torch, not by FlashInfer")
    if capability < MIN_CAPABILITY:
        card = ".".join(map(str, capability))
        raise FlashInferUnavailable(f"FlashInfer needs a card of compute capability 8.0 (Ampere) or newer, not {card}")


def import_library(*, has_fa3: bool) -> FlashInferLibrary:
    """Raises FlashInferUnavailable if FlashInfer is not installed or lacks the parts we use."""
    try:
        flashinfer = importlib.import_module("flashinfer")
        decode = importlib.import_module("flashinfer.decode")
    except ImportError as error:
        raise FlashInferUnavailable(
            f"FlashInfer is not installed ({error}); pip install 'baton-serve[cuda]'"
        ) from error
    except Exception as error:
        raise FlashInferUnavailable(f"FlashInfer cannot be imported: {log_end(error)}") from error
    if (version := getattr(flashinfer, "__version__", "?")) != VERSION:
        logger.warning(
            "FlashInfer %s is not the version this was written for; pip install flashinfer-python==%s", version, VERSION
        )
    try:
        return FlashInferLibrary(
            prefill=flashinfer.BatchPrefillWithPagedKVCacheWrapper,
            decode=flashinfer.BatchDecodeWithPagedKVCacheWrapper,
            fast_decode_plan=decode.fast_decode_plan,
            merge_state_in_place=flashinfer.merge_state_in_place,
            has_fa3=has_fa3,
        )
    except AttributeError as error:
        raise FlashInferUnavailable(f"{error}; pip install flashinfer-python=={VERSION}") from error


def check_compiler() -> None:
    """Raises FlashInferUnavailable if kernels are not precompiled and cannot be compiled."""
    if importlib.util.find_spec("flashinfer_jit_cache") is not None:
        return
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    candidates = [home / "bin" / "nvcc" for home in (*homes, Path("/usr/local/cuda"))]
    if shutil.which("nvcc") is None and not any(candidate.exists() for candidate in candidates):
        raise FlashInferUnavailable(
            "FlashInfer compiles its kernels, and there is no nvcc; install the CUDA toolkit, or set CUDA_HOME"
        )
    if shutil.which("ninja") is None and importlib.util.find_spec("ninja") is None:
        raise FlashInferUnavailable("FlashInfer compiles its kernels, and there is no ninja; pip install ninja")


def choose_kv_indices(device: torch.device) -> Callable[..., None]:
    """The Triton kernel if it runs and gives the right numbers, else torch."""
    try:
        from . import triton_kv_indices

        arguments = {
            "req_to_token": torch.arange(40, dtype=torch.int32, device=device).view(2, 20),
            "rows": torch.tensor([1, 0], dtype=torch.int32, device=device),
            "starts": torch.tensor([2, 0], dtype=torch.int32, device=device),
            "kv_indptr": torch.tensor([0, 5, 12], dtype=torch.int32, device=device),
            "page_size": 1,
            "most_pages": 7,
        }
        found, expected = (torch.zeros(12, dtype=torch.int32, device=device) for _ in range(2))
        triton_kv_indices.build_kv_indices(**arguments, out=found)
        build_kv_indices(**arguments, out=expected)
        torch.testing.assert_close(found, expected)
    except Exception as error:
        logger.warning("page numbers are gathered by torch, Triton fails here: %s", log_end(error))
        return build_kv_indices
    return triton_kv_indices.build_kv_indices


def log_end(error: BaseException) -> str:
    """The error, or the last lines of a long one, where a compiler names the cause."""
    lines = f"{type(error).__name__}: {error}".strip().splitlines()
    return lines[0] if len(lines) == 1 else "\n".join(["", *lines[-LOG_LINES:]])


def build_kv_indices(
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    starts: torch.Tensor,
    kv_indptr: torch.Tensor,
    out: torch.Tensor,
    *,
    page_size: int,
    most_pages: int,
) -> None:
    """Gather the page numbers of many sequences from the device's own copy of req_to_token: write those of sequence i
    to out[kv_indptr[i] : kv_indptr[i + 1]].

    req_to_token: int32 [rows, max_context]; rows, starts: int32 [n], each sequence's row and the position where it
    begins, a multiple of page_size; kv_indptr: int32 [n + 1]; out: int32 [kv_indptr[n]]. most_pages: the most pages of
    one sequence; a kernel needs it on the host to size its grid. This gathers with torch; triton_kv_indices.py does the
    same in one kernel.
    """
    counts = kv_indptr[1:] - kv_indptr[:-1]
    sequence = torch.repeat_interleave(counts, output_size=len(out))  # with the length given, nothing waits for it
    page = torch.arange(len(out), dtype=torch.int32, device=out.device) - kv_indptr[sequence]
    slots = req_to_token[rows[sequence].long(), (starts[sequence] + page * page_size).long()]
    torch.div(slots, page_size, rounding_mode="floor", out=out)
