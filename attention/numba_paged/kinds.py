"""Kinds of numbers that kernels read and write, and the sizes of what they work on at a time. Imports no compiler."""

from __future__ import annotations

from ...memory_pool.kv_rows import SCALE_BYTES, scale_offset

FLOAT8 = {"float8_e4m3fn": (3, 7), "float8_e5m2": (2, 15)}
"""Bits of the mantissa and bias of the exponent of 8-bit floats."""

QUANTIZED = ("int8", *FLOAT8)
"""Types of numbers that have a scale, see kv_rows.py."""

KINDS = ("float32", "bfloat16", "float16", *QUANTIZED)
"""Types of the numbers in the pool; everything is computed in float32."""

LANES = 16
"""Numbers of the widest vector."""

BLOCK = 64
"""Keys of a block: scores of a row are so many floats."""

ROWS_AT_ONCE = 4
"""Rows with sums that stay in registers while values are added to them."""

LINE = 64
"""Bytes that a prefetch brings."""

LOG2_E = 1.4426950408889634
"""2^(x · log₂ e) is exp(x)."""


def item_bytes(kind: str) -> int:
    """Bytes of a number."""
    return 4 if kind == "float32" else 1 if kind in QUANTIZED else 2


def kept_bytes(size: int, kind: str) -> int:
    """Bytes of a row of the pool."""
    return scale_offset(size) + SCALE_BYTES if kind in QUANTIZED else size * item_bytes(kind)
