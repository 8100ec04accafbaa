"""Vector arithmetic as LLVM instructions, for the kernels of kernel.py.

Numba turns loops into vector instructions where it can prove that it may; what attention needs it does not find. Here
it is said in so many words. A builder is llvmlite's `IRBuilder`; all that is returned are values of LLVM. Vectors of 16
floats are one register with AVX-512, and become two or four where registers are shorter.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from llvmlite.binding import llvm_version_info
from numba.core import cgutils

from ...memory_pool.kv_rows import scale_offset
from .kinds import FLOAT8, LANES, LINE, LOG2_E, QUANTIZED
from .target import has

HAS_PAIRS = has("avx512_bf16")
"""True if the processor multiplies pairs of bfloat16."""

LLVM_HAS_BFLOAT = llvm_version_info[0] >= 16
"""Before that its instructions took such numbers as integers."""

EXP_COEFFICIENTS = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
"""Coefficients of exp(x) on [−ln 2 / 2, ln 2 / 2]: the polynomial of Cephes' expf (Moshier 1989), right to 2e-7."""

EXP2_COEFFICIENTS = (1.3276471782e-3, 9.6755413327e-3, 5.5507132741e-2, 2.4022119724e-1, 6.9314696706e-1)
"""Coefficients of (2^x − 1) / x on [−½, ½], by least squares weighted for the smallest maximum error of 2^x: 2e-7."""

TANH_COEFFICIENTS = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
"""Coefficients of (tanh(x) − x) / x³ in x², up to |x| = SMALL_TANH: those of Cephes' tanhf (Moshier 1989)."""

SMALL_TANH = 0.625

LN2_PARTS = (-0.693359375, 2.12194440e-4)
"""−ln 2 as a sum, the first of few bits: x − n·ln 2 is then exact enough."""

LOWEST_EXP = -87.0
"""Below it the exponential is 0 for our purposes, and no normal float32."""

LOWEST_EXP2 = -126.0
"""The same bound for 2^x."""


def spans(length: int) -> list[tuple[int, int]]:
    """(begin, width) of the vectors that cover so many numbers, each as wide as it can be."""
    found, at = [], 0
    while at < length:
        width = LANES
        while width > length - at:
            width //= 2
        found.append((at, width))
        at += width
    return found


class _BFloat(ir.Type):
    """LLVM's bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


class Vectors:
    """Instructions, added at the end of one builder's block. kind: of numbers in memory, see `load`."""

    def __init__(self, builder: Any) -> None:
        self.b = builder
        self.f32, self.i32, self.i64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)

    # -- memory: addresses are 64-bit integers --------------------------------------------------------------------

    def i64_of(self, number: int) -> Any:
        return ir.Constant(self.i64, number)

    def shifted(self, address: Any, offset: int) -> Any:
        return self.b.add(address, self.i64_of(offset)) if offset else address

    def element(self, address: Any, index: Any, size: int) -> Any:
        """The address of an item of an array."""
        return self.b.add(address, self.b.mul(index, self.i64_of(size)))

    def load_int(self, address: Any) -> Any:
        """An int32, as 64 bits."""
        return self.b.sext(self.b.load(self.b.inttoptr(address, self.i32.as_pointer())), self.i64)

    def load_float(self, address: Any) -> Any:
        return self.b.load(self.b.inttoptr(address, self.f32.as_pointer()))

    def store_float(self, value: Any, address: Any) -> None:
        self.b.store(value, self.b.inttoptr(address, self.f32.as_pointer()))

    def load(self, address: Any, width: int, kind: str = "float32") -> Any:
        """kind: float32, bfloat16 or float16 in memory, or one of QUANTIZED, without the scale; float32 it becomes."""
        b = self.b
        if kind in QUANTIZED:
            return self._load_bytes(address, width, kind)
        if kind == "float32":
            return b.load(b.inttoptr(address, self.vector(width).as_pointer()), align=4)
        if kind == "float16":
            halves = ir.VectorType(ir.HalfType(), width)
            return b.fpext(b.load(b.inttoptr(address, halves.as_pointer()), align=2), self.vector(width))
        bits, words = ir.VectorType(ir.IntType(16), width), ir.VectorType(self.i32, width)
        loaded = b.zext(b.load(b.inttoptr(address, bits.as_pointer()), align=2), words)
        return b.bitcast(b.shl(loaded, ir.Constant(words, [16] * width)), self.vector(width))

    def _load_bytes(self, address: Any, width: int, kind: str) -> Any:
        """8-bit floats become halves, which processors widen in one instruction. Those of e4m3 are then 1/256 of what
        they should be, subnormal ones too: `load_scale` makes up for it."""
        b, words = self.b, ir.VectorType(ir.IntType(16), width)
        found = b.load(b.inttoptr(address, ir.VectorType(ir.IntType(8), width).as_pointer()), align=1)
        if kind == "int8":
            return b.sitofp(b.sext(found, ir.VectorType(self.i32, width)), self.vector(width))

        def word(number: int) -> Any:
            return ir.Constant(words, [number] * width)

        if kind == "float8_e4m3fn":  # the sign twice, then the other bits; the second one must be 0
            bits = b.and_(b.shl(b.sext(found, words), word(7)), word(0xBFFF))
        else:
            bits = b.shl(b.zext(found, words), word(8))
        return b.fpext(b.bitcast(bits, ir.VectorType(ir.HalfType(), width)), self.vector(width))

    def load_scale(self, row: Any, size: int, kind: str) -> Any:
        """The scale of a quantized row, a float: the factor of the numbers that `load` gives. row: the address of its
        first number; size: the count of its numbers."""
        scale = self.load_float(self.shifted(row, scale_offset(size)))
        return self.b.fmul(scale, ir.Constant(self.f32, 256.0)) if kind == "float8_e4m3fn" else scale

    def store_bytes(self, value: Any, address: Any, kind: str) -> None:
        """value: a vector of float32 within the range of ``kind``, one of QUANTIZED, rounded to the nearest number."""
        b, width = self.b, value.type.count
        words = ir.VectorType(self.i32, width)
        if kind == "int8":
            found = b.fptosi(self._intrinsic("rint", value), words)
        else:
            found = self._float8(value, *FLOAT8[kind])
        small = b.trunc(found, ir.VectorType(ir.IntType(8), width))
        b.store(small, b.inttoptr(address, small.type.as_pointer()), align=1)

    def _float8(self, x: Any, mantissa: int, bias: int) -> Any:
        """Words with x as 8-bit floats in their lowest bytes, rounded to even."""
        b, words = self.b, ir.VectorType(self.i32, x.type.count)
        shift, size = 23 - mantissa, self.absolute(x)

        def word(number: int) -> Any:
            return ir.Constant(words, [number] * words.count)

        bits = b.bitcast(size, words)
        odd = b.and_(b.lshr(bits, word(shift)), word(1))
        rounded = b.lshr(b.add(bits, b.add(odd, word((1 << (shift - 1)) - 1))), word(shift))
        normal = b.sub(rounded, word((127 - bias) << mantissa))
        steps = b.fmul(size, self.constant(2.0 ** (bias - 1 + mantissa), words.count))
        subnormal = b.fptosi(self._intrinsic("rint", steps), words)
        is_small = b.fcmp_ordered("<", size, self.constant(2.0 ** (1 - bias), words.count))
        sign = b.and_(b.lshr(b.bitcast(x, words), word(24)), word(0x80))
        return b.or_(b.select(is_small, subnormal, normal), sign)

    def store(self, value: Any, address: Any, kind: str = "float32") -> None:
        """kind: what the vector of float32 becomes in memory, rounded to the nearest number."""
        b, width = self.b, value.type.count
        if kind == "float16":
            value = b.fptrunc(value, ir.VectorType(ir.HalfType(), width))
        elif kind == "bfloat16":
            value = self._to_bfloat16(value)
        b.store(value, b.inttoptr(address, value.type.as_pointer()), align=4 if kind == "float32" else 2)

    def rounded(self, x: Any) -> Any:
        """To the nearest bfloat16, still as float32."""
        words = self._rounded_words(x)
        return self.b.bitcast(self.b.and_(words, ir.Constant(words.type, [-65536] * words.type.count)), x.type)

    def _to_bfloat16(self, x: Any) -> Any:
        words = self._rounded_words(x)
        upper = self.b.lshr(words, ir.Constant(words.type, [16] * words.type.count))
        return self.b.trunc(upper, ir.VectorType(ir.IntType(16), words.type.count))

    def _rounded_words(self, x: Any) -> Any:
        """Words with x in bfloat16 in their upper halves, rounded to even; NaN stays NaN."""
        b, width = self.b, x.type.count
        words = ir.VectorType(self.i32, width)

        def word(number: int) -> Any:
            return ir.Constant(words, [number] * width)

        bits = b.bitcast(x, words)
        odd = b.and_(b.lshr(bits, word(16)), word(1))
        rounded = b.add(bits, b.add(odd, word(0x7FFF)))
        return b.select(b.fcmp_unordered("uno", x, x), b.or_(bits, word(1 << 22)), rounded)

    def prefetch(self, address: Any, size: int) -> None:
        """Prefetch ``size`` bytes, without waiting."""
        byte = ir.IntType(8).as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [byte, self.i32, self.i32, self.i32])
        fetch = cgutils.get_or_insert_function(self.b.module, kind, "llvm.prefetch.p0i8")
        read, everywhere, data = (ir.Constant(self.i32, number) for number in (0, 3, 1))
        for offset in range(0, size, LINE):
            self.b.call(fetch, [self.b.inttoptr(self.shifted(address, offset), byte), read, everywhere, data])

    # -- vectors ------------------------------------------------------------------------------------------------------

    def vector(self, width: int) -> Any:
        return ir.VectorType(self.f32, width)

    def constant(self, number: float, width: int = LANES) -> Any:
        return ir.Constant(self.vector(width), [number] * width)

    def splat(self, number: Any, width: int) -> Any:
        """A float in every lane."""
        nothing = ir.Constant(self.vector(width), ir.Undefined)
        one = self.b.insert_element(nothing, number, ir.Constant(self.i32, 0))
        return self.b.shuffle_vector(one, nothing, ir.Constant(ir.VectorType(self.i32, width), [0] * width))

    def vector_of(self, numbers: list[Any]) -> Any:
        """These floats, side by side."""
        found = ir.Constant(self.vector(len(numbers)), ir.Undefined)
        for lane, number in enumerate(numbers):
            found = self.b.insert_element(found, number, ir.Constant(self.i32, lane))
        return found

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        """x · y + z"""
        return self._intrinsic("fma", x, y, z)

    def fma_of_pairs(self, x: Any, y: Any, z: Any) -> Any:
        """x₀ · y₀ + x₁ · y₁ + z, lane by lane: the lanes of x and y are words of two bfloat16, the lower one first."""
        b, words = self.b, ir.VectorType(self.i32, LANES)
        if HAS_PAIRS:
            pair = ir.VectorType(_BFloat(), 2 * LANES) if LLVM_HAS_BFLOAT else words
            kind = ir.FunctionType(z.type, [z.type, pair, pair])
            multiply = cgutils.get_or_insert_function(b.module, kind, "llvm.x86.avx512bf16.dpbf16ps.512")
            return b.call(multiply, [z, b.bitcast(x, pair), b.bitcast(y, pair)])
        low, high = ir.Constant(words, [16] * LANES), ir.Constant(words, [-65536] * LANES)
        for side in (lambda word: b.shl(word, low), lambda word: b.and_(word, high)):
            z = self.fma(b.bitcast(side(b.bitcast(x, words)), z.type), b.bitcast(side(b.bitcast(y, words)), z.type), z)
        return z

    def paired(self, low: Any, high: Any) -> Any:
        """Words of two bfloat16, as `fma_of_pairs` takes them, from two vectors of bfloat16 values."""
        b, words = self.b, ir.VectorType(self.i32, low.type.count)
        shift = ir.Constant(words, [16] * words.count)
        return b.bitcast(b.or_(b.lshr(b.bitcast(low, words), shift), b.bitcast(high, words)), low.type)

    def store_pairs(self, low: Any, high: Any, address: Any) -> None:
        """Two vectors of LANES numbers as bfloat16, one behind the other. Needs HAS_PAIRS."""
        b = self.b
        kind = ir.VectorType(_BFloat() if LLVM_HAS_BFLOAT else ir.IntType(16), 2 * LANES)
        function = ir.FunctionType(kind, [low.type, low.type])
        convert = cgutils.get_or_insert_function(b.module, function, "llvm.x86.avx512bf16.cvtne2ps2bf16.512")
        words = b.bitcast(b.call(convert, [high, low]), ir.VectorType(self.i32, LANES))
        b.store(words, b.inttoptr(address, words.type.as_pointer()), align=2)

    def larger(self, x: Any, y: Any) -> Any:
        """The larger number, lane by lane; y where one of them is NaN."""
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def dot(self, x: list[Any], y: list[Any]) -> Any:
        """The dot product of two rows in parts, as `spans` cuts them: a float."""
        sums: dict[int, Any] = {}
        for left, right in zip(x, y):
            width = left.type.count
            sums[width] = self.fma(left, right, sums[width]) if width in sums else self.b.fmul(left, right)
        total, *others = [self.sum_of(part) for part in sums.values()]
        for other in others:
            total = self.b.fadd(total, other)
        return total

    def first(self, x: Any) -> Any:
        return self.b.extract_element(x, ir.Constant(self.i32, 0))

    def sum_of(self, x: Any) -> Any:
        """The sum of all lanes."""
        return self.reduced(x, self.b.fadd)

    def max_of(self, x: Any) -> Any:
        return self.reduced(x, self.larger)

    def lane(self, x: Any, lane: int) -> Any:
        """One of its numbers in every lane of a vector."""
        nothing = ir.Constant(x.type, ir.Undefined)
        return self.b.shuffle_vector(x, nothing, ir.Constant(ir.VectorType(self.i32, LANES), [lane] * LANES))

    def together(self, rows: list[Any], join: Any) -> Any:
        """Each of up to four vectors of LANES numbers reduced to one number: a vector of those."""
        if len(rows) < 4:
            return self.vector_of([self.reduced(x, join) for x in rows])
        parts, width = rows, LANES  # of each row so many numbers are left, side by side
        while len(parts) > 1 or width > 1:
            joined, half = [], width // 2
            for pair in zip(parts[::2], parts[1::2]) if len(parts) > 1 else [(parts[0], parts[0])]:
                lanes = pair[0].type.count * (2 if len(parts) > 1 else 1)
                low = [lane for lane in range(lanes) if lane % width < half]
                mask = ir.VectorType(self.i32, len(low))
                both = [self.b.shuffle_vector(*pair, ir.Constant(mask, [at + by for at in low])) for by in (0, half)]
                joined.append(join(*both))
            parts, width = joined, half
        return parts[0]

    def exp(self, x: Any) -> Any:
        """e^x, for numbers not much above 0. NaN stays NaN."""
        b, width = self.b, x.type.count
        lowest = self.constant(LOWEST_EXP, width)
        x = b.select(b.fcmp_unordered(">", x, lowest), x, lowest)
        twos = self._intrinsic("rint", b.fmul(x, self.constant(LOG2_E, width)))
        for part in LN2_PARTS:
            x = self.fma(twos, self.constant(part, width), x)
        found = self.constant(EXP_COEFFICIENTS[0], width)
        for coefficient in EXP_COEFFICIENTS[1:]:
            found = self.fma(found, x, self.constant(coefficient, width))
        found = b.fadd(self.fma(found, b.fmul(x, x), x), self.constant(1.0, width))
        return b.fmul(found, self._power_of_two(twos))

    def exp2(self, x: Any) -> Any:
        """2^x, for numbers not much above 0. NaN stays NaN. Takes two thirds of the time of `exp`."""
        b, width = self.b, x.type.count
        lowest = self.constant(LOWEST_EXP2, width)
        x = b.select(b.fcmp_unordered(">", x, lowest), x, lowest)
        twos = self._intrinsic("rint", x)
        x = b.fsub(x, twos)
        found = self.constant(EXP2_COEFFICIENTS[0], width)
        for coefficient in (*EXP2_COEFFICIENTS[1:], 1.0):
            found = self.fma(found, x, self.constant(coefficient, width))
        return b.fmul(found, self._power_of_two(twos))

    def tanh(self, x: Any) -> Any:
        """The hyperbolic tangent, right to 2e-7 of itself. NaN stays NaN."""
        b, width = self.b, x.type.count
        size, square, one = self.absolute(x), b.fmul(x, x), self.constant(1.0, width)
        near = self.constant(TANH_COEFFICIENTS[0], width)
        for coefficient in TANH_COEFFICIENTS[1:]:
            near = self.fma(near, square, self.constant(coefficient, width))
        near = self.fma(b.fmul(near, square), x, x)
        shrunk = self.exp2(b.fmul(size, self.constant(-2 * LOG2_E, width)))
        far = self._intrinsic("copysign", b.fdiv(b.fsub(one, shrunk), b.fadd(one, shrunk)), x)
        return b.select(b.fcmp_ordered("<", size, self.constant(SMALL_TANH, width)), near, far)

    def _power_of_two(self, exponent: Any) -> Any:
        """exponent: whole numbers, as floats."""
        words = ir.VectorType(self.i32, exponent.type.count)
        bits = self.b.add(self.b.fptosi(exponent, words), ir.Constant(words, [127] * words.count))
        return self.b.bitcast(self.b.shl(bits, ir.Constant(words, [23] * words.count)), exponent.type)

    def ceiling(self, x: Any) -> Any:
        """The whole numbers above."""
        return self._intrinsic("ceil", x)

    def nearest(self, x: Any) -> Any:
        """The nearest whole numbers, of two the even one."""
        return self._intrinsic("rint", x)

    def absolute(self, x: Any) -> Any:
        return self._intrinsic("fabs", x)

    def root(self, number: Any) -> Any:
        """The square root of a float."""
        return self.first(self._intrinsic("sqrt", self.splat(number, 1)))

    def transposed(self, rows: list[Any]) -> list[Any]:
        """LANES vectors of LANES numbers: rows become columns, by exchanging ever smaller blocks."""
        lanes, step = ir.VectorType(self.i32, LANES), LANES // 2
        rows = list(rows)
        while step:
            for upper in (row for row in range(LANES) if not row & step):
                # In a pair of rows, the upper's right blocks change places with the lower's left ones.
                left = [lane if not lane & step else LANES + lane - step for lane in range(LANES)]
                right = [lane + step if not lane & step else LANES + lane for lane in range(LANES)]
                pair = rows[upper], rows[upper + step]
                rows[upper] = self.b.shuffle_vector(*pair, ir.Constant(lanes, left))
                rows[upper + step] = self.b.shuffle_vector(*pair, ir.Constant(lanes, right))
            step //= 2
        return rows

    def loop(self, count: Any) -> Any:
        """A context; ``.index`` of what it gives counts from 0."""
        return cgutils.for_range(self.b, count)

    def variable(self, value: Any) -> Any:
        """A place that loops may change; LLVM keeps it in a register."""
        place = cgutils.alloca_once(self.b, value.type)
        self.b.store(value, place)
        return place

    def reduced(self, x: Any, join: Any) -> Any:
        """All lanes joined into one number."""
        width = x.type.count
        while width > 1:
            half = ir.VectorType(self.i32, width // 2)
            nothing = ir.Constant(x.type, ir.Undefined)
            low = self.b.shuffle_vector(x, nothing, ir.Constant(half, list(range(width // 2))))
            high = self.b.shuffle_vector(x, nothing, ir.Constant(half, list(range(width // 2, width))))
            x, width = join(low, high), width // 2
        return self.first(x)

    def _intrinsic(self, name: str, *arguments: Any) -> Any:
        kind = arguments[0].type
        function = ir.FunctionType(kind, [argument.type for argument in arguments])
        full = f"llvm.{name}.v{kind.count}f32"
        return self.b.call(cgutils.get_or_insert_function(self.b.module, function, full), arguments)
