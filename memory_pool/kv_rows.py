"""The K or V of one head of one token, as a row of the KV pool: plain numbers, or one-byte numbers and their scale.

    float32, bfloat16, float16      [ size numbers ]
    int8, float8                    [ size numbers | up to 3 bytes of padding | scale, a float32 ]

The type of a pool's tensor says which. Each row has its own scale, as the per-token-per-head caches of LMDeploy and
vLLM do, so what a row holds depends on nothing but the numbers that were stored in it: not on the step that computed
them, nor on other tokens. Everything that moves KV moves whole rows, and need not know what is in them.

    scale  = largest magnitude of the row / largest number of the type          number × scale ≈ what was stored

Numbers are rounded to the nearest. int8 has steps of 1/127 of the row's largest magnitude; float8 has relative steps,
finer for numbers below 1/16 of it (e4m3) and coarser above. A row with a NaN or an infinity has the scale NaN.
"""

from __future__ import annotations

import torch

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
"""The types of quantized rows, and their largest numbers."""

SCALE_BYTES = 4

LEAST_MAGNITUDE = 2.0**-100
"""A row with only smaller magnitudes is scaled as if this were its largest one, so that no scale is 0 or subnormal."""


def is_quantized(dtype: torch.dtype) -> bool:
    """True if rows of this type have a scale."""
    return dtype in LARGEST


def scale_offset(size: int) -> int:
    """Where the scale of a quantized row of ``size`` numbers begins, in bytes: aligned, as rows begin at multiples of
    four bytes."""
    return -(-size // SCALE_BYTES) * SCALE_BYTES


def row_items(size: int, dtype: torch.dtype) -> int:
    """Items of ``dtype`` that a row of ``size`` numbers takes.

    >>> row_items(64, torch.bfloat16), row_items(64, torch.int8), row_items(6, torch.int8)
    (64, 68, 12)
    """
    return scale_offset(size) + SCALE_BYTES if is_quantized(dtype) else size


def row_bytes(size: int, dtype: torch.dtype) -> int:
    """Bytes that a row of ``size`` numbers takes."""
    return row_items(size, dtype) * dtype.itemsize


def store_rows(pool: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows, [tokens, heads, size] of any float type, to slots (int64 [tokens]) of a layer of the pool, [slots,
    heads, `row_items`]: converted to the type of the pool."""
    if is_quantized(pool.dtype):
        pool.view(torch.uint8).index_copy_(0, slots, quantize(rows, pool.dtype))
    else:
        pool.index_copy_(0, slots, rows.to(pool.dtype))


def quantize(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """rows: [..., size] of any float type. Returns quantized rows as bytes, uint8 [..., row_items]."""
    size, largest = rows.shape[-1], LARGEST[dtype]
    wide = rows.float()
    magnitude = wide.abs().amax(-1, keepdim=True)
    is_finite = magnitude.isfinite()  # amax keeps NaN
    magnitude = magnitude.clamp(min=LEAST_MAGNITUDE)
    numbers = torch.where(is_finite, wide * torch.tensor(largest).div(magnitude), 0.0)  # `largest /` rounds twice
    numbers = numbers.round().to(torch.int8) if dtype == torch.int8 else numbers.to(dtype)
    scales = torch.where(is_finite, magnitude * (1.0 / largest), torch.nan)
    found = torch.zeros(*rows.shape[:-1], row_items(size, dtype), dtype=torch.uint8, device=rows.device)
    found[..., :size] = numbers.view(torch.uint8)
    found[..., scale_offset(size) :] = scales.view(torch.uint8)
    return found


def read_rows(rows: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    """rows: [..., row_items], of the pool. Returns the numbers that they stand for, [..., size] of the type ``dtype``;
    a view of rows where these are such numbers."""
    if not is_quantized(rows.dtype):
        return rows.to(dtype)
    numbers = rows[..., :size].float() * scales_of(rows, size)
    return numbers.to(dtype)


def select_rows(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Rows of these slots of a layer (int [n]), [n, heads, `row_items`]: a copy, of the pool's type."""
    if is_quantized(pool.dtype):  # torch indexes few tensors of 8-bit floats
        return pool.view(torch.uint8).index_select(0, slots).view(pool.dtype)
    return pool.index_select(0, slots)


def scales_of(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Scales of quantized rows, float32 [..., 1]: a view of them."""
    at = scale_offset(size)
    return rows.view(torch.uint8)[..., at : at + SCALE_BYTES].view(torch.float32)
