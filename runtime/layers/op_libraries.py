"""Chooses the implementation of each layer operation: tries them out on the device at start, with the model's sizes.

    sglang-kernel ─┐
    Triton        ─┤
    Numba (CPU)   ─┼─▶ import ─▶ one small call ─▶ same numbers as torch? ─▶ the first that passes, else torch
    torch         ─┘

If a library is missing, wrong, or built for another torch or card, Baton only runs slower, and one line in the log says
what to install. Nothing of CUDA is imported on a CPU.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...attention.numba_paged.team import Team
from .op_trials import OP_NAMES, OpShape, Trial, tolerance
from .ops import TORCH_OPS, Ops

logger = logging.getLogger(__name__)

TRIAL_TOKENS = 5
SGL, TRITON, NUMBA = "sglang-kernel", "triton", "numba"
PREFERENCE = {
    "rms_norm": (SGL, TRITON, NUMBA),
    "add_rms_norm": (SGL, TRITON, NUMBA),
    "silu_and_mul": (SGL, TRITON, NUMBA),
    "rotate_and_store": (TRITON, SGL, NUMBA),
    # Triton's runs one program per slot and layer; sglang-kernel's goes through the layers one after the other.
    "copy_kv": (TRITON, SGL),
    # Must run on few multiprocessors; only sglang-kernel's does.
    "transfer_kv": (SGL,),
    # One kernel each in torch, too; Numba's can be recorded.
    "look_up": (NUMBA,),
    "add": (NUMBA,),
}


@dataclass(frozen=True, slots=True)
class Library:
    """load: device -> its operations by their names in Ops; raises if it cannot be used."""

    name: str
    load: Callable[[torch.device], Mapping[str, Callable[..., Any]]]


def load_sgl(device: torch.device) -> Mapping[str, Callable[..., Any]]:
    from . import sgl_ops  # here: only where there is a GPU

    return sgl_ops.load(device)


def load_triton(device: torch.device) -> Mapping[str, Callable[..., Any]]:
    from . import triton_ops  # here: only where there is a GPU

    return {name: getattr(triton_ops, name) for name in OP_NAMES if hasattr(triton_ops, name)}


def numba_library(dtype: torch.dtype, shape: OpShape, team: Team) -> Library:
    """The library of Numba's kernels, which are compiled for one model."""

    def load(device: torch.device) -> Mapping[str, Callable[..., Any]]:
        from .numba_ops import operations  # here: Numba is optional, and only for a CPU

        return operations.load(shape, dtype, team)

    return Library(NUMBA, load)


LIBRARIES = (Library(SGL, load_sgl), Library(TRITON, load_triton))


def select_ops(device: torch.device, dtype: torch.dtype, shape: OpShape, team: Team | None = None) -> Ops:
    """The fastest implementation of each operation that works on the device. team: None on a GPU."""
    return probe(LIBRARIES if team is None else (numba_library(dtype, shape, team),), shape, dtype, device)


def probe(libraries: Sequence[Library], shape: OpShape, dtype: torch.dtype, device: torch.device) -> Ops:
    """Try the libraries' operations in the order of PREFERENCE. Logs one line with the choice for each operation, and
    one warning if a library or an operation failed."""
    trouble: list[str] = []
    loaded: dict[str, Mapping[str, Callable[..., Any]]] = {}
    for library in libraries:
        try:
            loaded[library.name] = library.load(device)
        except Exception as error:  # importing compiled code may raise anything
            trouble.append(f"{library.name} cannot be used ({_reason(error)})")
    trial = Trial(shape, TRIAL_TOKENS, dtype)
    chosen: dict[str, Callable[..., Any]] = {}
    names: list[str] = []
    for name in OP_NAMES:
        for library in PREFERENCE[name]:
            op = loaded.get(library, {}).get(name)
            if op is None:
                continue
            problem = try_out(name, op, trial, device)
            if problem is None:
                chosen[name] = op
                names.append(f"{name} {library}")
                break
            trouble.append(f"{name} of {library} {problem}")
        else:
            chosen[name] = getattr(TORCH_OPS, name)
            names.append(f"{name} torch")
    logger.info("layer ops: %s", ", ".join(names))
    if trouble:
        logger.warning(
            "slower layer ops in use: %s. %s; this is torch %s",
            "; ".join(trouble),
            _remedy(libraries),
            torch.__version__,
        )
    return Ops(**chosen)


def try_out(name: str, op: Callable[..., Any], trial: Trial, device: torch.device) -> str | None:
    """None if op gives the same numbers as its torch twin, else what is wrong with it."""
    try:
        found = trial.found(name, op, device)
    except Exception as error:  # a kernel may raise anything: no such op, no compiler, no image for this card
        return f"failed ({_reason(error)})"
    allowed = tolerance(trial.dtype)
    for part, expected in zip(found, trial.expected(name), strict=True):
        if part.shape != expected.shape or not torch.allclose(part, expected, atol=allowed, rtol=allowed):
            return "gives wrong numbers"
    return None


def _remedy(libraries: Sequence[Library]) -> str:
    if any(library.name == NUMBA for library in libraries):
        return "pip install -e '.[cpu]' brings Numba"
    return "pip install -e '.[cuda]' brings the versions that fit torch 2.11"


def _reason(error: Exception) -> str:
    """Type and first line of an error."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return ": ".join([type(error).__name__, *lines[:1]])[:200]
