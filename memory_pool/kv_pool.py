"""The K and V of every token, per layer, indexed by slot.

    k[layer], v[layer]: [num_slots, num_kv_heads, items of a row]; layers may differ, and K from V

A row is the K or V of one head of one token: as many numbers as the head has, or one-byte numbers and their scale
(kv_rows.py).

    page   0                1                2
    slot   0 … page_size-1  page_size …      …        page 0 is padding: never handed out, may be read under a mask

Which slot belongs to which token is the business of req_to_token and the allocator; this file only holds numbers.
Only this file of memory_pool, kv_rows.py, state_pool.py and the folder stores/ import torch.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from .kv_rows import is_quantized, row_bytes, row_items, scales_of


@dataclass(frozen=True, slots=True)
class KVShape:
    """What one layer keeps of a token: ``num_kv_heads`` heads of ``key_dim`` numbers in K and ``value_dim`` in V."""

    num_kv_heads: int
    key_dim: int
    value_dim: int
    values_in_keys: bool = False
    """V is no memory of its own, but the first ``value_dim`` numbers of each head of K (`MLAKVPool`)."""

    @property
    def row_sizes(self) -> tuple[int, ...]:
        """Numbers of each row that a head keeps of a token: of K, and of V if it has memory of its own."""
        return (self.key_dim,) if self.values_in_keys else (self.key_dim, self.value_dim)


def uniform_shapes(num_layers: int, num_kv_heads: int, head_dim: int) -> list[KVShape]:
    """Layers that keep the same, as in most models."""
    return [KVShape(num_kv_heads, head_dim, head_dim)] * num_layers


@dataclass(frozen=True, slots=True)
class KVLayers:
    """K and V of some layers, as one copy reads or writes them: on a device, or in pinned host memory."""

    k: list[torch.Tensor]
    """Per layer [slots, kv_heads, items of a row], contiguous; uint8 where rows are quantized."""
    v: list[torch.Tensor]
    """Likewise, or empty where V is part of K."""
    k_pointers: torch.Tensor
    """uint64 [layers], on the device: where each layer's tensor begins, for kernels that copy all layers at once."""
    v_pointers: torch.Tensor

    @classmethod
    def of(cls, k: list[torch.Tensor], v: list[torch.Tensor], device: torch.device) -> KVLayers:
        """device: where the kernels run, also for tensors in pinned host memory."""
        return cls(k, v, k_pointers=_pointers(k, device), v_pointers=_pointers(v, device))

    def part(self, first: int, count: int) -> KVLayers:
        """Layers first to first + count."""
        layers = slice(first, first + count)
        return KVLayers(self.k[layers], self.v[layers], self.k_pointers[layers], self.v_pointers[layers])

    @property
    def is_uniform(self) -> bool:
        """True if K and V of all layers have the same bytes per slot, as kernels that copy all layers at once need."""
        sizes = {layer.stride(0) * layer.itemsize for layer in (*self.k, *self.v)}
        return len(sizes) == 1 and len(self.k) == len(self.v)


def _pointers(layers: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.tensor([layer.data_ptr() for layer in layers], dtype=torch.uint64, device=device)


CopyKV = Callable[[KVLayers, KVLayers, torch.Tensor, torch.Tensor], None]
"""(source, target, source slots, target slots): see `copy_kv`."""


def copy_kv(source: KVLayers, target: KVLayers, source_slots: torch.Tensor, target_slots: torch.Tensor) -> None:
    """Copy slots of all layers of source to slots of target; int64 [n] each, no target twice.

    Per tensor all sources are read before a target is written, so that the two may be one pool and may overlap. Where
    one side is host memory, the slots are brought there, which waits for the device.
    """
    for ours, theirs in zip((*source.k, *source.v), (*target.k, *target.v), strict=True):
        rows = ours.index_select(0, source_slots.to(ours.device))
        theirs.index_copy_(0, target_slots.to(theirs.device), rows.to(theirs.device))


class KVPool(Protocol):
    """KV of one model by slot. Tiers and copies know ``layers`` alone, attention the tensors of its kind of layer."""

    num_tokens: int
    """Usable tokens: a multiple of page_size; the padding page comes on top."""
    page_size: int
    num_slots: int
    dtype: torch.dtype
    """Of the numbers in the pool: float32, bfloat16 or float16; int8, float8_e4m3fn or float8_e5m2 for quantized
    rows."""
    model_dtype: torch.dtype
    """Of the K and V that are stored, and of the queries and outputs of attention."""
    device: torch.device
    bytes_per_token: int
    k: list[torch.Tensor]
    """Per layer, [slots, kv_heads, items of a row of key_dim numbers], see kv_rows.py."""
    v: list[torch.Tensor]
    """Per layer, [slots, kv_heads, items of a row of value_dim numbers]; may be a view of k."""
    layers: KVLayers
    """All memory, each byte once."""

    def copy(self, source: torch.Tensor, target: torch.Tensor, *, disjoint: bool = False) -> None:
        """Copy slots source to slots target in all layers (int64 [n]; no target twice). All sources are read before any
        target is written, so the two may overlap. disjoint: the caller knows that they do not, see `are_disjoint`."""
        ...

    def first_not_finite(self, slots: torch.Tensor, piece: int = 4096) -> int | None:
        """The first of these slots (int [n], on the device) that holds a NaN or an infinity in any layer, as a position
        among them; None if none does. Looks at ``piece`` slots at a time. Waits for the device."""
        ...


class _SlotTensors:
    """What the pools below have in common: tensors by slot, allocated once.

    Pages that were never written read as zeros: attention multiplies masked keys by zero, and 0 x NaN would be NaN.
    """

    k: list[torch.Tensor]
    v: list[torch.Tensor]
    layers: KVLayers

    def __init__(
        self,
        *,
        num_tokens: int,
        page_size: int,
        shapes: Sequence[KVShape],
        dtype: torch.dtype,
        device: torch.device,
        model_dtype: torch.dtype | None = None,
        copy_disjoint: CopyKV = copy_kv,
    ) -> None:
        """num_tokens: usable tokens, a positive multiple of page_size; the padding page comes on top. shapes: of each
        layer. model_dtype: None if it is ``dtype``. copy_disjoint: copies slots that do not overlap, of layers that are
        uniform; a GPU has a kernel for it.

        Raises MemoryError where a CPU cannot hold the pool, torch.OutOfMemoryError where a GPU cannot."""
        if num_tokens < page_size or num_tokens % page_size:
            raise ValueError(f"KV pool of {num_tokens} tokens: use a positive multiple of the page size ({page_size})")
        self.num_tokens = num_tokens
        self.page_size = page_size
        self.num_slots = num_tokens + page_size
        self.dtype, self.model_dtype = dtype, model_dtype or dtype
        self.device = device
        self.bytes_per_token = kv_bytes_per_token(shapes, dtype)
        self._row_sizes = [size for at in range(2) for shape in shapes for size in shape.row_sizes[at : at + 1]]
        """Of the tensors in ``layers``, K before V."""
        try:
            self._allocate(shapes)
        except torch.OutOfMemoryError:  # on a GPU: the caller, which shares out its memory, knows what to change
            raise
        except (MemoryError, ValueError) as error:  # from the CPU allocator; ValueError: more than there are addresses
            raise MemoryError(f"cannot allocate the {self.describe()} on {device}; lower --max-total-tokens") from error
        self._copy_disjoint = copy_disjoint if self.layers.is_uniform else copy_kv

    def _allocate(self, shapes: Sequence[KVShape]) -> None:
        """Set k, v and layers."""
        raise NotImplementedError

    def _zeros(self, num_kv_heads: int, size: int) -> torch.Tensor:
        return untouched_zeros((self.num_slots, num_kv_heads, row_items(size, self.dtype)), self.dtype, self.device)

    def describe(self) -> str:
        """Tokens x bytes per token = size, for errors."""
        size = self.num_tokens * self.bytes_per_token / 2**30
        return f"KV pool: {self.num_tokens} tokens × {self.bytes_per_token} bytes = {size:.2f} GiB"

    def copy(self, source: torch.Tensor, target: torch.Tensor, *, disjoint: bool = False) -> None:
        """See KVPool.copy."""
        (self._copy_disjoint if disjoint else copy_kv)(self.layers, self.layers, source, target)

    def first_not_finite(self, slots: torch.Tensor, piece: int = 4096) -> int | None:
        """See KVPool.first_not_finite."""
        for start in range(0, len(slots), piece):
            part = slots[start : start + piece].long()
            bad = torch.zeros(len(part), dtype=torch.bool, device=self.device)
            for layer, size in zip((*self.layers.k, *self.layers.v), self._row_sizes, strict=True):
                rows = layer.index_select(0, part)
                numbers = scales_of(rows, size) if is_quantized(self.dtype) else rows
                bad |= ~numbers.flatten(1).isfinite().all(dim=1)
            if bad.any():
                return start + int(bad.int().argmax())
        return None


class MHAKVPool(_SlotTensors):
    """K/V tensors of multi-head and grouped-query attention."""

    def _allocate(self, shapes: Sequence[KVShape]) -> None:
        self.k = [self._zeros(shape.num_kv_heads, shape.key_dim) for shape in shapes]
        self.v = [self._zeros(shape.num_kv_heads, shape.value_dim) for shape in shapes]
        self.layers = KVLayers.of(self._bytes(self.k), self._bytes(self.v), self.device)

    def _bytes(self, layers: list[torch.Tensor]) -> list[torch.Tensor]:
        """What copies see: torch copies few tensors of 8-bit floats."""
        return [layer.view(torch.uint8) for layer in layers] if is_quantized(self.dtype) else layers


class MLAKVPool(_SlotTensors):
    """One tensor per layer for multi-head latent attention (DeepSeek-AI 2024, "DeepSeek-V2").

        k[layer]: [slots, 1, latent + rotary part]        v[layer]: [slots, 1, latent], a view of it

    The latent is the key and the value of every query head, so V takes no memory. Copies, host tiers and checks see it
    in ``layers``, which has no V.
    """

    def _allocate(self, shapes: Sequence[KVShape]) -> None:
        if not all(shape.values_in_keys for shape in shapes):
            raise ValueError("an MLA pool keeps latents in every layer; use make_kv_pool for the shapes of a model")
        self.k = [self._zeros(shape.num_kv_heads, shape.key_dim) for shape in shapes]
        self.v = [keys[..., : shape.value_dim] for keys, shape in zip(self.k, shapes, strict=True)]
        self.layers = KVLayers.of(self.k, [], self.device)


class WindowedKVPool:
    """A KVPool whose layers with a sliding window have other slots, and fewer, than the layers that see all tokens.

    ``k`` and ``v`` have all layers; everything else is of the latter, and `windows` is the pool of the others.
    """

    def __init__(self, full: KVPool, windows: KVPool, window_layers: frozenset[int]) -> None:
        """window_layers: numbers of the layers with a window, among all."""
        self.full, self.windows, self.window_layers = full, windows, window_layers
        self.num_tokens, self.page_size, self.num_slots = full.num_tokens, full.page_size, full.num_slots
        self.dtype, self.model_dtype = full.dtype, full.model_dtype
        self.device, self.bytes_per_token = full.device, full.bytes_per_token
        self.layers = full.layers
        self.k = self._in_order(full.k, windows.k)
        self.v = self._in_order(full.v, windows.v)

    def _in_order(self, full: list[torch.Tensor], windows: list[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of all layers."""
        parts = iter(full), iter(windows)
        return [next(parts[layer in self.window_layers]) for layer in range(len(full) + len(windows))]

    def copy(self, source: torch.Tensor, target: torch.Tensor, *, disjoint: bool = False) -> None:
        """See KVPool.copy; not of layers with a window."""
        self.full.copy(source, target, disjoint=disjoint)

    def first_not_finite(self, slots: torch.Tensor, piece: int = 4096) -> int | None:
        """See KVPool.first_not_finite; not of layers with a window."""
        return self.full.first_not_finite(slots, piece)


def make_kv_pool(
    *,
    num_tokens: int,
    page_size: int,
    shapes: Sequence[KVShape],
    dtype: torch.dtype,
    device: torch.device,
    model_dtype: torch.dtype | None = None,
    copy_disjoint: CopyKV = copy_kv,
) -> KVPool:
    """The pool for layers of these shapes, with the arguments of all pools: see `MHAKVPool`. Raises ValueError if only
    some layers keep latents, which no model served does, or if latents would be of another type than the model's."""
    kinds = {shape.values_in_keys for shape in shapes}
    if len(kinds) > 1:
        raise ValueError("some layers keep K and V and others latents: there is no pool for that")
    if kinds == {True} and model_dtype not in (None, dtype):
        raise ValueError(f"latents of a model of {model_dtype} in {dtype}: use the model's type")
    pool = MLAKVPool if kinds == {True} else MHAKVPool
    return pool(
        num_tokens=num_tokens,
        page_size=page_size,
        shapes=shapes,
        dtype=dtype,
        device=device,
        model_dtype=model_dtype,
        copy_disjoint=copy_disjoint,
    )


HUGE_FROM = 64 << 20
"""Tensors of at least so many bytes lie on huge pages of 2 MiB, which are read faster. Every layer has a tensor, so
with smaller ones a few tokens would make much of the pool resident."""


def untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of zeros. On a CPU it takes memory only where it is used: the system hands out zeroed pages as they are
    touched, while torch would write the zeros, and so would calloc, in memory that was freed before. Raises MemoryError
    or ValueError on a CPU."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    try:
        memory = mmap.mmap(-1, max(size, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"cannot map {size} bytes: {error}") from error
    if size >= HUGE_FROM:
        with contextlib.suppress(AttributeError, OSError):  # there may be none
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)[:size].view(dtype).view(shape)


def are_disjoint(source: np.ndarray, target: np.ndarray) -> bool:
    """int32 [n], [m] slots on the host: is no slot in both?"""
    return not np.isin(target, source).any()


def kv_bytes_per_token(shapes: Sequence[KVShape], dtype: torch.dtype) -> int:
    """Bytes that K and V of one token take over all layers. dtype: see KVPool.dtype."""
    return sum(shape.num_kv_heads * row_bytes(size, dtype) for shape in shapes for size in shape.row_sizes)
