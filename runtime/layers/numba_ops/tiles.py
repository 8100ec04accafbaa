"""A tile of a product of matrices, as a Numba intrinsic over addresses: few rows and outputs, all sums in registers."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic as numba_intrinsic

from ....attention.numba_paged.kinds import LANES
from ....attention.numba_paged.operations import sized, without_result
from ....attention.numba_paged.vectors import Vectors, spans

intrinsic: Any = numba_intrinsic  # a kernel calls them without the context that their definitions begin with

VOID, INT = types.void, types.int64


def _widened(v: Vectors, address: Any, width: int) -> tuple[Any, Any]:
    """``width`` pairs of bfloat16: the even ones, and the odd ones, as float32."""
    words = ir.VectorType(v.i32, width)
    loaded = v.b.load(v.b.inttoptr(address, words.as_pointer()), align=2)
    even = v.b.shl(loaded, ir.Constant(words, [16] * width))
    odd = v.b.and_(loaded, ir.Constant(words, [-65536] * width))
    return v.b.bitcast(even, v.vector(width)), v.b.bitcast(odd, v.vector(width))


@intrinsic(prefer_literal=True)
def dot_tile(
    _context: Any,
    size: Any,
    rows: Any,
    outs: Any,
    _x: Any,
    _x_step: Any,
    _weight: Any,
    _target: Any,
    _target_step: Any,
) -> Any:
    """target[row, out] = x[row] · weight[out], in float32.

    weight: bfloat16 [outs, size]. x: float32 rows of ``size`` numbers, those of even index first: two neighbours of
    bfloat16 are one word of 32 bits; its halves become two vectors of float32 by a shift and a mask.
    """
    length, num_rows, num_outs = sized(size), sized(rows), sized(outs)
    if length % 2:
        raise TypeError(f"rows of {length} numbers are not made of pairs")
    half = length // 2

    def generate(v: Vectors, arguments: list[Any]) -> None:
        x, x_step, weight, target, target_step = arguments[3:]
        b = v.b
        from_x = [b.add(x, b.mul(x_step, v.i64_of(row))) for row in range(num_rows)]
        cells = [(row, out) for row in range(num_rows) for out in range(num_outs)]
        sums = {cell: v.variable(v.constant(0.0)) for cell in cells}
        rest = {cell: v.variable(v.first(v.constant(0.0))) for cell in cells}

        def both(at: Any, width: int) -> None:
            """Add what ``width`` pairs from number ``at`` on give."""
            offset = b.mul(at, v.i64_of(4))
            sides = [_widened(v, b.add(v.shifted(weight, 2 * length * out), offset), width) for out in range(num_outs)]
            for row in range(num_rows):
                first = b.add(from_x[row], offset)
                numbers = [v.load(v.shifted(first, 4 * half * side), width) for side in range(2)]
                for out in range(num_outs):
                    cell = row, out
                    if width == LANES:
                        total = v.fma(numbers[0], sides[out][0], b.load(sums[cell]))
                        b.store(v.fma(numbers[1], sides[out][1], total), sums[cell])
                    else:
                        product = v.fma(numbers[1], sides[out][1], b.fmul(numbers[0], sides[out][0]))
                        b.store(b.fadd(b.load(rest[cell]), v.sum_of(product)), rest[cell])

        whole = half // LANES
        if whole:
            with v.loop(v.i64_of(whole)) as loop:
                both(b.mul(loop.index, v.i64_of(LANES)), LANES)
        for at, width in spans(half - whole * LANES):
            both(v.i64_of(whole * LANES + at), width)
        for row in range(num_rows):
            place = b.add(target, b.mul(target_step, v.i64_of(row)))
            totals = v.together([b.load(sums[row, out]) for out in range(num_outs)], b.fadd)
            for lane in [ir.Constant(v.i32, out) for out in range(num_outs)] if half % LANES else ():
                more = b.fadd(b.extract_element(totals, lane), b.load(rest[row, lane.constant]))
                totals = b.insert_element(totals, more, lane)
            v.store(totals, place)

    return VOID(size, rows, outs, INT, INT, INT, INT, INT), without_result(generate)
