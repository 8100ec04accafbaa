"""A tile of a product with a weight in blocks, as a Numba intrinsic over addresses: all sums stay in registers.

In float32 a block of a weight [out, in] holds, input by input, its numbers for WIDTH outputs. In bfloat16, where the
processor multiplies it, pair by pair of inputs: for each output two numbers, which make a word of 32 bits. Where it
does not, numbers of 16 bits lie as those of float32 do, and are widened; so do those of 8 bits, which have scales.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic as numba_intrinsic

from ....attention.numba_paged.kinds import KINDS, LANES, item_bytes
from ....attention.numba_paged.operations import sized, without_result
from ....attention.numba_paged.vectors import Vectors

intrinsic: Any = numba_intrinsic  # a kernel calls them without the context that their definitions begin with

VOID, INT = types.void, types.int64

Cell = tuple[int, int]
"""A row and a vector of outputs."""

AHEAD = 8192
"""Bytes between what is multiplied and what is fetched: the processor by itself looks less far, and does not cross
pages."""
UNROLLED = 4
"""Inputs, or pairs, of a turn of the loop."""
SUMMED = 256
"""Inputs, or pairs, that are summed before the sum is added to the others: the error grows with the longest sum."""

PAIRS = len(KINDS)
"""Stands for a weight in words of two bfloat16."""


def _summed(
    v: Vectors,
    steps: Any,
    at_once: Any,
    cells: list[Cell],
    add: Callable[[Any, dict[Cell, Any]], None],
    join: Callable[[Any, Cell, Any, Any], Any],
) -> dict[Cell, Any]:
    """The sums of all steps. ``add`` adds those of one step to what lies in variables; ``join(number of the run, cell,
    sum, total)`` adds the sum of a run of ``at_once`` steps to the total."""
    b, unrolled = v.b, v.i64_of(UNROLLED)
    totals = {cell: v.variable(v.constant(0.0)) for cell in cells}
    with v.loop(b.udiv(b.add(steps, b.sub(at_once, v.i64_of(1))), at_once)) as run:
        begin = b.mul(run.index, at_once)
        left = b.sub(steps, begin)
        count = b.select(b.icmp_signed("<", left, at_once), left, at_once)
        sums = {cell: v.variable(v.constant(0.0)) for cell in cells}
        turns = b.udiv(count, unrolled)
        with v.loop(turns) as loop:
            first = b.add(begin, b.mul(loop.index, unrolled))
            for number in range(UNROLLED):
                add(b.add(first, v.i64_of(number)), sums)
        done = b.mul(turns, unrolled)
        with v.loop(b.sub(count, done)) as loop:
            add(b.add(begin, b.add(done, loop.index)), sums)
        for cell in cells:
            b.store(join(run.index, cell, b.load(sums[cell]), b.load(totals[cell])), totals[cell])
    return {cell: b.load(total) for cell, total in totals.items()}


@intrinsic(prefer_literal=True)
def block_tile(
    _context: Any,
    rows: Any,
    vectors: Any,
    width: Any,
    stored: Any,
    kind_out: Any,
    has_scales: Any,
    _steps: Any,
    _x: Any,
    _x_step: Any,
    _weight: Any,
    _bias: Any,
    _target: Any,
    _target_step: Any,
    _scales: Any,
    _run: Any,
    _scale_step: Any,
) -> Any:
    """target[row, j] = x[row] · weight[:, j] + bias[j], for ``vectors`` × LANES outputs of a block of ``width``.

    stored: of the weight, kind_out: of bias and target; indices into KINDS, or for stored PAIRS. x: float32, or with
    PAIRS bfloat16. steps: inputs, or pairs of them. The other steps are bytes from row to row. bias: 0 for none.
    has_scales: 1 for weights of 8 bits, also widened ones. scales: theirs, float32, ``scale_step`` bytes from those of
    one run of inputs to the next one's; without scales these three are 0.
    """
    num_rows, num, wide = sized(rows), sized(vectors), sized(width)
    is_paired, name = sized(stored) == PAIRS, KINDS[sized(kind_out)]
    kind_of_line = "float32" if is_paired else KINDS[sized(stored)]
    item, line_bytes = item_bytes(name), LANES * item_bytes(kind_of_line)
    is_scaled = bool(sized(has_scales))

    def generate(v: Vectors, arguments: list[Any]) -> None:
        steps, x, x_step, weight, bias, target, target_step, scales, run_steps, scale_step = arguments[6:]
        b = v.b
        from_x = [b.add(x, b.mul(x_step, v.i64_of(row))) for row in range(num_rows)]
        cells = [(row, part) for row in range(num_rows) for part in range(num)]

        def add(step: Any, sums: dict[Cell, Any]) -> None:
            """Add one input's products, or a pair's: a word of x for each row, a line of the weight for each vector."""
            place = b.add(weight, b.mul(step, v.i64_of(line_bytes // LANES * wide)))
            word = b.mul(step, v.i64_of(4))
            v.prefetch(v.shifted(place, AHEAD), num * line_bytes)
            lines = [v.load(v.shifted(place, line_bytes * part), LANES, kind_of_line) for part in range(num)]
            for row in range(num_rows):
                by = v.splat(v.load_float(b.add(from_x[row], word)), LANES)
                for part in range(num):
                    total = b.load(sums[row, part])
                    multiply = v.fma_of_pairs if is_paired else v.fma
                    b.store(multiply(lines[part], by, total), sums[row, part])

        def join(run: Any, cell: Cell, found: Any, total: Any) -> Any:
            if not is_scaled:
                return b.fadd(total, found)
            place = b.add(scales, b.mul(run, scale_step))
            return v.fma(found, v.load(v.shifted(place, 4 * LANES * cell[1]), LANES), total)

        totals = _summed(v, steps, run_steps if is_scaled else v.i64_of(SUMMED), cells, add, join)
        places = [b.add(target, b.mul(target_step, v.i64_of(row))) for row in range(num_rows)]
        with b.if_else(b.icmp_signed("!=", bias, v.i64_of(0))) as (then, otherwise):
            with then:
                for row, part in cells:
                    more = v.load(v.shifted(bias, item * LANES * part), LANES, name)
                    v.store(b.fadd(totals[row, part], more), v.shifted(places[row], item * LANES * part), name)
            with otherwise:
                for row, part in cells:
                    v.store(totals[row, part], v.shifted(places[row], item * LANES * part), name)

    return VOID(rows, vectors, width, stored, kind_out, has_scales, *[INT] * 10), without_result(generate)


@intrinsic(prefer_literal=True)
def widen_line(_context: Any, kind: Any, _x: Any, _target: Any) -> Any:
    """LANES numbers in ``kind`` become float32."""
    name = KINDS[sized(kind)]

    def generate(v: Vectors, arguments: list[Any]) -> None:
        _, x, target = arguments
        v.store(v.load(x, LANES, name), target)

    return VOID(kind, INT, INT), without_result(generate)
