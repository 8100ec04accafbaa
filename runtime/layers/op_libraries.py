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
from dataclasses import dataclass, fields
from typing import Any

import torch

from ...attention.error_text import describe_error
from ...attention.numba_paged.team import Team
from ...memory_pool.kv_pool import KVLayers
from ...memory_pool.kv_rows import is_quantized, read_rows, row_items, store_rows
from ..model_config import RopeConfig
from .ops import TORCH_OPS, Ops, OpShape
from .rotary import RotaryEmbedding

logger = logging.getLogger(__name__)

CPU = torch.device("cpu")
OP_NAMES = tuple(field.name for field in fields(Ops))

TRIAL_TOKENS = 5
POSITIONS = 512
LAYERS = 3
BEHIND_QKV = 64
"""Numbers that a projection has behind q, k and v, as a gate is in some models."""
ROUNDING = {torch.int8: 0.025, torch.float8_e4m3fn: 1 / 15, torch.float8_e5m2: 1 / 7}
"""Absolute and relative error of numbers around one, up to 6, that are rounded to a quantized row: half a step."""
SPARE_SLOTS = 7
"""Slots of a trial to which no token is written; they must not change."""

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


def numba_library(dtype: torch.dtype, shape: OpShape, team: Team, kv_dtype: torch.dtype | None = None) -> Library:
    """The library of Numba's kernels, which are compiled for one model."""

    def load(device: torch.device) -> Mapping[str, Callable[..., Any]]:
        from .numba_ops import operations  # here: for a CPU only

        return operations.load(shape, dtype, team, kv_dtype)

    return Library(NUMBA, load)


LIBRARIES = (Library(SGL, load_sgl), Library(TRITON, load_triton))


def select_ops(
    device: torch.device,
    dtype: torch.dtype,
    shape: OpShape,
    team: Team | None = None,
    kv_dtype: torch.dtype | None = None,
) -> Ops:
    """The fastest implementation of each operation that works on the device. team: None on a GPU. kv_dtype: of the KV
    pool; None: ``dtype``, as always on a GPU."""
    libraries = LIBRARIES if team is None else (numba_library(dtype, shape, team, kv_dtype),)
    return probe(libraries, shape, dtype, device, kv_dtype)


def probe(
    libraries: Sequence[Library],
    shape: OpShape,
    dtype: torch.dtype,
    device: torch.device,
    kv_dtype: torch.dtype | None = None,
) -> Ops:
    """Try the libraries' operations in the order of PREFERENCE. Logs one line with the choice for each operation, and
    one warning if a library or an operation failed."""
    trouble: list[str] = []
    loaded: dict[str, Mapping[str, Callable[..., Any]]] = {}
    for library in libraries:
        try:
            loaded[library.name] = library.load(device)
        except Exception as error:  # importing compiled code may raise anything
            trouble.append(f"{library.name} cannot be used ({describe_error(error)})")
    trial = Trial(shape, TRIAL_TOKENS, dtype, kv_dtype=kv_dtype)
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
        return f"failed ({describe_error(error)})"
    of_pool = trial.pool_tolerance if name == "rotate_and_store" else 0.0
    for number, (part, expected) in enumerate(zip(found, trial.expected(name), strict=True)):
        allowed = max(tolerance(trial.dtype), of_pool if number else 0.0)
        if part.shape != expected.shape or not torch.allclose(part, expected, atol=allowed, rtol=allowed):
            return "gives wrong numbers"
    return None


def _remedy(libraries: Sequence[Library]) -> str:
    if any(library.name == NUMBA for library in libraries):
        return "pip install 'baton-serve[cpu]' brings Numba"
    return "pip install 'baton-serve[cuda]' brings the versions that fit torch 2.11"


@dataclass(frozen=True, slots=True)
class Trial:
    """A small call of an operation. Its random numbers are those that ``dtype`` holds exactly, so that all
    implementations get the same input. Tests compare implementations with it, too."""

    shape: OpShape
    tokens: int
    dtype: torch.dtype
    seed: int = 0
    kv_dtype: torch.dtype | None = None
    """Of the pool that ``found`` writes; None: ``dtype``."""

    @property
    def pool_tolerance(self) -> float:
        """Absolute and relative error of the numbers in the pool: they are rounded to its type."""
        kv_dtype = self.kv_dtype or self.dtype
        return ROUNDING[kv_dtype] if is_quantized(kv_dtype) else tolerance(kv_dtype)

    def expected(self, name: str) -> list[torch.Tensor]:
        """Results of the torch twin in float32 on the CPU, without rounding to ``dtype``."""
        return self.run(name, getattr(TORCH_OPS, name), dtype=torch.float32, device=CPU)

    def found(self, name: str, op: Callable[..., Any], device: torch.device) -> list[torch.Tensor]:
        """Results of op in the trial's dtype on the device."""
        return self.run(name, op, dtype=self.dtype, device=device, kv_dtype=self.kv_dtype)

    def run(
        self,
        name: str,
        op: Callable[..., Any],
        *,
        dtype: torch.dtype,
        device: torch.device,
        kv_dtype: torch.dtype | None = None,
    ) -> list[torch.Tensor]:
        """Results of one call, and the memory it writes to, as float32 on the CPU. kv_dtype: of the pool; None:
        ``dtype``."""
        generator = torch.Generator().manual_seed(self.seed)
        shape, tokens = self.shape, self.tokens

        def numbers(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator).to(self.dtype).to(dtype).to(device)

        def weights(*size: int) -> torch.Tensor:
            return (0.5 + torch.rand(*size, generator=generator)).to(self.dtype).to(dtype).to(device)

        if name == "look_up":
            ids = torch.randint(POSITIONS, (tokens,), generator=generator).to(device)
            return _host(op(ids, numbers(POSITIONS, shape.hidden_size), dtype))
        if name == "add":
            return _host(op(numbers(tokens, shape.hidden_size), numbers(tokens, shape.hidden_size)))
        if name == "rms_norm":
            return _host(op(numbers(tokens, shape.hidden_size), weights(shape.hidden_size), shape.eps))
        if name == "add_rms_norm":
            x, residual = numbers(tokens, shape.hidden_size), numbers(tokens, shape.hidden_size)
            return _host(*op(x, residual, weights(shape.hidden_size), shape.eps))
        if name == "silu_and_mul":
            return _host(op(numbers(tokens, 2 * shape.intermediate_size)))
        slots = 1 + torch.randperm(tokens + SPARE_SLOTS, generator=generator)
        item = (len(slots) + 1, shape.num_kv_heads, shape.head_dim)
        if name == "rotate_and_store":
            heads = shape.num_heads + shape.num_kv_heads
            positions = torch.randint(POSITIONS, (tokens,), generator=generator).to(device)
            table = RotaryEmbedding(RopeConfig(theta=1e4), shape.head_dim, POSITIONS, dtype=self.dtype, device=CPU)
            width = (heads + shape.num_kv_heads) * shape.head_dim
            qkv = numbers(tokens, width + BEHIND_QKV)[:, :width]
            size, pool_dtype = shape.head_dim, kv_dtype or dtype
            k_pool, v_pool = (
                torch.zeros(*item[:2], row_items(size, pool_dtype), dtype=pool_dtype, device=device) for _ in range(2)
            )
            for pool in (k_pool, v_pool):
                store_rows(pool, torch.arange(len(pool), device=device), numbers(*item))
            weight = weights(heads, shape.head_dim) if shape.qk_norm else None
            # Up to two padding tokens, as in a CUDA graph. The padding slot may hold anything, so it is not compared.
            written = slots[:tokens].clone()
            written[max(tokens - 2, 1) :] = 0
            table_there = table.table.to(dtype).to(device)
            q = op(qkv, positions, table_there, written.to(device), k_pool, v_pool, weight, shape.eps)
            return _host(q, *(read_rows(pool[1:], size, torch.float32) for pool in (k_pool, v_pool)))
        assert name in ("copy_kv", "transfer_kv"), name
        pool = _layers([[numbers(*item) for _ in range(LAYERS)] for _ in range(2)], device)
        other = _layers([[numbers(*item) for _ in range(LAYERS)] for _ in range(2)], device)
        if name == "copy_kv":
            half = len(slots) // 2
            op(pool, pool, slots[:half].to(device), slots[half : 2 * half].to(device))
            return _host(*pool.k, *pool.v)
        away, back = slots[:tokens].to(device), slots.flip(0)[:tokens].to(device)
        host = _layers([[_pinned(*item, dtype=dtype, device=device) for _ in range(LAYERS)] for _ in range(2)], device)
        op(pool, host, away, back)
        op(host.part(1, 2), other.part(1, 2), back, away)
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # reading host memory does not wait for the device
        return _host(*host.k, *host.v, *other.k, *other.v)


def tolerance(dtype: torch.dtype) -> float:
    """Absolute and relative error that an implementation may make on numbers around one, including rounding."""
    return max(4 * torch.finfo(dtype).eps, 2e-5)


def _host(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [tensor.float().cpu() for tensor in tensors]


def _layers(k_and_v: list[list[torch.Tensor]], device: torch.device) -> KVLayers:
    return KVLayers.of(k_and_v[0], k_and_v[1], device)


def _pinned(*size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.zeros(*size, dtype=dtype, pin_memory=device.type == "cuda")
