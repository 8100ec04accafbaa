"""Numba intrinsics over addresses: tokens of the recurrences over states (see states/ops.py), for state_kernels.py.

``size``, ``kind`` (of numbers in memory, an index into KINDS) and the switches are constants of a kernel. Everything is
computed in float32 and rounded once, when it is stored.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic as numba_intrinsic

from ....attention.numba_paged.kinds import KINDS, LANES, item_bytes
from ....attention.numba_paged.operations import peek, sized, without_result
from ....attention.numba_paged.vectors import Vectors, spans
from .rows import parts, sigmoid
from .state_arguments import TABLE

intrinsic: Any = numba_intrinsic  # a kernel calls them without the context that their definitions begin with

VOID, INT, FLOAT = types.void, types.int64, types.float32

CHANNELS = 32
"""Channels of a convolution whose last inputs stay in registers."""

ROWS = 4
"""Rows of a state of Mamba 2 that are summed up together."""

SCRATCH_ALIGNMENT = 64

LINEAR_SOFTPLUS = np.float32(20.0)
"""From here on softplus(x) is x, as in torch."""


@intrinsic
def peek_int32(_context: Any, _address: Any) -> Any:
    """The int32 at an address, as int64."""
    return INT(INT), lambda context, b, signature, arguments: Vectors(b).load_int(arguments[0])


@njit(inline="always")
def entry(a, array, index):  # type: ignore
    """An entry of one of the arrays in the TABLE of a kernel's arguments."""
    return peek_int32(peek(peek(a + 8 * TABLE) + 8 * array) + 4 * index)


@njit(inline="always")
def begin(a, array, row):  # type: ignore
    """Where a row's tokens or segments begin: where those of the row before end."""
    return entry(a, array, row - 1) if row else np.int64(0)


@njit(inline="always")
def softplus(x):  # type: ignore
    return x if x > LINEAR_SOFTPLUS else np.float32(math.log1p(math.exp(x)))


@intrinsic(prefer_literal=True)
def peek_number(_context: Any, kind: Any, _address: Any) -> Any:
    """The number at an address, as float32."""
    name = KINDS[sized(kind)]

    def lower(_context: Any, b: Any, _signature: Any, arguments: list[Any]) -> Any:
        v = Vectors(b)
        return v.first(v.load(arguments[1], 1, name))

    return FLOAT(kind, INT), lower


@intrinsic
def poke_float(_context: Any, _address: Any, _number: Any) -> Any:
    """Write a float32 to an address."""
    return VOID(INT, FLOAT), without_result(lambda v, arguments: v.store_float(arguments[1], arguments[0]))


@intrinsic(prefer_literal=True)
def scratch(_context: Any, size: Any) -> Any:
    """The address of so many bytes of the stack, the kernel's own."""
    length = sized(size)

    def lower(_context: Any, b: Any, _signature: Any, _arguments: list[Any]) -> Any:
        place = cgutils.alloca_once(b, ir.ArrayType(ir.IntType(8), length))
        place.align = SCRATCH_ALIGNMENT
        return b.ptrtoint(place, ir.IntType(64))

    return INT(size), lower


def _rounded(v: Vectors, x: Any, kind: str) -> Any:
    """To the nearest number of a kind, still as float32."""
    if kind == "bfloat16":
        return v.rounded(x)
    if kind == "float16":
        return v.b.fpext(v.b.fptrunc(x, ir.VectorType(ir.HalfType(), x.type.count)), x.type)
    return x


@intrinsic(prefer_literal=True)
def convolve(
    _context: Any,
    channels: Any,
    taps: Any,
    kind: Any,
    silu: Any,
    has_bias: Any,
    is_gated: Any,
    _weight: Any,
    _weight_step: Any,
    _bias: Any,
    _x: Any,
    _x_step: Any,
    _before: Any,
    _before_step: Any,
    _after: Any,
    _after_step: Any,
    _out: Any,
    _out_step: Any,
    _source: Any,
    _target: Any,
    _tokens: Any,
) -> Any:
    """A causal convolution of so many channels over the tokens of a segment; the states are rows of the same width as
    those of the weight. is_gated: 1 if inputs are multiplied by ``before`` and results by ``after``."""
    width, kernel, name = sized(channels), sized(taps), KINDS[sized(kind)]
    bends, adds, gates = bool(sized(silu)), bool(sized(has_bias)), bool(sized(is_gated))
    item = item_bytes(name)

    def generate(v: Vectors, arguments: list[Any]) -> None:
        weight, row, bias, x, x_step, before, before_step, after, after_step, out, out_step = arguments[6:17]
        source, target, tokens = arguments[17:]

        def line(address: Any, step: Any, number: Any) -> Any:
            return v.b.add(address, v.b.mul(step, number))

        places = [(item * at, size) for at, size in spans(width)]
        weights = {
            (tap, at): v.load(v.shifted(line(weight, row, v.i64_of(tap)), at), size, name)
            for tap in range(kernel)
            for at, size in places
        }
        biases = {at: v.load(v.shifted(bias, at), size, name) if adds else v.constant(0.0, size) for at, size in places}
        window = {
            (tap, at): v.variable(v.load(v.shifted(line(source, row, v.i64_of(tap)), at), size, name))
            for tap in range(kernel - 1)
            for at, size in places
        }
        with v.loop(tokens) as loop:
            for at, size in places:
                now = v.load(v.shifted(line(x, x_step, loop.index), at), size, name)
                if gates:
                    gate = v.load(v.shifted(line(before, before_step, loop.index), at), size, name)
                    now = _rounded(v, v.b.fmul(now, gate), name)
                seen = [*(v.b.load(window[tap, at]) for tap in range(kernel - 1)), now]
                total = biases[at]
                for tap in range(kernel):
                    total = v.fma(seen[tap], weights[tap, at], total)
                for tap in range(kernel - 1):
                    v.b.store(seen[tap + 1], window[tap, at])
                if bends:
                    total = v.b.fmul(total, sigmoid(v, total))
                if gates:
                    gate = v.load(v.shifted(line(after, after_step, loop.index), at), size, name)
                    total = v.b.fmul(total, gate)
                v.store(total, v.shifted(line(out, out_step, loop.index), at), name)
        for (tap, at), place in window.items():
            v.store(v.b.load(place), v.shifted(line(target, row, v.i64_of(tap)), at), name)

    numbers = (INT,) * 14
    return VOID(channels, taps, kind, silu, has_bias, is_gated, *numbers), without_result(generate)


@intrinsic(prefer_literal=True)
def unit_row(_context: Any, size: Any, kind: Any, _x: Any, _eps: Any, _scale: Any, _target: Any) -> Any:
    """target = scale × x / √(|x|² + eps), float32."""
    length, name = sized(size), KINDS[sized(kind)]
    item = item_bytes(name)

    def generate(v: Vectors, arguments: list[Any]) -> None:
        x, eps, scale, target = arguments[2:]
        numbers = [v.load(v.shifted(x, item * at), width, name) for at, width in spans(length)]
        factor = v.b.fdiv(scale, v.root(v.b.fadd(v.dot(numbers, numbers), eps)))
        for (at, width), part in zip(spans(length), numbers):
            v.store(v.b.fmul(part, v.splat(factor, width)), v.shifted(target, 4 * at))

    return VOID(size, kind, INT, FLOAT, FLOAT, INT), without_result(generate)


@intrinsic(prefer_literal=True)
def apply_delta(
    _context: Any,
    keys: Any,
    values: Any,
    kind: Any,
    _source: Any,
    _target: Any,
    _step: Any,
    _q: Any,
    _k: Any,
    _decay: Any,
    _beta: Any,
    _v: Any,
    _out: Any,
) -> Any:
    """A token of the gated delta rule over a state of ``keys`` rows, ``step`` bytes apart, and some of its columns:

    target = decay ∘ source + k (β (v − (decay ∘ source)ᵀ k))ᵀ        out = targetᵀ q

    q, k and decay are float32 [keys]; v and out are ``values`` numbers of ``kind``.
    """
    rows, name = sized(keys), KINDS[sized(kind)]
    places, item = spans(sized(values)), item_bytes(name)

    def generate(v: Vectors, arguments: list[Any]) -> None:
        source, target, step, q, k, decay, beta, value, out = arguments[3:]
        known = [v.variable(v.constant(0.0, width)) for _, width in places]
        with v.loop(v.i64_of(rows)) as loop:
            row, offset = v.b.add(source, v.b.mul(loop.index, step)), v.b.mul(loop.index, v.i64_of(4))
            key = v.b.fmul(v.load_float(v.b.add(k, offset)), v.load_float(v.b.add(decay, offset)))
            for (at, width), total in zip(places, known):
                state = v.load(v.shifted(row, 4 * at), width)
                v.b.store(v.fma(state, v.splat(key, width), v.b.load(total)), total)
        changes = []
        for (at, width), total in zip(places, known):
            wanted = v.b.fsub(v.load(v.shifted(value, item * at), width, name), v.b.load(total))
            changes.append(v.b.fmul(wanted, v.splat(beta, width)))
        found = [v.variable(v.constant(0.0, width)) for _, width in places]
        with v.loop(v.i64_of(rows)) as loop:
            row, offset = v.b.mul(loop.index, step), v.b.mul(loop.index, v.i64_of(4))
            key, query, kept = (v.load_float(v.b.add(each, offset)) for each in (k, q, decay))
            for (at, width), change, total in zip(places, changes, found):
                state = v.load(v.shifted(v.b.add(source, row), 4 * at), width)
                state = v.fma(change, v.splat(key, width), v.b.fmul(state, v.splat(kept, width)))
                v.store(state, v.shifted(v.b.add(target, row), 4 * at))
                v.b.store(v.fma(state, v.splat(query, width), v.b.load(total)), total)
        for (at, _), total in zip(places, found):
            v.store(v.b.load(total), v.shifted(out, item * at), name)

    return VOID(keys, values, kind, INT, INT, INT, INT, INT, INT, FLOAT, INT, INT), without_result(generate)


@intrinsic(prefer_literal=True)
def apply_scan(
    _context: Any,
    rows: Any,
    size: Any,
    kind: Any,
    _source: Any,
    _target: Any,
    _x: Any,
    _b: Any,
    _c: Any,
    _decay: Any,
    _delta: Any,
    _skip: Any,
    _out: Any,
) -> Any:
    """A token of Mamba 2 over ``rows`` rows of a state, ``size`` numbers each:

    target = decay × source + delta × x bᵀ        out = target c + skip × x

    b and c are float32 [size]; x and out are ``rows`` numbers of ``kind``.
    """
    number, length, name = sized(rows), sized(size), KINDS[sized(kind)]
    item, places = item_bytes(name), spans(length)

    def generate(v: Vectors, arguments: list[Any]) -> None:
        source, target, x, key, query, decay, delta, skip, out = arguments[3:]

        def some(first: Any, count: int) -> None:
            """Rows from ``first`` on."""
            inputs = v.load(v.b.add(x, v.b.mul(first, v.i64_of(item))), count, name)
            scaled = v.b.fmul(inputs, v.splat(delta, count))
            totals: list[list[Any]] = []
            for lane in range(count):
                added = v.b.extract_element(scaled, ir.Constant(v.i32, lane))
                row = v.b.mul(v.b.add(first, v.i64_of(lane)), v.i64_of(4 * length))
                by_width: dict[int, Any] = {}
                for at, width in places:
                    state = v.load(v.shifted(v.b.add(source, row), 4 * at), width)
                    keys, queries = (v.load(v.shifted(each, 4 * at), width) for each in (key, query))
                    state = v.fma(keys, v.splat(added, width), v.b.fmul(state, v.splat(decay, width)))
                    v.store(state, v.shifted(v.b.add(target, row), 4 * at))
                    before = by_width.get(width)
                    by_width[width] = v.b.fmul(state, queries) if before is None else v.fma(state, queries, before)
                totals.append(list(by_width.values()))
            if length % LANES == 0:
                found = v.together([total[0] for total in totals], v.b.fadd)
            else:
                found = ir.Constant(v.vector(count), ir.Undefined)
                for lane, total in enumerate(totals):
                    summed, *rest = [v.sum_of(part) for part in total]
                    for part in rest:
                        summed = v.b.fadd(summed, part)
                    found = v.b.insert_element(found, summed, ir.Constant(v.i32, lane))
            found = v.fma(inputs, v.splat(skip, count), found)
            v.store(found, v.b.add(out, v.b.mul(first, v.i64_of(item))), name)

        if number >= ROWS:
            with v.loop(v.i64_of(number // ROWS)) as loop:
                some(v.b.mul(loop.index, v.i64_of(ROWS)), ROWS)
        for row in range(number - number % ROWS, number):
            some(v.i64_of(row), 1)

    return VOID(rows, size, kind, INT, INT, INT, INT, INT, FLOAT, FLOAT, FLOAT, INT), without_result(generate)


@intrinsic(prefer_literal=True)
def gated_norm_row(
    _context: Any, size: Any, kind: Any, norms_first: Any, _y: Any, _z: Any, _weight: Any, _eps: Any, _target: Any
) -> Any:
    """target = y / rms(y) × weight × silu(z), or with the gate inside: the norm of y × silu(z)."""
    length, name, gates_last = sized(size), KINDS[sized(kind)], bool(sized(norms_first))

    def generate(v: Vectors, arguments: list[Any]) -> None:
        y, z, weight, eps, target = arguments[3:]

        def gate(offset: Any, width: int) -> Any:
            numbers = v.load(v.b.add(z, offset), width, name)
            return v.b.fmul(numbers, sigmoid(v, numbers))

        def inner(offset: Any, width: int) -> Any:
            numbers = v.load(v.b.add(y, offset), width, name)
            return numbers if gates_last else v.b.fmul(numbers, gate(offset, width))

        squares, rest = v.variable(v.constant(0.0)), v.variable(v.first(v.constant(0.0)))

        def measure(offset: Any, width: int) -> None:
            numbers = inner(offset, width)
            if width == LANES:
                v.b.store(v.fma(numbers, numbers, v.b.load(squares)), squares)
            else:
                v.b.store(v.b.fadd(v.b.load(rest), v.sum_of(v.b.fmul(numbers, numbers))), rest)

        def scale(offset: Any, width: int) -> None:
            numbers = v.b.fmul(inner(offset, width), v.splat(factor, width))
            numbers = v.b.fmul(numbers, v.load(v.b.add(weight, offset), width, name))
            if gates_last:
                numbers = v.b.fmul(numbers, gate(offset, width))
            v.store(numbers, v.b.add(target, offset), name)

        parts(v, length, item_bytes(name), measure)
        total = v.b.fadd(v.sum_of(v.b.load(squares)), v.b.load(rest))
        one, count = (v.first(v.constant(float(number), 1)) for number in (1, length))
        factor = v.b.fdiv(one, v.root(v.b.fadd(v.b.fdiv(total, count), eps)))
        parts(v, length, item_bytes(name), scale)

    return VOID(size, kind, norms_first, INT, INT, INT, FLOAT, INT), without_result(generate)


@intrinsic(prefer_literal=True)
def multiply_gate(_context: Any, size: Any, kind: Any, silu: Any, _y: Any, _z: Any, _target: Any) -> Any:
    """target = y × silu(z), or y × σ(z)"""
    length, name, bends = sized(size), KINDS[sized(kind)], bool(sized(silu))

    def generate(v: Vectors, arguments: list[Any]) -> None:
        y, z, target = arguments[3:]

        def gated(offset: Any, width: int) -> None:
            one, other = (v.load(v.b.add(address, offset), width, name) for address in (y, z))
            share = sigmoid(v, other)
            share = v.b.fmul(other, share) if bends else share
            v.store(v.b.fmul(one, share), v.b.add(target, offset), name)

        parts(v, length, item_bytes(name), gated)

    return VOID(size, kind, silu, INT, INT, INT), without_result(generate)
