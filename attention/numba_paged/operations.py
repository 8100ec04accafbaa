"""The building blocks of the kernel: operations on a few rows at once, as Numba intrinsics.

All take addresses and counts. ``head_dim`` (of keys), ``value_dim``, ``rows`` (queries over one KV head) and ``kind``
(of numbers in the pool: an index into KINDS) are constants of a kernel: loops over them are unrolled.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic as numba_intrinsic

from .kinds import BLOCK, KINDS, LANES, LOG2_E, QUANTIZED, ROWS_AT_ONCE, item_bytes, kept_bytes
from .vectors import Vectors, spans

NUMBERS_AT_ONCE = 128
"""So many numbers of each of ROWS_AT_ONCE rows; wider values are added in parts."""

intrinsic: Any = numba_intrinsic  # a kernel calls them without the context that their definitions begin with

VOID, INT, FLOAT = types.void, types.int64, types.float32


def sized(kind: types.Type) -> int:
    """The value of a constant."""
    if not isinstance(kind, types.IntegerLiteral):
        raise TypeError(f"{kind} is no constant")
    return int(kind.literal_value)


def without_result(generate: Callable[[Vectors, list[Any]], None]) -> Any:
    def lower(context: Any, builder: Any, _signature: Any, arguments: list[Any]) -> Any:
        generate(Vectors(builder), arguments)
        return context.get_dummy_value()

    return lower


@intrinsic
def peek(_context: Any, _address: Any) -> Any:
    """The int64 at an address."""
    return INT(INT), lambda context, b, signature, arguments: b.load(
        b.inttoptr(arguments[0], Vectors(b).i64.as_pointer())
    )


@intrinsic
def peek_float(_context: Any, _address: Any) -> Any:
    """The float32 at an address."""
    return FLOAT(INT), lambda context, b, signature, arguments: Vectors(b).load_float(arguments[0])


@intrinsic
def fetch_add(_context: Any, _address: Any, _number: Any) -> Any:
    """Add to an int64 shared by threads, and return the old value. All earlier writes are visible to every thread that
    adds to it later."""

    def lower(_context: Any, b: Any, _signature: Any, arguments: list[Any]) -> Any:
        return b.atomic_rmw("add", b.inttoptr(arguments[0], Vectors(b).i64.as_pointer()), arguments[1], "seq_cst")

    return INT(INT, INT), lower


@intrinsic
def call_at(_context: Any, _address: Any) -> Any:
    """Call a ``void f()``."""

    def generate(v: Vectors, arguments: list[Any]) -> None:
        v.b.call(v.b.inttoptr(arguments[0], ir.FunctionType(ir.VoidType(), []).as_pointer()), [])

    return VOID(INT), without_result(generate)


@intrinsic
def call_with(_context: Any, _address: Any, _argument: Any) -> Any:
    """Call a ``void f(int64)``."""

    def generate(v: Vectors, arguments: list[Any]) -> None:
        kind = ir.FunctionType(ir.VoidType(), [v.i64])
        v.b.call(v.b.inttoptr(arguments[0], kind.as_pointer()), [arguments[1]])

    return VOID(INT, INT), without_result(generate)


@intrinsic(prefer_literal=True)
def copy_row(_context: Any, size: Any, source_kind: Any, target_kind: Any, _source: Any, _target: Any) -> Any:
    """target = source, ``size`` numbers, rounded to the kind of the target."""
    length, *names = sized(size), KINDS[sized(source_kind)], KINDS[sized(target_kind)]
    from_item, to_item = map(item_bytes, names)

    def generate(v: Vectors, arguments: list[Any]) -> None:
        source, target = arguments[3:]

        def copied(at: Any, width: int) -> None:
            numbers = v.load(v.element(source, at, from_item), width, names[0])
            v.store(numbers, v.element(target, at, to_item), names[1])

        with v.loop(v.i64_of(length // LANES)) as loop:
            copied(v.b.mul(loop.index, v.i64_of(LANES)), LANES)
        whole = length // LANES * LANES
        for at, width in spans(length - whole):
            copied(v.i64_of(whole + at), width)

    return VOID(size, source_kind, target_kind, INT, INT), without_result(generate)


@intrinsic
def fill(_context: Any, _address: Any, _count: Any, _number: Any) -> Any:
    """Set so many floats to a number."""

    def generate(v: Vectors, arguments: list[Any]) -> None:
        address, count, number = arguments
        with v.loop(count) as loop:
            v.store_float(number, v.element(address, loop.index, 4))

    return VOID(INT, INT, FLOAT), without_result(generate)


@intrinsic(prefer_literal=True)
def score(
    _context: Any,
    head_dim: Any,
    key_dim: Any,
    value_dim: Any,
    rows: Any,
    kind: Any,
    fetches: Any,
    _queries: Any,
    _keys: Any,
    _values: Any,
    _slots: Any,
    _ahead: Any,
    _count: Any,
    _step: Any,
    _value_step: Any,
    _scores: Any,
) -> Any:
    """scores[row, j] = queries[row] · keys[slots[j]], for j below count, in rows of BLOCK floats; the last vector is
    padded with −∞. slots, ahead: int32. steps: bytes from slot to slot, of keys and of values. fetches: 1 to prefetch
    the values of these slots and the keys of those ahead, which hides most of what scattered slots cost. key_dim: all
    numbers of a key, of which the first head_dim are multiplied. A quantized key's scale is applied to its scores."""
    size, number, name = sized(head_dim), sized(rows), KINDS[sized(kind)]
    key_size, item = sized(key_dim), item_bytes(name)
    value_bytes = kept_bytes(sized(value_dim), name) if sized(value_dim) else 0
    fetched = kept_bytes(size, name) if size == key_size else size * item

    def generate(v: Vectors, arguments: list[Any]) -> None:
        queries, keys, values, slots, ahead, count, step, value_step, scores = arguments[6:]
        held = [
            [v.load(v.shifted(queries, 4 * (row * size + at)), width) for at, width in spans(size)]
            for row in range(number)
        ]
        last_vector = v.b.udiv(v.b.sub(count, v.i64_of(1)), v.i64_of(LANES))
        for row in range(number):
            place = v.element(v.shifted(scores, 4 * BLOCK * row), last_vector, 4 * LANES)
            v.store(v.constant(float("-inf")), place)
        with v.loop(count) as loop:
            slot = v.load_int(v.element(slots, loop.index, 4))
            key = v.b.add(keys, v.b.mul(slot, step))
            if sized(fetches):
                v.prefetch(v.b.add(values, v.b.mul(slot, value_step)), value_bytes)
                v.prefetch(v.b.add(keys, v.b.mul(v.load_int(v.element(ahead, loop.index, 4)), step)), fetched)
            parts = [v.load(v.shifted(key, item * at), width, name) for at, width in spans(size)]
            scale = v.load_scale(key, key_size, name) if name in QUANTIZED else None
            for row in range(number):
                product = v.dot(held[row], parts)
                found = product if scale is None else v.b.fmul(product, scale)
                v.store_float(found, v.element(v.shifted(scores, 4 * BLOCK * row), loop.index, 4))

    signature = VOID(head_dim, key_dim, value_dim, rows, kind, fetches, INT, INT, INT, INT, INT, INT, INT, INT, INT)
    return signature, without_result(generate)


@intrinsic(prefer_literal=True)
def soften(_context: Any, rows: Any, capped: Any, _scores: Any, _count: Any, _inner: Any) -> Any:
    """scores[row] becomes tanh(inner × score), in all vectors that hold ``count`` scores; −∞ stays, as it is padding.
    With inner = scale / cap, cap × that is the soft cap of Gemma 2 (Riviere et al. 2024). capped: 0 does nothing."""
    number = sized(rows) if sized(capped) else 0

    def generate(v: Vectors, arguments: list[Any]) -> None:
        scores, count, inner = arguments[2:]
        if not number:
            return
        vectors = v.b.udiv(v.b.add(count, v.i64_of(LANES - 1)), v.i64_of(LANES))
        inners, padding = v.splat(inner, LANES), v.constant(float("-inf"))
        for row in range(number):
            with v.loop(vectors) as loop:
                place = v.element(v.shifted(scores, 4 * BLOCK * row), loop.index, 4 * LANES)
                found = v.load(place, LANES)
                bent = v.tanh(v.b.fmul(found, inners))
                v.store(v.b.select(v.b.fcmp_ordered("==", found, padding), padding, bent), place)

    return VOID(rows, capped, INT, INT, FLOAT), without_result(generate)


@intrinsic(prefer_literal=True)
def weigh(
    _context: Any,
    rows: Any,
    rounds: Any,
    _scores: Any,
    _count: Any,
    _scale: Any,
    _largest: Any,
    _totals: Any,
    _factors: Any,
) -> Any:
    """scores[row] becomes 2^(scale × score − the largest so far); that, and the sum of all, are brought up to date.
    factors[row]: by what to multiply what was summed with the largest one before. rounds: 1 to round weights to
    bfloat16.

    The largest is kept as the whole number above it. So what was summed before is multiplied by a power of two, which
    rounds nothing, and a weight is rounded in the same way whatever came before it: how keys are cut does not matter.
    """
    number = sized(rows)

    def generate(v: Vectors, arguments: list[Any]) -> None:
        scores, count, scale, largest, totals, factors = arguments[2:]
        vectors = v.b.udiv(v.b.add(count, v.i64_of(LANES - 1)), v.i64_of(LANES))
        scales = v.splat(scale, LANES)
        for row in range(number):
            first = v.shifted(scores, 4 * BLOCK * row)
            before = v.load_float(v.shifted(largest, 4 * row))
            top = v.variable(v.splat(before, LANES))
            with v.loop(vectors) as loop:
                place = v.element(first, loop.index, 4 * LANES)
                scaled = v.b.fmul(v.load(place, LANES), scales)
                v.store(scaled, place)
                v.b.store(v.larger(scaled, v.b.load(top)), top)
            found = v.first(v.ceiling(v.splat(v.max_of(v.b.load(top)), LANES)))
            tops, total = v.splat(found, LANES), v.variable(v.constant(0.0))
            with v.loop(vectors) as loop:
                place = v.element(first, loop.index, 4 * LANES)
                weights = v.exp2(v.b.fsub(v.load(place, LANES), tops))
                v.store(v.rounded(weights) if sized(rounds) else weights, place)
                v.b.store(v.b.fadd(v.b.load(total), weights), total)
            factor = v.first(v.exp2(v.splat(v.b.fsub(before, found), LANES)))
            v.store_float(found, v.shifted(largest, 4 * row))
            v.store_float(factor, v.shifted(factors, 4 * row))
            old = v.load_float(v.shifted(totals, 4 * row))
            v.store_float(v.b.fadd(v.b.fmul(old, factor), v.sum_of(v.b.load(total))), v.shifted(totals, 4 * row))

    return VOID(rows, rounds, INT, INT, FLOAT, INT, INT, INT), without_result(generate)


def add_rows(
    v: Vectors, size: int, number: int, kind: str, addresses: list[Any], count: Any, value_at: Any, fma: Any
) -> None:
    """sums[row] = sums[row] × factors[row] + Σ weights[row, j] × value j. addresses: of sums, factors and weights.
    value_at: the address of value j. fma: multiplies a vector of it by a weight and adds that. A weight is multiplied
    by the value's scale first, if it has one."""
    sums, factors, weights = addresses
    item = item_bytes(kind)
    for begin, column in product(range(0, number, ROWS_AT_ONCE), range(0, size, NUMBERS_AT_ONCE)):
        width_of_part = min(NUMBERS_AT_ONCE, size - column)
        columns = [(column + at, width) for at, width in spans(width_of_part)]
        held = {}
        for row in range(begin, min(number, begin + ROWS_AT_ONCE)):
            factor = v.load_float(v.shifted(factors, 4 * row))
            for at, width in columns:
                place = v.shifted(sums, 4 * (row * size + at))
                held[row, at, width] = v.variable(v.b.fmul(v.load(place, width), v.splat(factor, width)))
        with v.loop(count) as loop:
            value = value_at(loop.index)
            parts = {at: v.load(v.shifted(value, item * at), width, kind) for at, width in columns}
            scale = v.load_scale(value, size, kind) if kind in QUANTIZED else None
            for (row, at, width), place in held.items():
                weight = v.load_float(v.element(v.shifted(weights, 4 * BLOCK * row), loop.index, 4))
                if scale is not None:
                    weight = v.b.fmul(weight, scale)
                v.b.store(fma(v.splat(weight, width), parts[at], v.b.load(place)), place)
        for (row, at, _), place in held.items():
            v.store(v.b.load(place), v.shifted(sums, 4 * (row * size + at)))


@intrinsic(prefer_literal=True)
def add_values(
    _context: Any,
    value_dim: Any,
    rows: Any,
    kind: Any,
    _sums: Any,
    _factors: Any,
    _weights: Any,
    _values: Any,
    _slots: Any,
    _count: Any,
    _step: Any,
) -> Any:
    """sums[row] = sums[row] × factors[row] + Σ weights[row, j] × values[slots[j]]"""
    name = KINDS[sized(kind)]

    def generate(v: Vectors, arguments: list[Any]) -> None:
        values, slots, count, step = arguments[6:]

        def value_at(index: Any) -> Any:
            return v.b.add(values, v.b.mul(v.load_int(v.element(slots, index, 4)), step))

        add_rows(v, sized(value_dim), sized(rows), name, arguments[3:6], count, value_at, v.fma)

    return VOID(value_dim, rows, kind, INT, INT, INT, INT, INT, INT, INT), without_result(generate)


@intrinsic(prefer_literal=True)
def join(
    _context: Any,
    value_dim: Any,
    rows: Any,
    _sums: Any,
    _largest: Any,
    _totals: Any,
    _other_sums: Any,
    _other_largest: Any,
    _other_totals: Any,
) -> Any:
    """Add what another piece has found over other keys, by the largest score of both."""
    size, number = sized(value_dim), sized(rows)

    def generate(v: Vectors, arguments: list[Any]) -> None:
        sums, largest, totals, other_sums, other_largest, other_totals = arguments[2:]
        for row in range(number):
            mine, theirs = (v.load_float(v.shifted(each, 4 * row)) for each in (largest, other_largest))
            top = v.b.select(v.b.fcmp_ordered(">", mine, theirs), mine, theirs)
            here, there = (v.first(v.exp2(v.splat(v.b.fsub(each, top), LANES))) for each in (mine, theirs))
            old, new = (v.load_float(v.shifted(each, 4 * row)) for each in (totals, other_totals))
            v.store_float(v.b.fadd(v.b.fmul(old, here), v.b.fmul(new, there)), v.shifted(totals, 4 * row))
            v.store_float(top, v.shifted(largest, 4 * row))
            for at, width in spans(size):
                place, other = (v.shifted(each, 4 * (row * size + at)) for each in (sums, other_sums))
                added = v.b.fmul(v.load(other, width), v.splat(there, width))
                v.store(v.fma(v.load(place, width), v.splat(here, width), added), place)

    return VOID(value_dim, rows, INT, INT, INT, INT, INT, INT), without_result(generate)


@intrinsic(prefer_literal=True)
def add_sinks(
    _context: Any, value_dim: Any, rows: Any, has_sinks: Any, _sums: Any, _largest: Any, _totals: Any, _sinks: Any
) -> Any:
    """Give sinks[row], a score in natural units, its share of totals[row]: it has a weight and no value. Sums and
    totals are left by the larger of it and the largest score. has_sinks: 0 does nothing."""
    size, number = sized(value_dim), sized(rows) if sized(has_sinks) else 0

    def generate(v: Vectors, arguments: list[Any]) -> None:
        sums, largest, totals, sinks = arguments[3:]
        for row in range(number):
            offset = 4 * row
            sink = v.b.fmul(v.load_float(v.shifted(sinks, offset)), ir.Constant(v.f32, LOG2_E))
            before, total = (v.load_float(v.shifted(each, offset)) for each in (largest, totals))
            top = v.b.select(v.b.fcmp_ordered(">", sink, before), sink, before)
            factor, weight = (v.first(v.exp2(v.splat(v.b.fsub(each, top), LANES))) for each in (before, sink))
            v.store_float(v.b.fadd(v.b.fmul(total, factor), weight), v.shifted(totals, offset))
            for at, width in spans(size):
                place = v.shifted(sums, 4 * (row * size + at))
                v.store(v.b.fmul(v.load(place, width), v.splat(factor, width)), place)

    return VOID(value_dim, rows, has_sinks, INT, INT, INT, INT), without_result(generate)


@intrinsic(prefer_literal=True)
def finish(_context: Any, value_dim: Any, rows: Any, _sums: Any, _totals: Any, _target: Any) -> Any:
    """target[row] = sums[row] / totals[row]"""
    size, number = sized(value_dim), sized(rows)

    def generate(v: Vectors, arguments: list[Any]) -> None:
        sums, totals, target = arguments[2:]
        for row in range(number):
            total = v.load_float(v.shifted(totals, 4 * row))
            for at, width in spans(size):
                offset = 4 * (row * size + at)
                share = v.b.fdiv(v.load(v.shifted(sums, offset), width), v.splat(total, width))
                v.store(share, v.shifted(target, offset))

    return VOID(value_dim, rows, INT, INT, INT), without_result(generate)
