"""Numba intrinsics over addresses, for the kernels of logits: numba_ranking.py and numba_masks.py."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from ...attention.numba_paged.kinds import LANES
from ...attention.numba_paged.operations import FLOAT, INT, VOID, intrinsic, without_result
from ...attention.numba_paged.vectors import Vectors


@intrinsic
def best_of_row(_context: Any, _columns: Any, _x: Any, _best: Any, _id: Any) -> Any:
    """best (float32) and id (int64, both addresses) = the highest of ``columns`` numbers from x on, at least LANES, and
    the place of the first that equals it. A NaN is higher than all else."""

    def generate(v: Vectors, arguments: list[Any]) -> None:
        columns, x, best, place = arguments
        b, words = v.b, ir.VectorType(v.i32, LANES)
        largest = ir.Constant(words, [0x7FFFFFFF] * LANES)
        nothing, lane_0 = ir.Constant(words, ir.Undefined), ir.Constant(words, [0] * LANES)

        def splat(number: Any) -> Any:
            return b.shuffle_vector(b.insert_element(nothing, number, ir.Constant(v.i32, 0)), nothing, lane_0)

        def keys(first: Any) -> Any:
            """Integers in the order of LANES numbers."""
            numbers = b.fadd(v.load(b.add(x, b.mul(first, v.i64_of(4))), LANES), v.constant(0.0))  # -0.0 becomes 0.0
            bits = b.bitcast(numbers, words)
            # Floats order like their bits, except that negative ones run backwards.
            ordered = b.xor(bits, b.and_(b.ashr(bits, ir.Constant(words, [31] * LANES)), largest))
            return b.select(b.fcmp_unordered("uno", numbers, numbers), largest, ordered)

        def places(first: Any) -> Any:
            """For each of LANES numbers its place in the row if it equals the highest, else the largest integer."""
            own = b.add(splat(b.trunc(first, v.i32)), ir.Constant(words, list(range(LANES))))
            return b.select(b.icmp_signed("==", keys(first), wanted), own, largest)

        def larger(one: Any, other: Any) -> Any:
            return b.select(b.icmp_signed(">", one, other), one, other)

        def smaller(one: Any, other: Any) -> Any:
            return b.select(b.icmp_signed("<", one, other), one, other)

        def over_row(look: Any, join: Any) -> Any:
            """Apply ``look`` to every vector of the row and join the results. The last vector overlaps the one before
            it, so that the row's end needs no other code."""
            found = v.variable(look(b.sub(columns, v.i64_of(LANES))))
            with v.loop(b.udiv(columns, v.i64_of(LANES))) as loop:
                b.store(join(b.load(found), look(b.mul(loop.index, v.i64_of(LANES)))), found)
            return v.reduced(b.load(found), join)

        wanted = splat(over_row(keys, larger))
        first = b.sext(over_row(places, smaller), v.i64)
        v.store_float(v.load_float(b.add(x, b.mul(first, v.i64_of(4)))), best)
        b.store(first, b.inttoptr(place, v.i64.as_pointer()))

    return VOID(INT, INT, INT, INT), without_result(generate)


@intrinsic
def poke_float(_context: Any, _address: Any, _number: Any) -> Any:
    """Store a float32."""

    def generate(v: Vectors, arguments: list[Any]) -> None:
        v.store_float(arguments[1], arguments[0])

    return VOID(INT, FLOAT), without_result(generate)


@intrinsic
def peek_word(_context: Any, _address: Any) -> Any:
    """The uint32 at an address."""

    def lower(_context: Any, b: Any, _signature: Any, arguments: list[Any]) -> Any:
        return b.load(b.inttoptr(arguments[0], Vectors(b).i32.as_pointer()))

    return types.uint32(INT), lower
