"""Operations of kernel.py on whole blocks of keys, for many rows that see the same ones: prompts.

Keys and values are brought together first, once for all rows; scores and sums are then products of matrices, at the
speed of those, and nothing is computed of rows one by one.
"""

from __future__ import annotations

from typing import Any

from .operations import BLOCK, FLOAT, INT, KINDS, ROWS_AT_ONCE, VOID, add_rows, intrinsic, sized, without_result
from .vectors import LANES, Vectors, spans


@intrinsic(prefer_literal=True)
def turn(_context: Any, head_dim: Any, kind: Any, _keys: Any, _slots: Any, _step: Any, _target: Any) -> Any:
    """target[d, j] = keys[slots[j]][d], for a whole block of keys: float32 [head_dim, BLOCK]. head_dim is a multiple of
    LANES."""
    size, name = sized(head_dim), KINDS[sized(kind)]
    item = 4 if name == "float32" else 2

    def generate(v: Vectors, arguments: list[Any]) -> None:
        keys, slots, step, target = arguments[2:]
        with v.loop(v.i64_of(BLOCK // LANES)) as loop:
            first = v.element(slots, loop.index, 4 * LANES)
            column = v.element(target, loop.index, 4 * LANES)
            places = [v.b.add(keys, v.b.mul(v.load_int(v.shifted(first, 4 * key)), step)) for key in range(LANES)]
            for at in range(0, size, LANES):
                rows = [v.load(v.shifted(place, item * at), LANES, name) for place in places]
                for row, turned in enumerate(v.transposed(rows)):
                    v.store(turned, v.shifted(column, 4 * BLOCK * (at + row)))

    return VOID(head_dim, kind, INT, INT, INT, INT), without_result(generate)


@intrinsic(prefer_literal=True)
def gather(
    _context: Any,
    head_dim: Any,
    kind: Any,
    _keys: Any,
    _values: Any,
    _slots: Any,
    _ahead: Any,
    _step: Any,
    _target: Any,
) -> Any:
    """target[j] = values[slots[j]], for a whole block of keys: float32 [BLOCK, head_dim], side by side, so that they
    stay in a core's first cache while many rows pass. Prefetches keys and values of the slots ahead."""
    size, name = sized(head_dim), KINDS[sized(kind)]
    item = 4 if name == "float32" else 2

    def generate(v: Vectors, arguments: list[Any]) -> None:
        keys, values, slots, ahead, step, target = arguments[2:]
        with v.loop(v.i64_of(BLOCK)) as loop:
            place = v.b.add(values, v.b.mul(v.load_int(v.element(slots, loop.index, 4)), step))
            row = v.element(target, loop.index, 4 * size)
            for at, width in spans(size):
                v.store(v.load(v.shifted(place, item * at), width, name), v.shifted(row, 4 * at))
            later = v.b.mul(v.load_int(v.element(ahead, loop.index, 4)), step)
            v.prefetch(v.b.add(keys, later), size * item)
            v.prefetch(v.b.add(values, later), size * item)

    return VOID(head_dim, kind, INT, INT, INT, INT, INT, INT), without_result(generate)


@intrinsic(prefer_literal=True)
def score_block(
    _context: Any, head_dim: Any, rows: Any, tokens: Any, _queries: Any, _query_step: Any, _turned: Any, _scores: Any
) -> Any:
    """scores[row, j] = queries[row] · key j, for a whole block of keys as `turn` leaves them: a product of matrices
    whose sums stay in registers. Rows are those of so many tokens, ``query_step`` bytes apart."""
    size, number, count = sized(head_dim), sized(rows), sized(tokens)

    def generate(v: Vectors, arguments: list[Any]) -> None:
        queries, query_step, turned, scores = arguments[3:]
        begins = [v.b.add(queries, v.b.mul(query_step, v.i64_of(token))) for token in range(count)]
        places = [v.shifted(begin, 4 * size * row) for begin in begins for row in range(number)]
        columns = range(0, BLOCK, LANES)
        for first in range(0, len(places), ROWS_AT_ONCE):
            some = range(first, min(len(places), first + ROWS_AT_ONCE))
            sums = {(row, at): v.variable(v.constant(0.0)) for row in some for at in columns}
            with v.loop(v.i64_of(size)) as loop:
                keys = {
                    at: v.load(v.shifted(v.element(turned, loop.index, 4 * BLOCK), 4 * at), LANES) for at in columns
                }
                for row in some:
                    query = v.splat(v.load_float(v.element(places[row], loop.index, 4)), LANES)
                    for at in columns:
                        v.b.store(v.fma(query, keys[at], v.b.load(sums[row, at])), sums[row, at])
            for (row, at), place in sums.items():
                v.store(v.b.load(place), v.shifted(scores, 4 * (BLOCK * row + at)))

    return VOID(head_dim, rows, tokens, INT, INT, INT, INT), without_result(generate)


@intrinsic(prefer_literal=True)
def weigh_block(_context: Any, rows: Any, _scores: Any, _scale: Any, _largest: Any, _totals: Any, _factors: Any) -> Any:
    """`weigh` for a whole block of keys, four rows at a time."""
    number = sized(rows)

    def generate(v: Vectors, arguments: list[Any]) -> None:
        scores, scale, largest, totals, factors = arguments[1:]
        for first in range(0, number, 4):
            count = min(4, number - first)
            scales = v.splat(scale, LANES), v.splat(scale, count)
            rows = [v.shifted(scores, 4 * BLOCK * (first + row)) for row in range(count)]
            parts = [[v.load(v.shifted(row, 4 * at), LANES) for at in range(0, BLOCK, LANES)] for row in rows]
            tops = v.together([v.larger(v.larger(a, b), v.larger(c, d)) for a, b, c, d in parts], v.larger)
            place, total = v.shifted(largest, 4 * first), v.shifted(totals, 4 * first)
            before = v.load(place, count)
            found = v.larger(v.b.fmul(tops, scales[1]), before)
            v.store(found, place)
            factor = v.exp2(v.b.fsub(before, found))
            v.store(factor, v.shifted(factors, 4 * first))
            sums, less = [], v.negated(found)
            for row, begin in enumerate(rows):
                top = v.lane(less, row)
                a, b, c, d = (v.exp2(v.fma(part, scales[0], top)) for part in parts[row])
                for place_of, weights in enumerate((a, b, c, d)):
                    v.store(weights, v.shifted(begin, 4 * LANES * place_of))
                sums.append(v.b.fadd(v.b.fadd(a, b), v.b.fadd(c, d)))
            v.store(v.fma(v.load(total, count), factor, v.together(sums, v.b.fadd)), total)

    return VOID(rows, INT, FLOAT, INT, INT, INT), without_result(generate)


@intrinsic(prefer_literal=True)
def add_block(_context: Any, head_dim: Any, rows: Any, _sums: Any, _factors: Any, _weights: Any, _values: Any) -> Any:
    """`add_values` for a whole block of values as `gather` leaves them."""
    size = sized(head_dim)

    def generate(v: Vectors, arguments: list[Any]) -> None:
        def value_at(index: Any) -> Any:
            return v.element(arguments[5], index, 4 * size)

        add_rows(v, size, sized(rows), "float32", arguments[2:5], v.i64_of(BLOCK), value_at)

    return VOID(head_dim, rows, INT, INT, INT, INT), without_result(generate)
