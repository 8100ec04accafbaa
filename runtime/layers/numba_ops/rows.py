"""Numba intrinsics over addresses: the row operations (norms, activations, rotation) of the kernels.

``size``, ``kind`` (of numbers in memory, an index into KINDS) and the switches are constants of a kernel. Everything is
computed in float32 and rounded once, when it is stored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic as numba_intrinsic

from ....attention.numba_paged.kinds import KINDS, LANES
from ....attention.numba_paged.operations import copy_row, sized, without_result
from ....attention.numba_paged.vectors import LOWEST_EXP, Vectors, spans
from ....memory_pool.kv_rows import LARGEST, LEAST_MAGNITUDE, scale_offset

intrinsic: Any = numba_intrinsic  # a kernel calls them without the context that their definitions begin with

VOID, INT, FLOAT = types.void, types.int64, types.float32


def parts(v: Vectors, size: int, item: int, do: Callable[[Any, int], None]) -> None:
    """Call ``do`` with the offset in bytes and the width of each vector of a row: a loop, then what is left over."""
    whole = size // LANES
    if whole:
        with v.loop(v.i64_of(whole)) as loop:
            do(v.b.mul(loop.index, v.i64_of(LANES * item)), LANES)
    for at, width in spans(size - whole * LANES):
        do(v.i64_of((whole * LANES + at) * item), width)


def _item(kind: str) -> int:
    return 4 if kind == "float32" else 2


def _inverse_rms(v: Vectors, total: Any, size: int, eps: Any) -> Any:
    """1 / √(total / size + eps): a float."""
    one, count = (v.first(v.constant(float(number), 1)) for number in (1, size))
    return v.b.fdiv(one, v.root(v.b.fadd(v.b.fdiv(total, count), eps)))


def sigmoid(v: Vectors, x: Any) -> Any:
    """1 / (1 + e^−x), lane by lane; 0 below LOWEST_EXP. NaN stays NaN."""
    zero, one = v.constant(0.0, x.type.count), v.constant(1.0, x.type.count)
    small = v.exp(v.b.fsub(zero, v.absolute(x)))  # exp(−|x|) cannot be too large
    share = v.b.fdiv(v.b.select(v.b.fcmp_ordered("<", x, zero), small, one), v.b.fadd(one, small))
    return v.b.select(v.b.fcmp_ordered("<", x, v.constant(LOWEST_EXP, x.type.count)), zero, share)


@intrinsic(prefer_literal=True)
def norm_row(
    _context: Any, size: Any, kind: Any, adds: Any, _x: Any, _residual: Any, _weight: Any, _eps: Any, _target: Any
) -> Any:
    """target = x / rms(x) × weight. adds: 1 if residual becomes x + residual first, and that is what is normed. target
    may be x."""
    length, name, has_sum = sized(size), KINDS[sized(kind)], bool(sized(adds))
    item = _item(name)

    def generate(v: Vectors, arguments: list[Any]) -> None:
        x, residual, weight, eps, target = arguments[3:]
        source = residual if has_sum else x
        squares = v.variable(v.constant(0.0))
        rest = v.variable(v.first(v.constant(0.0)))

        def measure(offset: Any, width: int) -> None:
            numbers = v.load(v.b.add(x, offset), width, name)
            if has_sum:
                numbers = v.b.fadd(numbers, v.load(v.b.add(residual, offset), width, name))
                v.store(numbers, v.b.add(residual, offset), name)
            if width == LANES:
                v.b.store(v.fma(numbers, numbers, v.b.load(squares)), squares)
            else:
                v.b.store(v.b.fadd(v.b.load(rest), v.sum_of(v.b.fmul(numbers, numbers))), rest)

        def scale(offset: Any, width: int) -> None:
            numbers = v.b.fmul(v.load(v.b.add(source, offset), width, name), v.splat(factor, width))
            weights = v.load(v.b.add(weight, offset), width, name)
            v.store(v.b.fmul(numbers, weights), v.b.add(target, offset), name)

        parts(v, length, item, measure)
        factor = _inverse_rms(v, v.b.fadd(v.sum_of(v.b.load(squares)), v.b.load(rest)), length, eps)
        parts(v, length, item, scale)

    return VOID(size, kind, adds, INT, INT, INT, FLOAT, INT), without_result(generate)


@intrinsic(prefer_literal=True)
def gate_row(_context: Any, size: Any, kind: Any, _gate: Any, _up: Any, _target: Any) -> Any:
    """target = silu(gate) × up"""
    length, name = sized(size), KINDS[sized(kind)]

    def generate(v: Vectors, arguments: list[Any]) -> None:
        gate, up, target = arguments[2:]

        def gated(offset: Any, width: int) -> None:
            x, y = (v.load(v.b.add(address, offset), width, name) for address in (gate, up))
            v.store(v.b.fmul(v.b.fmul(x, sigmoid(v, x)), y), v.b.add(target, offset), name)

        parts(v, length, _item(name), gated)

    return VOID(size, kind, INT, INT, INT), without_result(generate)


@intrinsic(prefer_literal=True)
def turn_head(
    _context: Any, size: Any, kind: Any, norms: Any, _x: Any, _angles: Any, _weight: Any, _eps: Any, _target: Any
) -> Any:
    """Rotate a head: its halves turn together (see rotary.py); norms: 1 if it is normed first. angles: cosines, then
    sines. target may be x."""
    length, name, has_norm = sized(size), KINDS[sized(kind)], bool(sized(norms))
    item, half = _item(name), length // 2

    def generate(v: Vectors, arguments: list[Any]) -> None:
        x, angles, weight, eps, target = arguments[3:]
        places = [(at, width) for at, width in spans(half)]

        def halves(address: Any) -> tuple[list[Any], list[Any]]:
            """The two sides of a row, in parts."""
            first, second = (
                [v.load(v.shifted(address, item * (side + at)), width, name) for at, width in places]
                for side in (0, half)
            )
            return first, second

        left, right = halves(x)
        if has_norm:
            factor = _inverse_rms(v, v.dot(left + right, left + right), length, eps)
            left, right = (
                [v.b.fmul(v.b.fmul(part, v.splat(factor, part.type.count)), by) for part, by in zip(side, weights)]
                for side, weights in zip((left, right), halves(weight))
            )
        cosines, sines = halves(angles)
        for number, (at, _) in enumerate(places):
            one, other, cosine, sine = (each[number] for each in (left, right, cosines, sines))
            turned = v.b.fsub(v.b.fmul(one, cosine), v.b.fmul(other, sine))
            back = v.fma(one, sine, v.b.fmul(other, cosine))
            v.store(turned, v.shifted(target, item * at), name)
            v.store(back, v.shifted(target, item * (half + at)), name)

    return VOID(size, kind, norms, INT, INT, INT, FLOAT, INT), without_result(generate)


@intrinsic(prefer_literal=True)
def sum_row(_context: Any, size: Any, kind: Any, _x: Any, _y: Any, _target: Any) -> Any:
    """target = x + y"""
    length, name = sized(size), KINDS[sized(kind)]

    def generate(v: Vectors, arguments: list[Any]) -> None:
        x, y, target = arguments[2:]

        def added(offset: Any, width: int) -> None:
            one, other = (v.load(v.b.add(address, offset), width, name) for address in (x, y))
            v.store(v.b.fadd(one, other), v.b.add(target, offset), name)

        parts(v, length, _item(name), added)

    return VOID(size, kind, INT, INT, INT), without_result(generate)


@intrinsic(prefer_literal=True)
def quantize_row(_context: Any, size: Any, kind: Any, row_kind: Any, _source: Any, _target: Any) -> Any:
    """target = a quantized row with these numbers, bit by bit as `kv_rows.quantize` makes it. kind: of the numbers;
    row_kind: of the row."""
    length, name, row_name = sized(size), KINDS[sized(kind)], KINDS[sized(row_kind)]
    item, largest = _item(name), LARGEST[getattr(torch, row_name)]

    def generate(v: Vectors, arguments: list[Any]) -> None:
        source, target = arguments[3:]
        b, zero = v.b, ir.Constant(v.f32, 0.0)
        places = spans(length)
        numbers = [v.load(v.shifted(source, item * at), width, name) for at, width in places]
        poison = top = zero
        for x in numbers:
            poison = b.fadd(poison, v.sum_of(b.fmul(x, v.constant(0.0, x.type.count))))  # NaN if one is not finite
            part = v.max_of(v.absolute(x))
            top = b.select(b.fcmp_ordered(">", part, top), part, top)
        least = ir.Constant(v.f32, LEAST_MAGNITUDE)
        top = b.select(b.fcmp_ordered(">", top, least), top, least)
        is_finite = b.fcmp_ordered("==", poison, zero)
        factor = b.fdiv(ir.Constant(v.f32, largest), top)
        for x, (at, width) in zip(numbers, places):
            scaled = b.select(is_finite, b.fmul(x, v.splat(factor, width)), v.constant(0.0, width))
            v.store_bytes(scaled, v.shifted(target, at), row_name)
        for at in range(length, scale_offset(length)):
            place = b.inttoptr(v.shifted(target, at), ir.IntType(8).as_pointer())
            b.store(ir.Constant(ir.IntType(8), 0), place)
        scale = b.select(is_finite, b.fmul(top, ir.Constant(v.f32, 1.0 / largest)), ir.Constant(v.f32, float("nan")))
        v.store_float(scale, v.shifted(target, scale_offset(length)))

    return VOID(size, kind, row_kind, INT, INT), without_result(generate)


@njit(inline="always")
def convert_head(size, kind, row_kind, is_quantized, source, target):  # type: ignore
    """One head to its row in the pool."""
    if is_quantized:
        quantize_row(size, kind, row_kind, source, target)
    else:
        copy_row(size, kind, row_kind, source, target)
