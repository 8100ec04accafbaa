"""Makes a small random call of each operation and returns its results, to compare implementations of `ops.Ops`.

Used when a model is loaded, to find out which implementations work on this device, and by tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch

from ...memory_pool.kv_pool import KVLayers
from ..model_config import ModelConfig, RopeConfig
from .ops import TORCH_OPS, Ops
from .rotary import RotaryEmbedding

CPU = torch.device("cpu")
OP_NAMES = tuple(field.name for field in fields(Ops))
POSITIONS = 512
LAYERS = 3
SPARE_SLOTS = 7
"""Slots of a trial to which no token is written; they must not change."""


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
            config.traits.qk_norm,
            config.rms_norm_eps,
        )


@dataclass(frozen=True, slots=True)
class Trial:
    """One call with random numbers that ``dtype`` holds exactly, so that all implementations get the same input."""

    shape: OpShape
    tokens: int
    dtype: torch.dtype
    seed: int = 0

    def expected(self, name: str) -> list[torch.Tensor]:
        """Results of the torch twin in float32 on the CPU, without rounding to ``dtype``."""
        return self.run(name, getattr(TORCH_OPS, name), dtype=torch.float32, device=CPU)

    def found(self, name: str, op: Callable[..., Any], device: torch.device) -> list[torch.Tensor]:
        """Results of op in the trial's dtype on the device."""
        return self.run(name, op, dtype=self.dtype, device=device)

    def run(self, name: str, op: Callable[..., Any], *, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
        """Results of one call, and the memory it writes to, as float32 on the CPU."""
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
            qkv = numbers(tokens, (heads + shape.num_kv_heads) * shape.head_dim)
            k_pool, v_pool = numbers(*item), numbers(*item)
            weight = weights(heads, shape.head_dim) if shape.qk_norm else None
            # Up to two padding tokens, as in a CUDA graph. The padding slot may hold anything, so it is not compared.
            written = slots[:tokens].clone()
            written[max(tokens - 2, 1) :] = 0
            table_there = table.table.to(dtype).to(device)
            q = op(qkv, positions, table_there, written.to(device), k_pool, v_pool, weight, shape.eps)
            return _host(q, k_pool[1:], v_pool[1:])
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
