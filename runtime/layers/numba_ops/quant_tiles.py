"""The arithmetic of products with weights in few bits, as Numba intrinsics over addresses.

Inputs are rounded to 8 bits, ``SPAN`` at a time with a scale of their own, as llama.cpp does; so products are sums of
integers, which are exact, and the scales are applied once for a span. Sums therefore do not depend on how many rows are
computed together.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic as numba_intrinsic

from ....attention.numba_paged.kinds import KINDS, LANES
from ....attention.numba_paged.operations import sized, without_result
from ....attention.numba_paged.vectors import Vectors
from .quant_layout import DOT, DOT_LANES, MXFP4_DOUBLED, MXFP4_OFFSET, SIDE, WIDTH, stores_signed

intrinsic: Any = numba_intrinsic  # a kernel calls them without the context that their definitions begin with

VOID, INT = types.void, types.int64

AHEAD = 4096
"""Bytes between what is multiplied and what is fetched."""
LARGEST = 127.0
"""Of a rounded input."""
LEAST = 2.0**-100
"""Spans of smaller numbers are taken for zeros: the inverse of their scale might be infinite."""
MOST = 3.0e38


class _Bytes:
    """Types and constants of vectors of integers."""

    def __init__(self, v: Vectors) -> None:
        self.v, self.b = v, v.b
        self.i8, self.i16, self.i32 = ir.IntType(8), ir.IntType(16), v.i32
        self.words = ir.VectorType(v.i32, DOT_LANES)
        self.halves = ir.VectorType(self.i16, 2 * DOT_LANES)
        self.bytes = ir.VectorType(self.i8, 4 * DOT_LANES)

    def call(self, name: str, kind: Any, *arguments: Any) -> Any:
        function = ir.FunctionType(kind, [each.type for each in arguments])
        return self.b.call(cgutils.get_or_insert_function(self.b.module, function, name), arguments)

    def splat(self, word: Any) -> Any:
        """An int32 in every lane."""
        nothing = ir.Constant(self.words, ir.Undefined)
        one = self.b.insert_element(nothing, word, ir.Constant(self.i32, 0))
        return self.b.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(self.i32, DOT_LANES), [0] * DOT_LANES))

    def load_word(self, address: Any) -> Any:
        return self.b.load(self.b.inttoptr(address, self.i32.as_pointer()), align=4)

    def load_words(self, address: Any) -> Any:
        return self.b.load(self.b.inttoptr(address, self.words.as_pointer()), align=4)

    def all(self, kind: Any, number: int) -> Any:
        return ir.Constant(kind, [number] * kind.count)

    # -- four products each, added up ---------------------------------------------------------------------------------

    def empty(self, bits: int) -> Any:
        """What sums start from."""
        return self.all(self.halves if DOT == "pairs" and bits == 4 else self.words, 0)

    def add(self, total: Any, weights: Any, x: Any, bits: int) -> Any:
        """total + Σ weights × x. weights: words of four bytes; x: a word of four signed bytes, in every lane."""
        b = self.b
        if DOT == "vnni":
            return self.call(f"llvm.x86.avx512.vpdpbusd.{32 * DOT_LANES}", self.words, total, weights, x)
        if DOT == "sdot":
            as_bytes = [b.bitcast(each, self.bytes) for each in (weights, x)]
            return self.call("llvm.aarch64.neon.sdot.v4i32.v16i8", self.words, total, *as_bytes)
        if DOT == "pairs":
            w, x = (b.bitcast(each, self.bytes) for each in (weights, x))
            if bits == 4:
                return b.add(total, self.call("llvm.x86.avx2.pmadd.ub.sw", self.halves, w, x))
            size = self.call("llvm.abs.v32i8", self.bytes, w, ir.Constant(ir.IntType(1), 0))
            signed = self.call("llvm.x86.avx2.psign.b", self.bytes, x, w)
            return b.add(total, self._joined(self.call("llvm.x86.avx2.pmadd.ub.sw", self.halves, size, signed)))
        for place in range(4):
            left, right = self.all(self.words, 24 - 8 * place), self.all(self.words, 24)
            one, other = (b.ashr(b.shl(each, left), right) for each in (weights, x))
            total = b.add(total, b.mul(one, other))
        return total

    def finished(self, total: Any, bits: int) -> Any:
        """The sums, in 32 bits."""
        return self._joined(total) if DOT == "pairs" and bits == 4 else total

    def _joined(self, halves: Any) -> Any:
        """Pairs of 16 bits, added."""
        return self.call("llvm.x86.avx2.pmadd.wd", self.words, halves, self.all(self.halves, 1))

    def nibbles(self, words: Any, *, is_mxfp4: bool) -> tuple[Any, Any]:
        """The lower and the upper halves of bytes, as bytes."""
        b, mask = self.b, self.all(self.words, 0x0F0F0F0F)
        both = b.and_(words, mask), b.and_(b.lshr(words, self.all(self.words, 4)), mask)
        return (self._from_table(both[0]), self._from_table(both[1])) if is_mxfp4 else both

    def _from_table(self, codes: Any) -> Any:
        """MXFP4's numbers, doubled, and MXFP4_OFFSET more."""
        b = self.b
        if DOT == "pairs" or DOT == "vnni":
            shuffle = {16: "llvm.x86.avx512.pshuf.b.512", 8: "llvm.x86.avx2.pshuf.b"}[DOT_LANES]
            table = ir.Constant(self.bytes, [number + MXFP4_OFFSET for number in MXFP4_DOUBLED] * (DOT_LANES // 4))
            return b.bitcast(self.call(shuffle, self.bytes, table, b.bitcast(codes, self.bytes)), self.words)
        narrow = b.bitcast(codes, self.bytes)
        found = self.all(self.bytes, 0)
        for code, number in enumerate(MXFP4_DOUBLED):
            is_it = b.icmp_unsigned("==", narrow, self.all(self.bytes, code))
            found = b.select(is_it, self.all(self.bytes, number + MXFP4_OFFSET), found)
        return b.bitcast(found, self.words)


@intrinsic(prefer_literal=True)
def quant_tile(
    _context: Any,
    rows: Any,
    vectors: Any,
    bits: Any,
    is_mxfp4: Any,
    span: Any,
    spans_of_scale: Any,
    table_item: Any,
    has_mins: Any,
    kind: Any,
    _spans: Any,
    _x: Any,
    _x_step: Any,
    _sides: Any,
    _side_step: Any,
    _weight: Any,
    _scales: Any,
    _mins: Any,
    _factors: Any,
    _bias: Any,
    _target: Any,
    _target_step: Any,
) -> Any:
    """target[row, j] = factors[j] × Σ over spans of (x's scale × weight's scale × sum of products, less what minima
    take away) + bias[j], for ``vectors`` × DOT_LANES outputs of a block.

    bits … has_mins: the form of the weight (see quant_products.KernelForm). kind: of target, an index into KINDS.
    spans: their number. x: int8; sides: see `quantize_row`. scales, mins: of the block, WIDTH numbers of
    ``table_item`` bytes for every ``spans_of_scale`` spans; spans_of_scale 0: none. factors, bias: float32, bias 0 for
    none.
    """
    num_rows, num, num_bits = sized(rows), sized(vectors), sized(bits)
    per, item, subtracts, length = sized(spans_of_scale), sized(table_item), bool(sized(has_mins)), sized(span)
    is_table, name = bool(sized(is_mxfp4)), KINDS[sized(kind)]
    out_item = 4 if name == "float32" else 2
    table_kind = "float16" if item == 2 else "float32"
    line, lines = 4 * WIDTH, length * num_bits // 32

    def generate(v: Vectors, arguments: list[Any]) -> None:
        spans, x, x_step, sides, side_step, weight, scales, mins, factors, bias, target, target_step = arguments[9:]
        b, n = v.b, _Bytes(v)
        cells = [(row, part) for row in range(num_rows) for part in range(num)]
        from_x = [b.add(x, b.mul(x_step, v.i64_of(row))) for row in range(num_rows)]
        from_sides = [b.add(sides, b.mul(side_step, v.i64_of(row))) for row in range(num_rows)]
        totals = {cell: v.variable(v.constant(0.0, DOT_LANES)) for cell in cells}
        with v.loop(spans) as loop:
            place = b.add(weight, b.mul(loop.index, v.i64_of(lines * line)))
            inputs = b.mul(loop.index, v.i64_of(length))
            side = b.mul(loop.index, v.i64_of(SIDE))
            sums = {cell: n.empty(num_bits) for cell in cells}
            for number in range(lines):
                at = v.shifted(place, number * line)
                v.prefetch(v.shifted(at, AHEAD), num * 4 * DOT_LANES)
                words = [n.load_words(v.shifted(at, 4 * DOT_LANES * part)) for part in range(num)]
                steps: list[list[Any]] = [words]
                if num_bits == 4:
                    low, high = zip(*(n.nibbles(word, is_mxfp4=is_table) for word in words))
                    steps = [list(low), list(high)]
                for half, step in enumerate(steps):
                    offset = b.add(inputs, v.i64_of(4 * (number * len(steps) + half)))
                    for row in range(num_rows):
                        by = n.splat(n.load_word(b.add(from_x[row], offset)))
                        for part in range(num):
                            sums[row, part] = n.add(sums[row, part], step[part], by, num_bits)
            which = b.udiv(loop.index, v.i64_of(per)) if per > 1 else loop.index

            def entries(table: Any) -> list[Any]:
                """What the table has for these inputs, for each output."""
                first = b.add(table, b.mul(which, v.i64_of(WIDTH * item)))
                step = item * DOT_LANES
                return [v.load(v.shifted(first, step * part), DOT_LANES, table_kind) for part in range(num)]

            scale, less = entries(scales) if per else [], entries(mins) if subtracts else []
            for row in range(num_rows):
                own = b.add(from_sides[row], side)
                by, second = v.splat(v.load_float(own), DOT_LANES), v.shifted(own, 4)
                taken = v.splat(b.fneg(v.load_float(second)), DOT_LANES) if subtracts else n.splat(n.load_word(second))
                for part in range(num):
                    found = n.finished(sums[row, part], num_bits)
                    if not subtracts:
                        found = b.add(found, taken)
                    number = b.sitofp(found, v.vector(DOT_LANES))
                    factors_of_sum = (b.fmul(number, by), scale[part]) if per else (number, by)
                    total = v.fma(*factors_of_sum, b.load(totals[row, part]))
                    b.store(v.fma(less[part], taken, total) if subtracts else total, totals[row, part])
        parts = [4 * DOT_LANES * part for part in range(num)]
        factor = [v.load(v.shifted(factors, part), DOT_LANES) for part in parts]
        found = {(row, part): b.fmul(b.load(totals[row, part]), factor[part]) for row, part in cells}
        places = [b.add(target, b.mul(target_step, v.i64_of(row))) for row in range(num_rows)]
        with b.if_else(b.icmp_signed("!=", bias, v.i64_of(0))) as (then, otherwise):
            with then:
                more = [v.load(v.shifted(bias, part), DOT_LANES) for part in parts]
                for row, part in cells:
                    at = v.shifted(places[row], out_item * DOT_LANES * part)
                    v.store(b.fadd(found[row, part], more[part]), at, name)
            with otherwise:
                for row, part in cells:
                    v.store(found[row, part], v.shifted(places[row], out_item * DOT_LANES * part), name)

    constants = rows, vectors, bits, is_mxfp4, span, spans_of_scale, table_item, has_mins, kind
    return VOID(*constants, *[INT] * 12), without_result(generate)


@intrinsic(prefer_literal=True)
def quantize_row(
    _context: Any,
    kind: Any,
    span: Any,
    sums_as_floats: Any,
    _spans: Any,
    _offset: Any,
    _x: Any,
    _target: Any,
    _sides: Any,
) -> Any:
    """A row of inputs to int8, a scale for each span: x ≈ scale × target.

    Beside each span, in sides: the scale, float32, and −offset × Σ target, int32; or, for weights with minima, scale ×
    Σ target as float32. A span with a number that is not finite has such a scale, so that all that comes of it is not
    finite either. kind: of x, an index into KINDS.
    """
    name, length, as_floats = KINDS[sized(kind)], sized(span), bool(sized(sums_as_floats))
    item = 4 if name == "float32" else 2
    num = length // LANES

    def generate(v: Vectors, arguments: list[Any]) -> None:
        spans, offset, x, target, sides = arguments[3:]
        b = v.b
        words, narrow = ir.VectorType(v.i32, LANES), ir.VectorType(ir.IntType(8), LANES)

        def larger(one: Any, other: Any) -> Any:
            return b.select(b.icmp_signed(">", one, other), one, other)

        with v.loop(spans) as loop:
            place = b.add(x, b.mul(loop.index, v.i64_of(length * item)))
            numbers = [v.load(v.shifted(place, LANES * item * part), LANES, name) for part in range(num)]
            # Without its sign, a float compares like an integer, and NaN is above all: it is not lost.
            sizes = [b.and_(b.bitcast(each, words), ir.Constant(words, [0x7FFFFFFF] * LANES)) for each in numbers]
            top = sizes[0]
            for other in sizes[1:]:
                top = larger(top, other)
            top = b.bitcast(v.reduced(top, larger), v.f32)
            is_usual = b.and_(
                b.fcmp_ordered(">", top, ir.Constant(v.f32, LEAST)), b.fcmp_ordered("<", top, ir.Constant(v.f32, MOST))
            )
            factor = v.splat(
                b.fdiv(ir.Constant(v.f32, LARGEST), b.select(is_usual, top, ir.Constant(v.f32, LARGEST))), LANES
            )
            scale = b.fmul(top, ir.Constant(v.f32, 1.0 / LARGEST))
            total = None
            for part, each in enumerate(numbers):
                found = b.fptosi(v.nearest(b.fmul(b.select(is_usual, each, v.constant(0.0)), factor)), words)
                total = found if total is None else b.add(total, found)
                at = v.shifted(b.add(target, b.mul(loop.index, v.i64_of(length))), LANES * part)
                b.store(b.trunc(found, narrow), b.inttoptr(at, narrow.as_pointer()), align=1)
            whole = v.reduced(total, b.add)
            side = b.add(sides, b.mul(loop.index, v.i64_of(SIDE)))
            v.store_float(scale, side)
            if as_floats:
                v.store_float(b.fmul(scale, b.sitofp(whole, v.f32)), v.shifted(side, 4))
            else:
                start = b.mul(whole, b.trunc(b.neg(offset), v.i32))
                b.store(start, b.inttoptr(v.shifted(side, 4), v.i32.as_pointer()))

    return VOID(kind, span, sums_as_floats, *[INT] * 5), without_result(generate)


@intrinsic(prefer_literal=True)
def widen_row(
    _context: Any,
    bits: Any,
    is_mxfp4: Any,
    inputs_of_scale: Any,
    table_item: Any,
    has_mins: Any,
    kind: Any,
    _lines: Any,
    _offset: Any,
    _weight: Any,
    _scales: Any,
    _mins: Any,
    _factor: Any,
    _target: Any,
) -> Any:
    """target = one output's numbers, in ``kind`` (an index into KINDS). weight, scales, mins: addresses of its first
    ones in its block; inputs_of_scale 0: there are none. offset: int64, of the codes; factor: the address of the
    row's."""
    num_bits, is_table, subtracts = sized(bits), bool(sized(is_mxfp4)), bool(sized(has_mins))
    per, item, name = sized(inputs_of_scale), sized(table_item), KINDS[sized(kind)]
    out_item, table_kind = 4 if name == "float32" else 2, "float16" if item == 2 else "float32"
    halves = 2 if num_bits == 4 else 1

    def generate(v: Vectors, arguments: list[Any]) -> None:
        lines, offset, weight, scales, mins, factor, target = arguments[6:]
        b = v.b
        four, words = ir.VectorType(ir.IntType(8), 4), ir.VectorType(v.i32, 4)
        by = v.splat(v.load_float(factor), 4)
        less = v.splat(b.sitofp(offset, v.f32), 4)

        def entry(table: Any, line: Any) -> Any:
            group = b.udiv(b.mul(line, v.i64_of(4 * halves)), v.i64_of(per))
            place = b.add(table, b.mul(group, v.i64_of(WIDTH * item)))
            return v.splat(v.first(v.load(place, 1, table_kind)), 4)

        with v.loop(lines) as loop:
            place = b.add(weight, b.mul(loop.index, v.i64_of(4 * WIDTH)))
            stored = b.load(b.inttoptr(place, four.as_pointer()), align=1)
            codes = b.sext(stored, words) if stores_signed(num_bits) else b.zext(stored, words)
            for half in range(halves):
                part = codes
                if num_bits == 4:
                    shifted = b.lshr(codes, ir.Constant(words, [4 * half] * 4))
                    part = b.and_(shifted, ir.Constant(words, [15] * 4))
                if is_table:
                    found = ir.Constant(words, [0] * 4)
                    for code, number in enumerate(MXFP4_DOUBLED):
                        is_it = b.icmp_unsigned("==", part, ir.Constant(words, [code] * 4))
                        found = b.select(is_it, ir.Constant(words, [number + MXFP4_OFFSET] * 4), found)
                    part = found
                numbers = b.fsub(b.sitofp(part, v.vector(4)), less)
                if per:
                    numbers = b.fmul(numbers, entry(scales, loop.index))
                if subtracts:
                    numbers = b.fsub(numbers, entry(mins, loop.index))
                at = b.mul(b.add(b.mul(loop.index, v.i64_of(halves)), v.i64_of(half)), v.i64_of(4 * out_item))
                v.store(b.fmul(numbers, by), b.add(target, at), name)

    constants = bits, is_mxfp4, inputs_of_scale, table_item, has_mins, kind
    return VOID(*constants, *[INT] * 7), without_result(generate)
