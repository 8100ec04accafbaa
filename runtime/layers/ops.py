"""The operations between the matrix products, as a table of functions; a device may have faster kernels for them.

A model is given one `Ops` and always calls these. `TORCH_OPS` runs on every device and is the oracle for all other
implementations. Tokens are rows; all tensors of a call are on one device and of one dtype, unless said otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from ...memory_pool.kv_pool import KVLayers, copy_kv
from ..model_config import ModelConfig
from .rotary import rotate_and_store


class LookUpOp(Protocol):
    def __call__(self, ids: torch.Tensor, table: torch.Tensor, dtype: torch.dtype, /) -> torch.Tensor:
        """ids: int64 [tokens]; table: [rows, size], of any float type -> its rows, [tokens, size], in ``dtype``."""
        ...


class AddOp(Protocol):
    def __call__(self, x: torch.Tensor, y: torch.Tensor, /) -> torch.Tensor:
        """x, y [rows, size], contiguous -> x + y. Does not change either."""
        ...


class RMSNormOp(Protocol):
    def __call__(self, x: torch.Tensor, weight: torch.Tensor, eps: float, /) -> torch.Tensor:
        """x [rows, size], weight [size] -> x / rms(x) * weight, [rows, size], contiguous. Does not change x."""
        ...


class AddRMSNormOp(Protocol):
    def __call__(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, /
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, residual [rows, size], contiguous -> (rms_norm(x + residual), x + residual). May overwrite both
        arguments and return them: the caller must not use them again."""
        ...


class SiluAndMulOp(Protocol):
    def __call__(self, gate_up: torch.Tensor, /) -> torch.Tensor:
        """[rows, 2 * size], gate then up, contiguous -> silu(gate) * up, [rows, size], contiguous."""
        ...


class RotateAndStoreOp(Protocol):
    def __call__(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        rotary_table: torch.Tensor,
        slots: torch.Tensor,
        k_pool: torch.Tensor,
        v_pool: torch.Tensor,
        norm_weight: torch.Tensor | None,
        eps: float,
        /,
    ) -> torch.Tensor:
        """Norm q and k if the model does so, rotate them by their positions, write k and v to the pool, return q.

        qkv: [tokens, (heads + 2 * kv_heads) * head_dim]: q, k, v of each token, contiguous; rows possibly strided. May
        be overwritten.
        positions, slots: int64 [tokens]; no slot occurs twice, except the padding slot 0, which may hold anything.
        rotary_table: [max_positions, head_dim], see RotaryEmbedding.
        k_pool, v_pool: one layer of the pool, [slots, kv_heads, items of a row] (see kv_rows.py), contiguous; only
        `slots` are written, with k and v rounded to the dtype of the call and then to the pool's.
        norm_weight: [heads + kv_heads, head_dim] for an RMSNorm of each head of q and k; None for no norm.
        Returns q [tokens, heads, head_dim]: heads and coordinates contiguous, rows possibly strided.
        """
        ...


class CopyKVOp(Protocol):
    def __call__(
        self, source: KVLayers, target: KVLayers, source_slots: torch.Tensor, target_slots: torch.Tensor, /
    ) -> None:
        """In all layers, copy slots of source to slots of target: int64 [n] each, on the device. No target occurs
        twice or is also a source of this call. The layers of both have the same shape and dtype."""
        ...


@dataclass(frozen=True, slots=True)
class Ops:
    """One implementation of each operation. All calls for a model come from one thread."""

    rms_norm: RMSNormOp
    add_rms_norm: AddRMSNormOp
    silu_and_mul: SiluAndMulOp
    rotate_and_store: RotateAndStoreOp
    copy_kv: CopyKVOp
    """Copies within the device's memory, as fast as possible; for forks and partial pages."""
    transfer_kv: CopyKVOp
    """Between device memory and pinned host memory, on few multiprocessors, so that the others keep computing."""
    look_up: LookUpOp
    add: AddOp


@dataclass(frozen=True, slots=True)
class OpShape:
    """The sizes of a model that its operations depend on."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qk_norm: bool
    eps: float

    @classmethod
    def of(cls, config: ModelConfig) -> OpShape:
        return cls(
            config.hidden_size,
            config.intermediate_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.traits.qk_norm or config.traits.qk_unit_norm,
            config.rms_norm_eps,
        )


def look_up(ids: torch.Tensor, table: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See ops.LookUpOp."""
    return F.embedding(ids, table).to(dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See ops.RMSNormOp."""
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ops.AddRMSNormOp."""
    total = residual.add_(x)
    return rms_norm(total, weight, eps), total


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SwiGLU's gate (Shazeer 2020). See ops.SiluAndMulOp."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


TORCH_OPS = Ops(
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    silu_and_mul=silu_and_mul,
    rotate_and_store=rotate_and_store,
    copy_kv=copy_kv,
    transfer_kv=copy_kv,
    look_up=look_up,
    add=torch.add,
)
