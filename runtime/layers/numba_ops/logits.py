"""Logits in float32 of a head in bfloat16.

torch's product of bfloat16 sums in float32 and then rounds what it returns to bfloat16 again. A logit of 20 is then one
of 20, 20.125, 20.25, …: likely tokens tie, and the first one in the vocabulary wins. Here nothing is rounded after the
last layer. It costs little: a step of few rows waits for the weight to be read, whatever is done with it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ....attention.numba_paged.compiling import KernelFunction, kernel_builder
from ....attention.numba_paged.team import Call, Team

NEXT, OUTS, ROWS, X, X_STEP, WEIGHT, TARGET, TARGET_STEP = range(8)
"""Places in the kernel's arguments, an array of int64. The steps are bytes from one row to the next."""
ARGUMENTS = 8

TILE = 4
"""Tile of rows and outputs with sums that stay in registers."""
AT_ONCE = 64
"""Outputs that a thread takes: their weights stay in a core's second cache while all rows pass."""


class WrongNumbers(RuntimeError):
    """The kernel does not compute what torch does."""


@kernel_builder
def logits_kernel(size: int) -> KernelFunction:
    from ....attention.numba_paged.operations import fetch_add, peek
    from .tiles import dot_tile

    def kernel(a: Any) -> None:
        outs, rows, x, x_step = peek(a + 8 * OUTS), peek(a + 8 * ROWS), peek(a + 8 * X), peek(a + 8 * X_STEP)
        step = peek(a + 8 * TARGET_STEP)
        while True:
            begin = fetch_add(a + 8 * NEXT, AT_ONCE)
            if begin >= outs:
                return
            end = min(begin + AT_ONCE, outs)
            whole = end - (end - begin) % TILE
            row = 0
            while row < rows:
                at, several = x + row * x_step, row + TILE <= rows
                for out in range(begin, whole, TILE):
                    weight = peek(a + 8 * WEIGHT) + 2 * size * out
                    target = peek(a + 8 * TARGET) + row * step + 4 * out
                    if several:
                        dot_tile(size, TILE, TILE, at, x_step, weight, target, step)
                    else:
                        dot_tile(size, 1, TILE, at, x_step, weight, target, step)
                for out in range(whole, end):
                    weight = peek(a + 8 * WEIGHT) + 2 * size * out
                    target = peek(a + 8 * TARGET) + row * step + 4 * out
                    if several:
                        dot_tile(size, TILE, 1, at, x_step, weight, target, step)
                    else:
                        dot_tile(size, 1, 1, at, x_step, weight, target, step)
                row += TILE if several else 1

    return kernel


class ExactLogits:
    """x · Wᵀ of a weight in bfloat16. All calls come from one thread."""

    def __init__(self, size: int) -> None:
        """size: numbers of a row, even. Raises NoTeamError, WrongNumbers, and whatever compiling raises."""
        self._size = size
        self._team = Team()
        self._call = Call(logits_kernel(size), ARGUMENTS)
        self._check()

    def __call__(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """x: float32 [rows, size]; weight: bfloat16 [outs, size], contiguous -> float32 [rows, outs]."""
        rows = x.view(len(x), self._size // 2, 2).transpose(1, 2).contiguous()
        found = torch.empty(len(x), len(weight))
        a = self._call.arguments
        a[NEXT], a[OUTS], a[ROWS] = 0, len(weight), len(x)
        a[X], a[X_STEP], a[WEIGHT] = rows.data_ptr(), 4 * self._size, weight.data_ptr()
        a[TARGET], a[TARGET_STEP] = found.data_ptr(), 4 * len(weight)
        self._team.run(self._call, torch.get_num_threads())
        return found

    def _check(self) -> None:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(TILE + 1, self._size, generator=generator)
        weight = torch.randn(AT_ONCE + TILE + 1, self._size, generator=generator).to(torch.bfloat16)
        expected = F.linear(x.double(), weight.double())
        if not torch.allclose(self(x, weight).double(), expected, atol=1e-3, rtol=1e-3):
            raise WrongNumbers("logits of a kernel of Numba's differ from torch's")
