"""A product with a weight of narrow floats: a kernel widens it as it reads.

Of 16 bits, on processors without arithmetic for them: the weight is read from memory in half the time that float32
takes. Of 8 bits, with float32 scales, one for a run of inputs of each output, or one for all: a quarter. Nothing is
rounded but what its checkpoint has rounded: inputs are float32, and so are products and sums. It lies in blocks of our
own: input by input, its numbers for WIDTH outputs.

To widen 8 bits takes longer than to multiply one row by them. For many rows some blocks are widened first, once, and
multiplied from there: the same numbers in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ....attention.numba_paged.compiling import KernelFunction, kernel_builder
from ....attention.numba_paged.kinds import KINDS, LANES, item_bytes
from ....attention.numba_paged.target import HAS_512_BITS
from ....attention.numba_paged.team import Call, Team
from ..quantized_weights import Float8Weight
from .packed_blocks import NoKernelError, run_length

(NEXT, COUNT, RUN, ROWS, INPUTS, X, X_STEP, WEIGHT, BLOCK_BYTES, BIAS, OUT, OUT_STEP, SCALES, TABLE_BYTES, GROUP,
 SCALE_STEP) = range(16)  # fmt: skip
"""Places in the kernel's arguments, an array of int64. COUNT: number of blocks. RUN: blocks that a thread takes at a
time. TABLE_BYTES: of a block's scales; GROUP: inputs that are summed before a scale is applied, and SCALE_STEP the
bytes to the next group's."""
ARGUMENTS = 16

WIDTH = 2 * LANES
"""Outputs of a block."""
MOST, FEW = (12, 4) if HAS_512_BITS else (6, 2)
"""Rows of a tile: MOST of half a block's outputs, FEW of all of them."""

LOADED_SMALLER = 256.0
"""Numbers of float8_e4m3fn are loaded divided by it, see `Vectors.load`."""
SUMMED = 256
"""Inputs that are summed before the one scale of an output is applied."""
MANY = 6 * MOST
"""Rows from which on weights of 8 bits are widened first."""
WIDENED_BYTES = 1 << 20
"""Bytes of widened numbers at a time, for each thread: all should stay in a cache that the cores share."""
WIDEST_BLOCK = 1 << 18
"""Bytes of a widened block that stays in a core's own cache. Of larger ones, reading takes as long as to widen anew."""


@kernel_builder
def narrow_kernel(stored: str, kind: str, *, has_scales: bool) -> KernelFunction:
    """stored: dtype of the weight; kind: of bias and outputs. has_scales: of a weight of 8 bits, or of one that was."""
    from ....attention.numba_paged.operations import fetch_add, peek
    from .block_tiles import block_tile

    to, of = KINDS.index(kind), KINDS.index(stored)
    item, narrow, width, lanes = item_bytes(kind), item_bytes(stored), WIDTH, LANES
    most, few, scaled = MOST, FEW, int(has_scales)

    def kernel(a: Any) -> None:
        inputs, x_step, out_step = peek(a + 8 * INPUTS), peek(a + 8 * X_STEP), peek(a + 8 * OUT_STEP)
        group, scale_step = peek(a + 8 * GROUP), peek(a + 8 * SCALE_STEP)
        block = end = 0
        while True:
            if block == end:
                block = fetch_add(a + 8 * NEXT, peek(a + 8 * RUN))
                end = min(block + peek(a + 8 * RUN), peek(a + 8 * COUNT))
                if block >= end:
                    return
            w, bias = peek(a + 8 * WEIGHT) + block * peek(a + 8 * BLOCK_BYTES), peek(a + 8 * BIAS)
            scales = peek(a + 8 * SCALES) + block * peek(a + 8 * TABLE_BYTES)
            if bias != 0:
                bias += item * width * block
            x, out, left = peek(a + 8 * X), peek(a + 8 * OUT) + block * width * item, peek(a + 8 * ROWS)
            while left > 0:
                if left >= most:
                    done = most
                    for part in range(2):
                        line, at = w + narrow * lanes * part, out + item * lanes * part
                        more = bias + item * lanes * part if bias != 0 else 0
                        block_tile(
                            most, 1, width, of, to, scaled, inputs, x, x_step, line, more, at, out_step,
                            scales + 4 * lanes * part, group, scale_step,
                        )  # fmt: skip
                elif left >= few:
                    done = few
                    block_tile(
                        few, 2, width, of, to, scaled, inputs, x, x_step, w, bias, out, out_step,
                        scales, group, scale_step,
                    )  # fmt: skip
                else:
                    done = 1
                    block_tile(
                        1, 2, width, of, to, scaled, inputs, x, x_step, w, bias, out, out_step,
                        scales, group, scale_step,
                    )  # fmt: skip
                x, out, left = x + done * x_step, out + done * out_step, left - done
            block += 1

    return kernel


@dataclass(slots=True)
class NarrowBlocks:
    """A packed weight: plain memory that a kernel reads."""

    size: tuple[int, int]
    codes: torch.Tensor
    """bfloat16, float16 or float8_e4m3fn [blocks, in, WIDTH]; 0 for outputs that there are not"""
    scales: torch.Tensor | None = None
    """Scales of 8-bit floats: float32 [blocks, groups, WIDTH]; None for 16 bits"""
    group: int = 0
    """Inputs that share a scale; 0: all."""

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + (0 if self.scales is None else self.scales.nbytes)


def pack_floats(weight: torch.Tensor) -> NarrowBlocks:
    """weight: bfloat16 or float16 [out, in]. Raises NoKernelError."""
    out, into = weight.shape
    if into % LANES:
        raise NoKernelError(f"there is no kernel for {into} inputs, no multiple of {LANES}")
    return NarrowBlocks((out, into), _in_blocks(weight))


def pack_float8(weight: Float8Weight) -> NarrowBlocks:
    """Raises NoKernelError."""
    out, into = weight.shape
    if into % LANES:
        raise NoKernelError(f"there is no kernel for {into} inputs, no multiple of {LANES}")
    codes = _in_blocks(weight.codes.view(torch.uint8)).view(weight.codes.dtype)
    return NarrowBlocks((out, into), codes, _in_blocks(weight.scales) * LOADED_SMALLER, weight.group)


def _in_blocks(table: torch.Tensor) -> torch.Tensor:
    """[out, n] -> [blocks, n, WIDTH]"""
    out, length = table.shape
    packed = table.new_empty(-(-out // WIDTH), length, WIDTH)
    whole = out // WIDTH
    packed[:whole] = table[: whole * WIDTH].view(whole, WIDTH, length).transpose(1, 2)
    if rest := out - whole * WIDTH:
        packed[whole, :, :rest] = table[whole * WIDTH :].t()
        packed[whole, :, rest:] = 0
    return packed


(W_NEXT, W_ROWS, W_LINES, W_X, W_X_STEP, W_OUT, W_OUT_STEP) = range(7)
"""Places in the arguments of the kernel that widens."""
WIDEN_ARGUMENTS = 7


@kernel_builder
def widen_kernel(kind: str) -> KernelFunction:
    """kind: of the numbers that become float32."""
    from ....attention.numba_paged.operations import fetch_add, peek
    from .block_tiles import widen_line

    number, lanes, item = KINDS.index(kind), LANES, item_bytes(kind)

    def kernel(a: Any) -> None:
        while True:
            row = fetch_add(a + 8 * W_NEXT, 1)
            if row >= peek(a + 8 * W_ROWS):
                return
            x = peek(a + 8 * W_X) + row * peek(a + 8 * W_X_STEP)
            out = peek(a + 8 * W_OUT) + row * peek(a + 8 * W_OUT_STEP)
            for line in range(peek(a + 8 * W_LINES)):
                widen_line(number, x + item * lanes * line, out + 4 * lanes * line)

    return kernel


class WidenRows:
    """Inputs in float32."""

    def __init__(self, team: Team, kind: str) -> None:
        self._team = team
        self._call = None if kind == "float32" else Call(widen_kernel(kind), WIDEN_ARGUMENTS)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, in], the numbers of a row contiguous -> the same in float32; in: a multiple of LANES"""
        if self._call is None:
            return x
        rows, into = x.shape
        wide, a = self._team.empty((rows, into), torch.float32), self._call.arguments
        a[W_NEXT], a[W_ROWS], a[W_LINES] = 0, rows, into // LANES
        a[W_X], a[W_X_STEP] = x.data_ptr(), x.stride(0) * x.element_size()
        a[W_OUT], a[W_OUT_STEP] = wide.data_ptr(), 4 * into
        self._team.run(self._call, 1 if rows == 1 else torch.get_num_threads())
        return wide


class NarrowPart:
    """The product of one packed weight."""

    def __init__(self, team: Team, blocks: NarrowBlocks, bias: torch.Tensor | None, kind: str) -> None:
        """bias: [out]. kind: of the outputs. Raises whatever compiling raises."""
        stored, has_scales = str(blocks.codes.dtype).removeprefix("torch."), blocks.scales is not None
        self.padded = len(blocks.codes) * WIDTH
        """Outputs of whole blocks."""
        self._team, self._blocks, self._bias = team, blocks, None
        self._item = item_bytes(kind)
        self._call = Call(narrow_kernel(stored, kind, has_scales=has_scales), ARGUMENTS)
        self._widen: Call | None = None
        if has_scales and 4 * WIDTH * blocks.size[1] <= WIDEST_BLOCK:
            self._widen = Call(widen_kernel(stored), WIDEN_ARGUMENTS)
            self._wide = Call(narrow_kernel("float32", kind, has_scales=True), ARGUMENTS)
        if bias is not None:
            self._bias = torch.zeros(self.padded, dtype=getattr(torch, kind))
            self._bias[: len(bias)] = bias

    def write(self, x: torch.Tensor, address: int, step: int) -> None:
        """Write the outputs, of whole blocks, to rows from this address on, ``step`` bytes apart. x: float32
        [rows, in]"""
        if self._widen is None or len(x) < MANY:
            self._multiply(self._call, self._blocks.codes, 0, x, address, step)
            return
        (blocks, into, width), codes = self._blocks.codes.shape, self._blocks.codes
        at_once = min(torch.get_num_threads() * max(1, WIDENED_BYTES // (4 * into * width)), blocks)
        wide = self._team.empty((at_once, into, width), torch.float32)
        for first in range(0, blocks, at_once):
            some = codes[first : first + at_once]
            self._widen_blocks(self._widen, some, wide)
            self._multiply(self._wide, wide[: len(some)], first, x, address, step)

    def _widen_blocks(self, call: Call, codes: torch.Tensor, wide: torch.Tensor) -> None:
        a, at_once = call.arguments, LANES * WIDTH  # numbers that a thread takes
        a[W_NEXT], a[W_ROWS], a[W_LINES] = 0, codes.numel() // at_once, at_once // LANES
        a[W_X], a[W_X_STEP] = codes.data_ptr(), at_once
        a[W_OUT], a[W_OUT_STEP] = wide.data_ptr(), 4 * at_once
        self._team.run(call, torch.get_num_threads())

    def _multiply(
        self, call: Call, numbers: torch.Tensor, first: int, x: torch.Tensor, address: int, step: int
    ) -> None:
        """numbers: [blocks, in, WIDTH], of the blocks from ``first`` on."""
        threads, a, scales = torch.get_num_threads(), call.arguments, self._blocks.scales
        a[COUNT], a[INPUTS] = len(numbers), self._blocks.size[1]
        a[WEIGHT], a[BLOCK_BYTES] = numbers.data_ptr(), numbers.nbytes // len(numbers)
        a[NEXT], a[RUN], a[ROWS] = 0, run_length(a[COUNT], a[BLOCK_BYTES], threads), len(x)
        a[X], a[X_STEP], a[OUT_STEP] = x.data_ptr(), 4 * x.stride(0), step
        a[OUT] = address + first * WIDTH * self._item
        if scales is not None:
            a[TABLE_BYTES] = scales.nbytes // len(scales)
            a[SCALES] = scales.data_ptr() + first * a[TABLE_BYTES]
            a[GROUP], a[SCALE_STEP] = (self._blocks.group, 4 * WIDTH) if self._blocks.group else (SUMMED, 0)
        if self._bias is not None:
            a[BIAS] = self._bias.data_ptr() + first * WIDTH * self._item
        self._team.run(call, threads)
