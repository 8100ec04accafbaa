"""Products of few rows with a weight that oneDNN has packed, as fast as memory gives it.

For few rows a product is a matter of reading the weight once. torch's call of oneDNN takes several microseconds beside
that, and looks ahead only as far as the processor does by itself; this kernel reads the same blocks, so that no other
copy of the weight is needed, and is called like all others here.

How the blocks lie is oneDNN's own affair. So it is found out, not assumed: a weight of numbers that encode their places
is packed and looked at. If they lie in another way, there is no such product.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from ....attention.numba_paged.compiling import KernelFunction, kernel_builder
from ....attention.numba_paged.kinds import KINDS, LANES, LINE
from ....attention.numba_paged.target import HAS_512_BITS
from ....attention.numba_paged.team import Call, Team
from ..products import reorder

NEXT, COUNT, ROWS, STEPS, X, X_STEP, WEIGHT, BLOCK_BYTES, BIAS, OUT, OUT_STEP, BLOCKS, TABLE = range(13)
"""Places in the kernel's arguments, an array of int64. COUNT: number of blocks; STEPS: inputs, or pairs of them. Of
several weights: COUNT of all blocks, BLOCKS of each weight, TABLE the address of a row for each: int64 address of the
weight, of its bias, its first row, its rows."""
ARGUMENTS = 13

TILES = ((12, 2), (4, 4), (2, 4)) if HAS_512_BITS else ((6, 1), (4, 1), (2, 2))
"""Rows and vectors of outputs with sums that stay in registers, the largest first. A single row takes whole blocks."""

WIDTHS = (64, 32)
"""Outputs of a block that the kernel knows."""


class UnknownBlocksError(ValueError):
    """oneDNN lays weights out in a way that the kernel does not read."""


@kernel_builder
def block_kernel(width: int, kind: str, *, is_grouped: bool = False) -> KernelFunction:
    """is_grouped: for several weights, each with rows of its own."""
    from ....attention.numba_paged.operations import fetch_add, peek
    from .block_tiles import PAIRS, block_tile

    number = KINDS.index(kind)
    item, stored = (4, number) if kind == "float32" else (2, PAIRS)
    lines, no_scales = width // LANES, 0
    (most, in_most), (several, in_several), (few, in_few) = ((rows, min(outs, lines)) for rows, outs in TILES)

    def kernel(a: Any) -> None:
        steps, x_step, out_step = peek(a + 8 * STEPS), peek(a + 8 * X_STEP), peek(a + 8 * OUT_STEP)
        while True:
            block = fetch_add(a + 8 * NEXT, 1)
            if block >= peek(a + 8 * COUNT):
                return
            if is_grouped:
                group = block // peek(a + 8 * BLOCKS)
                block -= group * peek(a + 8 * BLOCKS)
                entry = peek(a + 8 * TABLE) + 32 * group
                w, bias, first, left = peek(entry), peek(entry + 8), peek(entry + 16), peek(entry + 24)
            else:
                w, bias, first, left = peek(a + 8 * WEIGHT), peek(a + 8 * BIAS), 0, peek(a + 8 * ROWS)
            w += block * peek(a + 8 * BLOCK_BYTES)
            if bias != 0:
                bias += block * width * item
            x, out = peek(a + 8 * X) + first * x_step, peek(a + 8 * OUT) + first * out_step + block * width * item
            while left > 0:
                if left >= most:
                    for part in range(lines // in_most):
                        at = part * in_most * LANES * item
                        line, more = w + LINE * in_most * part, bias + at if bias != 0 else 0
                        block_tile(
                            most, in_most, width, stored, number, no_scales,
                            steps, x, x_step, line, more, out + at, out_step, 0, 0, 0,
                        )  # fmt: skip
                    done = most
                elif left >= several:
                    for part in range(lines // in_several):
                        at = part * in_several * LANES * item
                        line, more = w + LINE * in_several * part, bias + at if bias != 0 else 0
                        block_tile(
                            several, in_several, width, stored, number, no_scales,
                            steps, x, x_step, line, more, out + at, out_step, 0, 0, 0,
                        )  # fmt: skip
                    done = several
                elif left >= few:
                    for part in range(lines // in_few):
                        at = part * in_few * LANES * item
                        line, more = w + LINE * in_few * part, bias + at if bias != 0 else 0
                        block_tile(
                            few, in_few, width, stored, number, no_scales,
                            steps, x, x_step, line, more, out + at, out_step, 0, 0, 0,
                        )  # fmt: skip
                    done = few
                else:
                    block_tile(
                        1, lines, width, stored, number, no_scales, steps, x, x_step, w, bias, out, out_step, 0, 0, 0
                    )  # fmt: skip
                    done = 1
                x, out, left = x + done * x_step, out + done * out_step, left - done

    return kernel


class BlockProducts:
    """Makes products of weights of one dtype. All calls come from one thread."""

    def __init__(self, team: Team, dtype: torch.dtype) -> None:
        """Raises UnknownBlocksError, and whatever compiling raises."""
        self._kind = str(dtype).removeprefix("torch.")
        if self._kind not in ("float32", "bfloat16"):
            raise UnknownBlocksError(f"there is no kernel for {self._kind}")
        self._team = team
        self._pairs = 1 if dtype == torch.float32 else 2
        self._dtype = dtype
        block_kernel(width_of_blocks(dtype, self._pairs), self._kind)

    def prepare(self, blocks: torch.Tensor, size: tuple[int, int], bias: torch.Tensor | None) -> BlockProduct:
        """blocks: a weight [out, in] as `mkldnn._reorder_linear_weight` has made it; size: (out, in). Raises
        UnknownBlocksError."""
        out, into = size
        width = self._width(size)
        product = BlockProduct(self._team, block_kernel(width, self._kind), blocks, out, bias)
        a = product.arguments
        a[COUNT], a[STEPS] = out // width, into // self._pairs
        a[BLOCK_BYTES] = torch.ops.mkldnn._nbytes(blocks) // a[COUNT]
        return product

    def prepare_group(
        self, blocks: Sequence[torch.Tensor], size: tuple[int, int], biases: Sequence[torch.Tensor | None]
    ) -> GroupedBlockProduct:
        """Several weights of one size, packed as for `prepare`, and their biases. Raises UnknownBlocksError."""
        out, into = size
        width = self._width(size)
        kernel = block_kernel(width, self._kind, is_grouped=True)
        product = GroupedBlockProduct(self._team, kernel, blocks, out, biases)
        a = product.arguments
        a[BLOCKS], a[STEPS] = out // width, into // self._pairs
        a[BLOCK_BYTES] = torch.ops.mkldnn._nbytes(blocks[0]) // a[BLOCKS]
        return product

    def _width(self, size: tuple[int, int]) -> int:
        """Outputs of a block of a weight of this size. Raises UnknownBlocksError."""
        out, into = size
        if into % self._pairs or out % min(WIDTHS):
            raise UnknownBlocksError(f"{out} × {into} numbers do not fill blocks of {min(WIDTHS)} outputs")
        return width_of_blocks(self._dtype, self._pairs, out)


class BlockProduct:
    """See products.Product."""

    def __init__(self, team: Team, kernel: Any, blocks: torch.Tensor, out: int, bias: torch.Tensor | None) -> None:
        self._team, self._out, self._kept = team, out, (blocks, bias)
        self._call = Call(kernel, ARGUMENTS)
        self.arguments = self._call.arguments
        self.arguments[WEIGHT] = torch.ops.mkldnn.data_ptr(blocks)
        self.arguments[BIAS] = 0 if bias is None else bias.data_ptr()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        out, a = self._team.empty((len(x), self._out), x.dtype), self.arguments
        a[NEXT], a[ROWS] = 0, len(x)
        a[X], a[X_STEP] = x.data_ptr(), x.stride(0) * x.element_size()
        a[OUT], a[OUT_STEP] = out.data_ptr(), self._out * x.element_size()
        self._team.run(self._call, torch.get_num_threads())
        return out


class GroupedBlockProduct:
    """Products of rows with the weights of their groups, in one call."""

    def __init__(
        self,
        team: Team,
        kernel: Any,
        blocks: Sequence[torch.Tensor],
        out: int,
        biases: Sequence[torch.Tensor | None],
    ) -> None:
        self._team, self._out, self._kept = team, out, (list(blocks), list(biases))
        self._call = Call(kernel, ARGUMENTS)
        self.arguments = self._call.arguments
        self._weights = np.array([torch.ops.mkldnn.data_ptr(each) for each in blocks], dtype=np.int64)
        self._biases = np.array([0 if bias is None else bias.data_ptr() for bias in biases], dtype=np.int64)

    def __call__(self, x: torch.Tensor, groups: np.ndarray, counts: np.ndarray) -> torch.Tensor:
        """x [rows, in], the rows of each group side by side; groups, counts: int64 [n], which weights, in the order of
        the rows, and how many rows each has, at least one -> [rows, out], contiguous."""
        out, a = self._team.empty((len(x), self._out), x.dtype), self.arguments
        table = np.stack((self._weights[groups], self._biases[groups], np.cumsum(counts) - counts, counts), axis=1)
        a[NEXT], a[COUNT], a[TABLE] = 0, len(groups) * a[BLOCKS], table.ctypes.data
        a[X], a[X_STEP] = x.data_ptr(), x.stride(0) * x.element_size()
        a[OUT], a[OUT_STEP] = out.data_ptr(), self._out * x.element_size()
        self._team.run(self._call, torch.get_num_threads())
        return out


@cache
def width_of_blocks(dtype: torch.dtype, pairs: int, out: int = 256) -> int:
    """Outputs of a block of a weight with so many outputs: oneDNN cuts 192 in another way than 256. Raises
    UnknownBlocksError."""
    into = 64
    places = torch.arange(out * into, dtype=torch.int32)
    # As bits of a number neighbours are all different, and none is a NaN.
    bits = places % 0x7F80
    weight = (bits.to(torch.int16).view(torch.bfloat16) if pairs == 2 else bits.float()).view(out, into)
    packed = reorder(weight)
    size = torch.ops.mkldnn._nbytes(packed)
    raw = np.frombuffer((ctypes.c_char * size).from_address(torch.ops.mkldnn.data_ptr(packed)), dtype=np.uint8)
    found = raw.view(np.int16 if pairs == 2 else np.float32).astype(np.int32)
    for width in WIDTHS:
        if out % width or len(found) != out * into:
            continue
        expected = bits.numpy().reshape(out // width, width, into // pairs, pairs).transpose(0, 2, 1, 3).ravel()
        if (found == expected).all():
            return width
    raise UnknownBlocksError(f"oneDNN packs weights of {out} outputs in another way on this processor")
