"""`ranking.best_tokens` as a Numba kernel: one pass over a row finds the highest logit, another one its place.

A row of 49,152 logits takes 11 µs; torch's eight calls take 34 µs in a loop of their own, and several times as long
within a step, whose kernels have emptied the caches (two cores of a Zen 4).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic as numba_intrinsic

from ...attention.numba_paged import operations, vectors
from ...attention.numba_paged.compiling import checksum, compiled
from ...attention.numba_paged.operations import fetch_add, peek, without_result
from ...attention.numba_paged.team import Call, Team
from ...attention.numba_paged.vectors import LANES, Vectors

intrinsic: Any = numba_intrinsic  # a kernel calls it without the context that its definition begins with

VOID, INT = types.void, types.int64

NEXT, ROWS, COLUMNS, LOGITS, STEP, BEST, IDS = range(7)
"""Places in the kernel's arguments, an array of int64. STEP: bytes from one row of LOGITS to the next."""
ARGUMENTS = 7

ONE_THREAD = 1 << 17
"""Logits up to which one thread is faster than waking the others."""


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


@cache
def best_kernel() -> Any:
    """A Numba cfunc; every thread of a team calls it."""
    sources = checksum(operations, vectors)

    def kernel(a: Any) -> None:
        if not sources:
            return
        while True:
            row = fetch_add(a + 8 * NEXT, 1)
            if row >= peek(a + 8 * ROWS):
                return
            x = peek(a + 8 * LOGITS) + row * peek(a + 8 * STEP)
            best_of_row(peek(a + 8 * COLUMNS), x, peek(a + 8 * BEST) + 4 * row, peek(a + 8 * IDS) + 8 * row)

    return compiled(kernel)


class BestTokens:
    """See `ranking.best_tokens`. All calls come from one thread."""

    def __init__(self) -> None:
        """Raises NoTeamError, and whatever compiling raises."""
        self._team = Team()
        self._call = Call(best_kernel(), ARGUMENTS)

    def __call__(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """logits: float32 [n, vocab], a row's numbers contiguous, at least LANES of them."""
        assert logits.dtype == torch.float32 and logits.stride(1) == 1 and logits.shape[1] >= LANES
        rows, columns = logits.shape
        best, ids, a = torch.empty(rows), torch.empty(rows, dtype=torch.int64), self._call.arguments
        a[NEXT], a[ROWS], a[COLUMNS] = 0, rows, columns
        a[LOGITS], a[STEP], a[BEST], a[IDS] = logits.data_ptr(), 4 * logits.stride(0), best.data_ptr(), ids.data_ptr()
        self._team.run(self._call, torch.get_num_threads() if rows > 1 and rows * columns > ONE_THREAD else 1)
        return best, ids
