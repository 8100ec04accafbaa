"""Products with weights in few bits: packs them into blocks, and computes with the tiles of quant_tiles.py.

    x ─▶ quantize_row: int8, a scale for each span ─▶ for each block of outputs: tiles ─▶ × rows + bias ─▶ y

Both are calls of the team, so a step with such products can be recorded. A row's result does not depend on its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import Any

import numpy as np
import torch

from ....attention.numba_paged import operations, vectors
from ....attention.numba_paged.compiling import checksum, compiled
from ....attention.numba_paged.operations import KINDS, fetch_add, peek
from ....attention.numba_paged.team import Call, Team
from ..quantize import quantize
from ..quantized_weights import INT4, INT8, QuantForm, QuantizedWeight, concatenated
from . import quant_tiles
from .quant_tiles import (
    DOT_LANES,
    MXFP4_OFFSET,
    SIDE,
    SPAN,
    WIDTH,
    quant_tile,
    quantize_row,
    stores_signed,
    widen_row,
)

(NEXT, COUNT, RUN, ROWS, SPANS, X, X_STEP, SIDES, SIDE_STEP, WEIGHT, BLOCK_BYTES, SCALES, TABLE_BYTES, MINS, FACTORS,
 BIAS, OUT, OUT_STEP) = range(18)  # fmt: skip
"""Places in the kernel's arguments, an array of int64. COUNT: number of blocks. RUN: blocks that a thread takes at a
time."""
ARGUMENTS = 18

(Q_NEXT, Q_ROWS, Q_SPANS, Q_X, Q_X_STEP, Q_OUT, Q_OUT_STEP, Q_SIDES, Q_SIDE_STEP, Q_OFFSET) = range(10)
"""Places in the arguments of the kernel that quantises inputs."""
QUANTIZE_ARGUMENTS = 10

MOST = 12 if DOT_LANES == 16 else 6
"""Rows of a tile of one vector."""
FEW = 4 if DOT_LANES == 16 else 2
"""Rows of a tile of two vectors."""


class NoKernelError(ValueError):
    """There is no kernel for a weight of this form or size."""


@dataclass(frozen=True, slots=True)
class KernelForm:
    """What a kernel is compiled for."""

    bits: int
    is_mxfp4: bool
    span: int
    spans_of_scale: int
    table_item: int
    has_mins: bool

    @classmethod
    def of(cls, form: QuantForm, into: int, *, wide_tables: bool = False) -> KernelForm:
        """Raises NoKernelError."""
        span = 16 if form.group == 16 else SPAN
        if into % span or form.group % span:
            raise NoKernelError(f"there is no kernel for {form} with {into} inputs, no multiple of {span}")
        item = 4 if wide_tables else form.table_dtype.itemsize
        return cls(form.bits, form.codebook == "mxfp4", span, form.group // span, item, form.has_mins)


@cache
def quantize_kernel(kind: str, span: int, *, sums_as_floats: bool) -> Any:
    """A Numba cfunc; every thread of a team calls it."""
    sources, number, as_floats = checksum(operations, vectors, quant_tiles), KINDS.index(kind), int(sums_as_floats)

    def kernel(a: Any) -> None:
        if not sources:
            return
        while True:
            row = fetch_add(a + 8 * Q_NEXT, 1)
            if row >= peek(a + 8 * Q_ROWS):
                return
            x = peek(a + 8 * Q_X) + row * peek(a + 8 * Q_X_STEP)
            out = peek(a + 8 * Q_OUT) + row * peek(a + 8 * Q_OUT_STEP)
            sides = peek(a + 8 * Q_SIDES) + row * peek(a + 8 * Q_SIDE_STEP)
            quantize_row(number, span, as_floats, peek(a + 8 * Q_SPANS), peek(a + 8 * Q_OFFSET), x, out, sides)

    return compiled(kernel)


@cache
def product_kernel(form: KernelForm, kind: str) -> Any:
    """A Numba cfunc; every thread of a team calls it."""
    sources, number = checksum(operations, vectors, quant_tiles), KINDS.index(kind)
    bits, is_mxfp4, span, per = form.bits, int(form.is_mxfp4), form.span, form.spans_of_scale
    item, has_mins = form.table_item, int(form.has_mins)
    out_item = 4 if kind == "float32" else 2
    lanes, parts = DOT_LANES, WIDTH // DOT_LANES
    most, few = MOST, FEW

    def kernel(a: Any) -> None:
        if not sources:
            return
        spans, x_step, side_step = peek(a + 8 * SPANS), peek(a + 8 * X_STEP), peek(a + 8 * SIDE_STEP)
        block = end = 0
        while True:
            if block == end:
                block = fetch_add(a + 8 * NEXT, peek(a + 8 * RUN))
                end = min(block + peek(a + 8 * RUN), peek(a + 8 * COUNT))
                if block >= end:
                    return
            w = peek(a + 8 * WEIGHT) + block * peek(a + 8 * BLOCK_BYTES)
            scales = peek(a + 8 * SCALES) + block * peek(a + 8 * TABLE_BYTES)
            mins = peek(a + 8 * MINS) + block * peek(a + 8 * TABLE_BYTES)
            factors, bias = peek(a + 8 * FACTORS) + 4 * WIDTH * block, peek(a + 8 * BIAS)
            if bias != 0:
                bias += 4 * WIDTH * block
            x, sides, left = peek(a + 8 * X), peek(a + 8 * SIDES), peek(a + 8 * ROWS)
            out, out_step = peek(a + 8 * OUT) + block * WIDTH * out_item, peek(a + 8 * OUT_STEP)
            while left > 0:
                if left >= few:
                    done = most if left >= most else few
                    for part in range(parts):
                        line, entry, at = w + 4 * lanes * part, lanes * item * part, lanes * part
                        more = bias + 4 * at if bias != 0 else 0
                        if left >= most:
                            quant_tile(
                                most, 1, bits, is_mxfp4, span, per, item, has_mins, number,
                                spans, x, x_step, sides, side_step, line, scales + entry, mins + entry,
                                factors + 4 * at, more, out + out_item * at, out_step,
                            )  # fmt: skip
                        else:
                            quant_tile(
                                few, 1, bits, is_mxfp4, span, per, item, has_mins, number,
                                spans, x, x_step, sides, side_step, line, scales + entry, mins + entry,
                                factors + 4 * at, more, out + out_item * at, out_step,
                            )  # fmt: skip
                else:
                    done = 1
                    quant_tile(
                        1, parts, bits, is_mxfp4, span, per, item, has_mins, number,
                        spans, x, x_step, sides, side_step, w, scales, mins,
                        factors, bias, out, out_step,
                    )  # fmt: skip
                x, sides, out, left = x + done * x_step, sides + done * side_step, out + done * out_step, left - done
            block += 1

    return compiled(kernel)


(L_COUNT, L_IDS, L_LINES, L_OFFSET, L_WEIGHT, L_BLOCK_BYTES, L_SCALES, L_TABLE_BYTES, L_MINS, L_FACTORS, L_OUT,
 L_OUT_STEP) = range(1, 13)  # fmt: skip
"""Places in the arguments of the kernel that looks rows up, behind NEXT."""
LOOK_UP_ARGUMENTS = 13


@cache
def look_up_kernel(form: KernelForm, kind: str) -> Any:
    """A Numba cfunc; every thread of a team calls it."""
    sources, number = checksum(operations, vectors, quant_tiles), KINDS.index(kind)
    bits, is_mxfp4, per = form.bits, int(form.is_mxfp4), form.span * form.spans_of_scale
    item, has_mins = form.table_item, int(form.has_mins)

    def kernel(a: Any) -> None:
        if not sources:
            return
        while True:
            row = fetch_add(a + 8 * NEXT, 1)
            if row >= peek(a + 8 * L_COUNT):
                return
            which = peek(peek(a + 8 * L_IDS) + 8 * row)
            block = which // WIDTH
            column = which - block * WIDTH
            weight = peek(a + 8 * L_WEIGHT) + block * peek(a + 8 * L_BLOCK_BYTES) + 4 * column
            tables = block * peek(a + 8 * L_TABLE_BYTES) + item * column
            widen_row(
                bits, is_mxfp4, per, item, has_mins, number,
                peek(a + 8 * L_LINES), peek(a + 8 * L_OFFSET), weight, peek(a + 8 * L_SCALES) + tables,
                peek(a + 8 * L_MINS) + tables, peek(a + 8 * L_FACTORS) + 4 * which,
                peek(a + 8 * L_OUT) + row * peek(a + 8 * L_OUT_STEP),
            )  # fmt: skip

    return compiled(kernel)


@dataclass(slots=True)
class Blocks:
    """A packed weight: plain memory that kernels read."""

    size: tuple[int, int]
    form: KernelForm
    offset: int
    """Times which the inputs' sum is taken off."""
    codes: np.ndarray
    """uint8 [blocks, lines, WIDTH, 4]"""
    scales: np.ndarray | None
    """float16 or float32 [blocks, groups, WIDTH]"""
    mins: np.ndarray | None
    factors: np.ndarray
    """float32 [blocks × WIDTH]; 0 for outputs that there are not"""

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.codes, self.scales, self.mins, self.factors) if each is not None)


RUN_BYTES = 1 << 18
"""Blocks of so many bytes, side by side, are read from memory as fast as can be."""


@cache
def run_length(count: int, block_bytes: int, threads: int) -> int:
    """Blocks, of ``count``, that a thread takes at a time: up to RUN_BYTES of them, but at least two runs for each
    thread, and so that threads of equal speed get equally many blocks."""
    share = -(-count // threads)
    for length in range(min(RUN_BYTES // block_bytes, count // (2 * threads)), 1, -1):
        if -(-count // (length * threads)) * length == share:
            return length
    return 1


CHUNK = 64
"""Blocks packed at a time, so that little memory is taken beside the result."""


def pack(weight: QuantizedWeight) -> Blocks:
    """The weight as kernels read it. Raises NoKernelError."""
    (out, into), form = weight.shape, weight.form
    codes, mins, scales = weight.codes.numpy(), weight.mins, weight.scales
    is_signed = stores_signed(form.bits)
    is_shifted = is_signed and form.has_mins and bool((weight.codes > 127).any())
    kernel_form = KernelForm.of(form, into, wide_tables=is_shifted)
    count = -(-out // WIDTH)
    lines = into * form.bits // 32
    packed = np.zeros((count, lines, WIDTH, 4), dtype=np.uint8)
    shift = np.uint8(128 if is_shifted or (is_signed and not form.has_mins) else 0)
    for first in range(0, count, CHUNK):
        part = codes[first * WIDTH : (first + CHUNK) * WIDTH]
        if form.bits == 4:  # pairs of neighbours become halves of groups of eight
            pairs = part.reshape(len(part), into // 8, 4)
            low, high = pairs & 15, pairs >> 4
            eight = np.stack((low, high), axis=3).reshape(len(part), into // 8, 8)
            part = eight[:, :, :4] | (eight[:, :, 4:] << 4)
        elif shift:
            part = part - shift
        whole = -(-len(part) // WIDTH)
        padded = np.zeros((whole * WIDTH, lines * 4), dtype=np.uint8)
        padded[: len(part)] = part.reshape(len(part), -1)
        words = padded.view(np.uint32).reshape(whole, WIDTH, lines)
        packed[first : first + whole] = words.transpose(0, 2, 1).copy().view(np.uint8).reshape(whole, lines, WIDTH, 4)
    factors = np.zeros(count * WIDTH, dtype=np.float32)
    factors[:out] = weight.rows.numpy()
    offset = form.offset if not is_signed else 0
    if form.codebook == "mxfp4":
        offset, factors = MXFP4_OFFSET, factors / 2
    if is_shifted:
        assert mins is not None and scales is not None
        mins, scales = mins.float() - 128 * scales.float(), scales.float()
    return Blocks(
        (out, into), kernel_form, offset, packed, _table_blocks(scales, count), _table_blocks(mins, count), factors
    )


def _table_blocks(table: torch.Tensor | None, count: int) -> np.ndarray | None:
    """[out, groups] -> [blocks, groups, WIDTH]"""
    if table is None:
        return None
    out, groups = table.shape
    padded = np.zeros((count * WIDTH, groups), dtype=table.numpy().dtype)
    padded[:out] = table.numpy()
    return np.ascontiguousarray(padded.reshape(count, WIDTH, groups).transpose(0, 2, 1))


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a weight needs its inputs rounded for: `QuantizeRows`."""

    span: int
    offset: int
    has_mins: bool


@dataclass(slots=True)
class QuantizedRows:
    """Inputs in 8 bits."""

    codes: torch.Tensor
    """int8 [rows, in]"""
    sides: torch.Tensor
    """int32 [rows, spans, 2]: see `quantize_row`"""


class QuantizeRows:
    """Rounds inputs for weights of one kind."""

    def __init__(self, team: Team, kind: str, span: int, offset: int, *, sums_as_floats: bool) -> None:
        self._team, self._span = team, span
        self._call = Call(quantize_kernel(kind, span, sums_as_floats=sums_as_floats), QUANTIZE_ARGUMENTS)
        self._call.arguments[Q_OFFSET] = offset

    def __call__(self, x: torch.Tensor) -> QuantizedRows:
        """x [rows, in], the numbers of a row contiguous."""
        rows, into = x.shape
        spans = into // self._span
        codes = self._team.empty((rows, into), torch.int8)
        sides = self._team.empty((rows, spans, 2), torch.int32)
        a = self._call.arguments
        a[Q_NEXT], a[Q_ROWS], a[Q_SPANS] = 0, rows, spans
        a[Q_X], a[Q_X_STEP] = x.data_ptr(), x.stride(0) * x.element_size()
        a[Q_OUT], a[Q_OUT_STEP] = codes.data_ptr(), into
        a[Q_SIDES], a[Q_SIDE_STEP] = sides.data_ptr(), SIDE * spans
        self._team.run(self._call, 1 if rows == 1 else torch.get_num_threads())
        return QuantizedRows(codes, sides)


class QuantProducts:
    """Makes products of packed weights, see products.PackedKernel. All calls come from one thread."""

    def __init__(self, team: Team) -> None:
        self._team = team

    @classmethod
    def probed(cls, team: Team) -> QuantProducts:
        """Raises RuntimeError if the products are wrong on this processor, and whatever compiling raises."""
        made, generator = cls(team), torch.Generator().manual_seed(0)
        for form in (INT8, INT4):
            weight = quantize(torch.randn(WIDTH, 2 * SPAN, generator=generator), form)
            x = torch.randn(MOST + FEW + 1, 2 * SPAN, generator=generator)
            found, expected = made.prepare(made.pack([weight]), None, torch.float32)(x), x @ weight.dequantized().t()
            if not torch.allclose(found, expected, atol=0.02 * float(expected.abs().max())):
                raise RuntimeError(f"products with {form} are wrong on this processor ({quant_tiles.DOT})")
        return made

    def pack(self, weights: Sequence[QuantizedWeight]) -> list[Blocks]:
        """The weights of a layer's projections, neighbours of one form together. Raises NoKernelError."""
        grouped = [list(group) for _, group in groupby(weights, key=lambda weight: weight.form)]
        return [pack(concatenated(group)) for group in grouped]

    def prepare(self, packed: Sequence[Blocks], bias: torch.Tensor | None, dtype: torch.dtype) -> QuantProduct:
        """bias: [out] of all of them, or None. dtype: of inputs and outputs. Raises whatever compiling raises."""
        return QuantProduct(self._team, packed, bias, dtype)

    def look_up(self, packed: Sequence[Blocks], dtype: torch.dtype) -> LookUpRows:
        """Rows of one packed weight, by number. Raises whatever compiling raises."""
        (blocks,) = packed
        return LookUpRows(self._team, blocks, dtype)


class QuantProduct:
    """y = x Wᵀ + b for weights that stand side by side."""

    def __init__(self, team: Team, packed: Sequence[Blocks], bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        kind = str(dtype).removeprefix("torch.")
        self._team, self._blocks, self._kept = team, list(packed), []
        self._out = sum(blocks.size[0] for blocks in packed)
        self._padded = self._out - packed[-1].size[0] + len(packed[-1].factors)
        self._calls: list[tuple[Inputs, Call]] = []
        self._quantizers: dict[Inputs, QuantizeRows] = {}
        self._columns, column = [], 0
        for blocks in packed:
            inputs = Inputs(blocks.form.span, blocks.offset, blocks.form.has_mins)
            if inputs not in self._quantizers:
                self._quantizers[inputs] = QuantizeRows(
                    team, kind, inputs.span, inputs.offset, sums_as_floats=inputs.has_mins
                )
            call = Call(product_kernel(blocks.form, kind), ARGUMENTS)
            self._set_weight(call.arguments, blocks, None if bias is None else bias[column : column + blocks.size[0]])
            self._calls.append((inputs, call))
            self._columns.append(column * dtype.itemsize)
            column += blocks.size[0]

    def _set_weight(self, a: Any, blocks: Blocks, bias: torch.Tensor | None) -> None:
        count = len(blocks.codes)
        a[COUNT], a[SPANS] = count, blocks.size[1] // blocks.form.span
        a[WEIGHT], a[BLOCK_BYTES] = blocks.codes.ctypes.data, blocks.codes.nbytes // count
        if blocks.scales is not None:
            a[SCALES], a[TABLE_BYTES] = blocks.scales.ctypes.data, blocks.scales.nbytes // count
        if blocks.mins is not None:
            a[MINS] = blocks.mins.ctypes.data
        a[FACTORS] = blocks.factors.ctypes.data
        if bias is not None:
            padded = np.zeros_like(blocks.factors)
            padded[: len(bias)] = bias.float().numpy()
            a[BIAS] = padded.ctypes.data
            self._kept.append(padded)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in] -> [rows, out], contiguous, in x's dtype."""
        rows, threads = len(x), torch.get_num_threads()
        quantized = {inputs: quantize(x) for inputs, quantize in self._quantizers.items()}
        found = self._team.empty((rows, self._padded), x.dtype)
        # A weight's last block may have outputs that there are not: the next weight's first ones are written over them.
        for (inputs, call), column in zip(self._calls, self._columns):
            a, own = call.arguments, quantized[inputs]
            a[NEXT], a[RUN], a[ROWS] = 0, run_length(a[COUNT], a[BLOCK_BYTES], threads), rows
            a[X], a[X_STEP] = own.codes.data_ptr(), own.codes.stride(0)
            a[SIDES], a[SIDE_STEP] = own.sides.data_ptr(), 4 * own.sides.stride(0)
            a[OUT], a[OUT_STEP] = found.data_ptr() + column, self._padded * x.element_size()
            self._team.run(call, threads)
        return found if self._out == self._padded else found[:, : self._out].contiguous()


class LookUpRows:
    """Rows of a packed weight, as numbers."""

    def __init__(self, team: Team, blocks: Blocks, dtype: torch.dtype) -> None:
        form, (_, into) = blocks.form, blocks.size
        self._team, self._blocks, self._dtype, self._into = team, blocks, dtype, into
        self._call = Call(look_up_kernel(form, str(dtype).removeprefix("torch.")), LOOK_UP_ARGUMENTS)
        count, a = len(blocks.codes), self._call.arguments
        a[L_LINES], a[L_OFFSET], a[L_OUT_STEP] = blocks.codes.shape[1], blocks.offset, into * dtype.itemsize
        a[L_WEIGHT], a[L_BLOCK_BYTES] = blocks.codes.ctypes.data, blocks.codes.nbytes // count
        if blocks.scales is not None:
            a[L_SCALES], a[L_TABLE_BYTES] = blocks.scales.ctypes.data, blocks.scales.nbytes // count
        if blocks.mins is not None:
            a[L_MINS] = blocks.mins.ctypes.data
        a[L_FACTORS] = blocks.factors.ctypes.data

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """int64 [n], contiguous -> [n, in]"""
        out, a = self._team.empty((len(ids), self._into), self._dtype), self._call.arguments
        a[NEXT], a[L_COUNT], a[L_IDS], a[L_OUT] = 0, len(ids), ids.data_ptr(), out.data_ptr()
        self._team.run(self._call, 1 if len(ids) < FEW else torch.get_num_threads())
        return out
