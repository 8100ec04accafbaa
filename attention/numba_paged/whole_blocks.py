"""Operations of kernel.py on whole blocks of keys, for many rows that see the same ones: prompts.

Keys and values are brought together first, once for all rows; quantized ones are multiplied by their scales there.
Scores and sums are then products of matrices, at the speed of those, and nothing is computed of rows one by one.

Where a processor multiplies pairs of bfloat16, and the pool holds such numbers, all this is done in pairs (``pairs`` is
1): queries and weights are rounded to bfloat16, as kernels on GPUs do it, and sums are float32.
"""

from __future__ import annotations

from typing import Any

from .kinds import BLOCK, KINDS, LANES, QUANTIZED, ROWS_AT_ONCE, item_bytes, kept_bytes
from .operations import FLOAT, INT, VOID, add_rows, intrinsic, sized, without_result
from .vectors import HAS_PAIRS, Vectors, spans


def in_pairs(kind: str, head_dim: int, value_dim: int) -> bool:
    """True if blocks of such keys and values are computed in pairs."""
    return HAS_PAIRS and kind == "bfloat16" and head_dim % (2 * LANES) == 0 and value_dim % LANES == 0


@intrinsic(prefer_literal=True)
def pack(_context: Any, head_dim: Any, rows: Any, pairs: Any, _queries: Any, _target: Any) -> Any:
    """In pairs: so many queries side by side, from float32 to bfloat16."""
    length = sized(head_dim) * sized(rows) if sized(pairs) else 0

    def generate(v: Vectors, arguments: list[Any]) -> None:
        queries, target = arguments[3:]
        for at in range(0, length, 2 * LANES):
            low, high = (v.load(v.shifted(queries, 4 * (at + more)), LANES) for more in (0, LANES))
            v.store_pairs(low, high, v.shifted(target, 2 * at))

    return VOID(head_dim, rows, pairs, INT, INT), without_result(generate)


@intrinsic(prefer_literal=True)
def turn(_context: Any, head_dim: Any, kind: Any, pairs: Any, _keys: Any, _slots: Any, _step: Any, _target: Any) -> Any:
    """target[d, j] = keys[slots[j]][d], for a whole block of keys: float32 [head_dim, BLOCK]. head_dim is a multiple of
    LANES. In pairs: words of keys[slots[j]][2d] and the next, [head_dim / 2, BLOCK]."""
    size, name = sized(head_dim), KINDS[sized(kind)]
    whole = size
    if sized(pairs):
        size, name = size // 2, "float32"  # a word is turned as a number is
    item = item_bytes(name)

    def generate(v: Vectors, arguments: list[Any]) -> None:
        keys, slots, step, target = arguments[3:]
        with v.loop(v.i64_of(BLOCK // LANES)) as loop:
            first = v.element(slots, loop.index, 4 * LANES)
            column = v.element(target, loop.index, 4 * LANES)
            places = [v.b.add(keys, v.b.mul(v.load_int(v.shifted(first, 4 * key)), step)) for key in range(LANES)]
            scales = v.vector_of([v.load_scale(place, whole, name) for place in places]) if name in QUANTIZED else None
            for at in range(0, size, LANES):
                rows = [v.load(v.shifted(place, item * at), LANES, name) for place in places]
                for row, turned in enumerate(v.transposed(rows)):
                    scaled = turned if scales is None else v.b.fmul(turned, scales)
                    v.store(scaled, v.shifted(column, 4 * BLOCK * (at + row)))

    return VOID(head_dim, kind, pairs, INT, INT, INT, INT), without_result(generate)


@intrinsic(prefer_literal=True)
def gather(
    _context: Any,
    head_dim: Any,
    value_dim: Any,
    kind: Any,
    pairs: Any,
    _keys: Any,
    _values: Any,
    _slots: Any,
    _ahead: Any,
    _step: Any,
    _value_step: Any,
    _target: Any,
) -> Any:
    """target[j] = values[slots[j]], for a whole block of keys: float32 [BLOCK, value_dim], side by side, so that they
    stay in a core's first cache while many rows pass. In pairs: words of the values of slots 2j and 2j + 1,
    [BLOCK / 2, value_dim]. Prefetches keys and values of the slots ahead."""
    size, name, together = sized(value_dim), KINDS[sized(kind)], 1 + sized(pairs)
    item, of_key, of_value = item_bytes(name), kept_bytes(sized(head_dim), name), kept_bytes(size, name)

    def generate(v: Vectors, arguments: list[Any]) -> None:
        keys, values, slots, ahead, step, value_step, target = arguments[4:]

        def value_at(slot: Any) -> Any:
            return v.b.add(values, v.b.mul(v.load_int(slot), value_step))

        with v.loop(v.i64_of(BLOCK // together)) as loop:
            own, later = (v.element(address, loop.index, 4 * together) for address in (slots, ahead))
            places = [value_at(v.shifted(own, 4 * number)) for number in range(together)]
            row = v.element(target, loop.index, 4 * size)
            scale = v.load_scale(places[0], size, name) if name in QUANTIZED else None
            for at, width in spans(size):
                found = [v.load(v.shifted(place, item * at), width, name) for place in places]
                if scale is not None:
                    found = [v.b.fmul(found[0], v.splat(scale, width))]
                v.store(v.paired(*found) if together == 2 else found[0], v.shifted(row, 4 * at))
            for number in range(together):
                slot = v.shifted(later, 4 * number)
                v.prefetch(v.b.add(keys, v.b.mul(v.load_int(slot), step)), of_key)
                v.prefetch(value_at(slot), of_value)

    return VOID(head_dim, value_dim, kind, pairs, INT, INT, INT, INT, INT, INT, INT), without_result(generate)


@intrinsic(prefer_literal=True)
def score_block(
    _context: Any,
    head_dim: Any,
    rows: Any,
    tokens: Any,
    pairs: Any,
    _queries: Any,
    _query_step: Any,
    _turned: Any,
    _scores: Any,
) -> Any:
    """scores[row, j] = queries[row] · key j, for a whole block of keys as `turn` leaves them: a matrix product
    with its sums in registers. Rows are those of so many tokens, ``query_step`` bytes apart: float32, or as `pack`
    leaves them."""
    number, count = sized(rows), sized(tokens)
    words = sized(head_dim) // (1 + sized(pairs))

    def generate(v: Vectors, arguments: list[Any]) -> None:
        queries, query_step, turned, scores = arguments[4:]
        multiply = v.fma_of_pairs if sized(pairs) else v.fma
        begins = [v.b.add(queries, v.b.mul(query_step, v.i64_of(token))) for token in range(count)]
        places = [v.shifted(begin, 4 * words * row) for begin in begins for row in range(number)]
        columns = range(0, BLOCK, LANES)
        for first in range(0, len(places), ROWS_AT_ONCE):
            some = range(first, min(len(places), first + ROWS_AT_ONCE))
            sums = {(row, at): v.variable(v.constant(0.0)) for row in some for at in columns}
            with v.loop(v.i64_of(words)) as loop:
                line = v.element(turned, loop.index, 4 * BLOCK)
                keys = {at: v.load(v.shifted(line, 4 * at), LANES) for at in columns}
                for row in some:
                    query = v.splat(v.load_float(v.element(places[row], loop.index, 4)), LANES)
                    for at in columns:
                        v.b.store(multiply(keys[at], query, v.b.load(sums[row, at])), sums[row, at])
            for (row, at), place in sums.items():
                v.store(v.b.load(place), v.shifted(scores, 4 * (BLOCK * row + at)))

    return VOID(head_dim, rows, tokens, pairs, INT, INT, INT, INT), without_result(generate)


@intrinsic(prefer_literal=True)
def weigh_block(
    _context: Any, rows: Any, pairs: Any, _scores: Any, _scale: Any, _largest: Any, _totals: Any, _factors: Any
) -> Any:
    """`weigh` for a whole block of keys, four rows at a time. In pairs: the weights are left as bfloat16, at the
    beginning of each row."""
    number = sized(rows)

    def generate(v: Vectors, arguments: list[Any]) -> None:
        scores, scale, largest, totals, factors = arguments[2:]
        for first in range(0, number, 4):
            count = min(4, number - first)
            scales = v.splat(scale, LANES), v.splat(scale, count)
            rows = [v.shifted(scores, 4 * BLOCK * (first + row)) for row in range(count)]
            parts = [[v.load(v.shifted(row, 4 * at), LANES) for at in range(0, BLOCK, LANES)] for row in rows]
            tops = v.together([v.larger(v.larger(a, b), v.larger(c, d)) for a, b, c, d in parts], v.larger)
            place, total = v.shifted(largest, 4 * first), v.shifted(totals, 4 * first)
            before = v.load(place, count)
            found = v.larger(v.ceiling(v.b.fmul(tops, scales[1])), before)
            v.store(found, place)
            factor = v.exp2(v.b.fsub(before, found))
            v.store(factor, v.shifted(factors, 4 * first))
            sums = []
            for row, begin in enumerate(rows):
                top = v.lane(found, row)
                a, b, c, d = weights = [v.exp2(v.b.fsub(v.b.fmul(part, scales[0]), top)) for part in parts[row]]
                if sized(pairs):
                    v.store_pairs(a, b, begin)
                    v.store_pairs(c, d, v.shifted(begin, 4 * LANES))
                else:
                    for at, weight in enumerate(weights):
                        v.store(weight, v.shifted(begin, 4 * LANES * at))
                sums.append(v.b.fadd(v.b.fadd(a, b), v.b.fadd(c, d)))
            v.store(v.fma(v.load(total, count), factor, v.together(sums, v.b.fadd)), total)

    return VOID(rows, pairs, INT, FLOAT, INT, INT, INT), without_result(generate)


@intrinsic(prefer_literal=True)
def add_block(
    _context: Any, value_dim: Any, rows: Any, pairs: Any, _sums: Any, _factors: Any, _weights: Any, _values: Any
) -> Any:
    """`add_values` for a whole block of values as `gather` leaves them, and weights as `weigh_block` does."""
    size = sized(value_dim)

    def generate(v: Vectors, arguments: list[Any]) -> None:
        def value_at(index: Any) -> Any:
            return v.element(arguments[6], index, 4 * size)

        multiply = v.fma_of_pairs if sized(pairs) else v.fma
        count = v.i64_of(BLOCK // (1 + sized(pairs)))
        add_rows(v, size, sized(rows), "float32", arguments[3:6], count, value_at, multiply)

    return VOID(value_dim, rows, pairs, INT, INT, INT, INT), without_result(generate)
