"""A product with a weight in few bits: packs it into blocks, and computes with the tiles of quant_tiles.py.

    x ─▶ quantize_row: int8, a scale for each span ─▶ for each block of outputs: tiles ─▶ × rows + bias ─▶ y

Both are calls of the team, so a step with such products can be recorded. A row's result does not depend on its batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ....attention.numba_paged.compiling import KernelFunction, kernel_builder
from ....attention.numba_paged.kinds import KINDS
from ....attention.numba_paged.team import Call, Team
from ..quantized_weights import QuantForm, QuantizedWeight
from .packed_blocks import NoKernelError, run_length
from .quant_layout import DOT_LANES, MXFP4_OFFSET, SIDE, SPAN, WIDTH, stores_signed

(NEXT, COUNT, RUN, ROWS, SPANS, X, X_STEP, SIDES, SIDE_STEP, WEIGHT, BLOCK_BYTES, SCALES, TABLE_BYTES, MINS, FACTORS,
 BIAS, OUT, OUT_STEP) = range(18)  # fmt: skip
"""Places in the kernel's arguments, an array of int64. COUNT: number of blocks. RUN: blocks that a thread takes at a
time."""
ARGUMENTS = 18

(Q_NEXT, Q_ROWS, Q_SPANS, Q_X, Q_X_STEP, Q_OUT, Q_OUT_STEP, Q_SIDES, Q_SIDE_STEP, Q_OFFSET) = range(10)
"""Places in the arguments of the kernel that quantises inputs."""
QUANTIZE_ARGUMENTS = 10

MOST, FEW = (8, 4) if DOT_LANES == 16 else (4, 2)
"""Rows of a tile, as long as so many are left."""
VECTORS = 2
"""Vectors of outputs in a tile of several rows. Each input is loaded once for both, and each weight once for all rows.
(With the totals of a span, a tile needs more registers than there are; LLVM keeps those in memory.)"""


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


@kernel_builder
def quantize_kernel(kind: str, span: int, *, sums_as_floats: bool) -> KernelFunction:
    from ....attention.numba_paged.operations import fetch_add, peek
    from .quant_tiles import quantize_row

    number, as_floats = KINDS.index(kind), int(sums_as_floats)

    def kernel(a: Any) -> None:
        while True:
            row = fetch_add(a + 8 * Q_NEXT, 1)
            if row >= peek(a + 8 * Q_ROWS):
                return
            x = peek(a + 8 * Q_X) + row * peek(a + 8 * Q_X_STEP)
            out = peek(a + 8 * Q_OUT) + row * peek(a + 8 * Q_OUT_STEP)
            sides = peek(a + 8 * Q_SIDES) + row * peek(a + 8 * Q_SIDE_STEP)
            quantize_row(number, span, as_floats, peek(a + 8 * Q_SPANS), peek(a + 8 * Q_OFFSET), x, out, sides)

    return kernel


@kernel_builder
def product_kernel(form: KernelForm, kind: str) -> KernelFunction:
    from ....attention.numba_paged.operations import fetch_add, peek
    from .quant_tiles import quant_tile

    number = KINDS.index(kind)
    bits, is_mxfp4, span, per = form.bits, int(form.is_mxfp4), form.span, form.spans_of_scale
    item, has_mins = form.table_item, int(form.has_mins)
    out_item = 4 if kind == "float32" else 2
    lanes, parts = DOT_LANES, WIDTH // DOT_LANES
    most, few, together = MOST, FEW, VECTORS

    def kernel(a: Any) -> None:
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
                    for part in range(0, parts, together):
                        line, entry, at = w + 4 * lanes * part, lanes * item * part, lanes * part
                        more = bias + 4 * at if bias != 0 else 0
                        if left >= most:
                            quant_tile(
                                most, together, bits, is_mxfp4, span, per, item, has_mins, number,
                                spans, x, x_step, sides, side_step, line, scales + entry, mins + entry,
                                factors + 4 * at, more, out + out_item * at, out_step,
                            )  # fmt: skip
                        else:
                            quant_tile(
                                few, together, bits, is_mxfp4, span, per, item, has_mins, number,
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

    return kernel


(L_COUNT, L_IDS, L_LINES, L_OFFSET, L_WEIGHT, L_BLOCK_BYTES, L_SCALES, L_TABLE_BYTES, L_MINS, L_FACTORS, L_OUT,
 L_OUT_STEP) = range(1, 13)  # fmt: skip
"""Places in the arguments of the kernel that looks rows up, behind NEXT."""
LOOK_UP_ARGUMENTS = 13


@kernel_builder
def look_up_kernel(form: KernelForm, kind: str) -> KernelFunction:
    from ....attention.numba_paged.operations import fetch_add, peek
    from .quant_tiles import widen_row

    number = KINDS.index(kind)
    bits, is_mxfp4, per = form.bits, int(form.is_mxfp4), form.span * form.spans_of_scale
    item, has_mins = form.table_item, int(form.has_mins)

    def kernel(a: Any) -> None:
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

    return kernel


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

    def __init__(self, team: Team, kind: str, inputs: Inputs) -> None:
        """kind: of what is rounded."""
        self._team, self._span = team, inputs.span
        self._call = Call(quantize_kernel(kind, inputs.span, sums_as_floats=inputs.has_mins), QUANTIZE_ARGUMENTS)
        self._call.arguments[Q_OFFSET] = inputs.offset

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


class QuantPart:
    """The product of one packed weight."""

    def __init__(self, team: Team, blocks: Blocks, bias: torch.Tensor | None, kind: str) -> None:
        """bias: [out]. kind: of the outputs. Raises whatever compiling raises."""
        self.inputs = Inputs(blocks.form.span, blocks.offset, blocks.form.has_mins)
        self.padded = len(blocks.factors)
        """Outputs of whole blocks."""
        self._team, self._blocks, self._bias = team, blocks, None
        self._call = Call(product_kernel(blocks.form, kind), ARGUMENTS)
        count, a = len(blocks.codes), self._call.arguments
        a[COUNT], a[SPANS] = count, blocks.size[1] // blocks.form.span
        a[WEIGHT], a[BLOCK_BYTES] = blocks.codes.ctypes.data, blocks.codes.nbytes // count
        if blocks.scales is not None:
            a[SCALES], a[TABLE_BYTES] = blocks.scales.ctypes.data, blocks.scales.nbytes // count
        if blocks.mins is not None:
            a[MINS] = blocks.mins.ctypes.data
        a[FACTORS] = blocks.factors.ctypes.data
        if bias is not None:
            self._bias = np.zeros_like(blocks.factors)
            self._bias[: len(bias)] = bias.float().numpy()
            a[BIAS] = self._bias.ctypes.data

    def write(self, x: QuantizedRows, address: int, step: int) -> None:
        """Write the outputs, of whole blocks, to rows from this address on, ``step`` bytes apart."""
        threads, a = torch.get_num_threads(), self._call.arguments
        a[NEXT], a[RUN], a[ROWS] = 0, run_length(a[COUNT], a[BLOCK_BYTES], threads), len(x.codes)
        a[X], a[X_STEP] = x.codes.data_ptr(), x.codes.stride(0)
        a[SIDES], a[SIDE_STEP] = x.sides.data_ptr(), 4 * x.sides.stride(0)
        a[OUT], a[OUT_STEP] = address, step
        self._team.run(self._call, threads)


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
