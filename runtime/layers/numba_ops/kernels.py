"""The kernels: rows by rows of a step's tokens, by all threads of the team, through rows.py.

Arguments are an array of int64: NEXT (the row that is taken next), COUNT (of rows), then addresses, a step, and EPS, a
float32.
"""

from __future__ import annotations

from typing import Any

from ....attention.numba_paged.compiling import KernelFunction, kernel_builder
from ....attention.numba_paged.kinds import KINDS, QUANTIZED, item_bytes, kept_bytes

NEXT, COUNT, EPS, X, X_STEP, OUT, RESIDUAL, WEIGHT, POSITIONS, ANGLES, SLOTS, KEYS, VALUES = range(13)
ARGUMENTS = 13

AT_ONCE = 8
"""Rows that a thread takes."""


@kernel_builder
def norm_kernel(size: int, kind: str, *, adds: bool) -> KernelFunction:
    """OUT = norm of X × WEIGHT; with ``adds``, RESIDUAL becomes X + RESIDUAL first, and that is normed."""
    from ....attention.numba_paged.operations import fetch_add, peek, peek_float
    from .rows import norm_row

    number, step, sums = KINDS.index(kind), size * item_bytes(kind), int(adds)

    def kernel(a: Any) -> None:
        x, out, residual, weight = peek(a + 8 * X), peek(a + 8 * OUT), peek(a + 8 * RESIDUAL), peek(a + 8 * WEIGHT)
        while True:
            first = fetch_add(a + 8 * NEXT, AT_ONCE)
            if first >= peek(a + 8 * COUNT):
                return
            for row in range(first, min(first + AT_ONCE, peek(a + 8 * COUNT))):
                at = row * step
                norm_row(size, number, sums, x + at, residual + at, weight, peek_float(a + 8 * EPS), out + at)

    return kernel


@kernel_builder
def gate_kernel(size: int, kind: str) -> KernelFunction:
    """OUT = silu(gate) × up, which lie side by side in X."""
    from ....attention.numba_paged.operations import fetch_add, peek
    from .rows import gate_row

    number, step = KINDS.index(kind), size * item_bytes(kind)

    def kernel(a: Any) -> None:
        x, out = peek(a + 8 * X), peek(a + 8 * OUT)
        while True:
            first = fetch_add(a + 8 * NEXT, AT_ONCE)
            if first >= peek(a + 8 * COUNT):
                return
            for row in range(first, min(first + AT_ONCE, peek(a + 8 * COUNT))):
                gate = x + 2 * step * row
                gate_row(size, number, gate, gate + step, out + step * row)

    return kernel


@kernel_builder
def rotate_kernel(
    head_dim: int, heads: int, kv_heads: int, kind: str, *, norms: bool, kv_kind: str = ""
) -> KernelFunction:
    """Norm and turn the heads of q and k in X, q where it lies, k on its way to KEYS; v goes to VALUES. X_STEP: bytes
    from one row of X to the next. kv_kind: of the pool; empty if it is ``kind``. Where it differs, k is turned where it
    lies, and then converted."""
    if kv_kind not in ("", kind):
        return _rotate_and_convert(head_dim, heads, kv_heads, kind, kv_kind, int(norms))
    from ....attention.numba_paged.operations import copy_row, fetch_add, peek, peek_float
    from .rows import turn_head

    number, normed = KINDS.index(kind), int(norms)
    head, values = head_dim * item_bytes(kind), head_dim * kv_heads

    def kernel(a: Any) -> None:
        weight = peek(a + 8 * WEIGHT)
        while True:
            first = fetch_add(a + 8 * NEXT, AT_ONCE)
            if first >= peek(a + 8 * COUNT):
                return
            for row in range(first, min(first + AT_ONCE, peek(a + 8 * COUNT))):
                angles = peek(a + 8 * ANGLES) + peek(peek(a + 8 * POSITIONS) + 8 * row) * head
                slot = peek(peek(a + 8 * SLOTS) + 8 * row) * kv_heads * head
                at, target = peek(a + 8 * X) + row * peek(a + 8 * X_STEP), peek(a + 8 * KEYS) + slot
                eps = peek_float(a + 8 * EPS)
                for i in range(heads):
                    q = at + i * head
                    turn_head(head_dim, number, normed, q, angles, weight + i * head, eps, q)
                for i in range(heads, heads + kv_heads):
                    k = target + (i - heads) * head
                    turn_head(head_dim, number, normed, at + i * head, angles, weight + i * head, eps, k)
                copy_row(values, number, number, at + (heads + kv_heads) * head, peek(a + 8 * VALUES) + slot)

    return kernel


def _rotate_and_convert(
    head_dim: int, heads: int, kv_heads: int, kind: str, kv_kind: str, normed: int
) -> KernelFunction:
    from ....attention.numba_paged.operations import fetch_add, peek, peek_float
    from .rows import convert_head, turn_head

    number, kv_number = KINDS.index(kind), KINDS.index(kv_kind)
    head, kept, is_quantized = head_dim * item_bytes(kind), kept_bytes(head_dim, kv_kind), kv_kind in QUANTIZED

    def kernel(a: Any) -> None:
        weight = peek(a + 8 * WEIGHT)
        while True:
            first = fetch_add(a + 8 * NEXT, AT_ONCE)
            if first >= peek(a + 8 * COUNT):
                return
            for row in range(first, min(first + AT_ONCE, peek(a + 8 * COUNT))):
                angles = peek(a + 8 * ANGLES) + peek(peek(a + 8 * POSITIONS) + 8 * row) * head
                slot = peek(peek(a + 8 * SLOTS) + 8 * row) * kv_heads * kept
                at, eps = peek(a + 8 * X) + row * peek(a + 8 * X_STEP), peek_float(a + 8 * EPS)
                for i in range(heads + kv_heads):
                    x = at + i * head
                    turn_head(head_dim, number, normed, x, angles, weight + i * head, eps, x)
                for i in range(kv_heads):
                    k, v = at + (heads + i) * head, at + (heads + kv_heads + i) * head
                    to_k, to_v = peek(a + 8 * KEYS) + slot + i * kept, peek(a + 8 * VALUES) + slot + i * kept
                    convert_head(head_dim, number, kv_number, is_quantized, k, to_k)
                    convert_head(head_dim, number, kv_number, is_quantized, v, to_v)

    return kernel


@kernel_builder
def sum_kernel(size: int, kind: str) -> KernelFunction:
    """OUT = X + RESIDUAL."""
    from ....attention.numba_paged.operations import fetch_add, peek
    from .rows import sum_row

    number, step = KINDS.index(kind), size * item_bytes(kind)

    def kernel(a: Any) -> None:
        x, out, residual = peek(a + 8 * X), peek(a + 8 * OUT), peek(a + 8 * RESIDUAL)
        while True:
            first = fetch_add(a + 8 * NEXT, AT_ONCE)
            if first >= peek(a + 8 * COUNT):
                return
            for row in range(first, min(first + AT_ONCE, peek(a + 8 * COUNT))):
                at = row * step
                sum_row(size, number, x + at, residual + at, out + at)

    return kernel
