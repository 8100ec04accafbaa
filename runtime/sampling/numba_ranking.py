"""`ranking.best_tokens` as a Numba kernel: one pass over a row finds the highest logit, another one its place.

A row of 49,152 logits takes 11 µs; torch's eight calls take 34 µs in a loop of their own, and several times as long
within a step, whose kernels have emptied the caches (two cores of a Zen 4).
"""

from __future__ import annotations

from typing import Any

import torch

from ...attention.numba_paged.compiling import KernelFunction, kernel_builder
from ...attention.numba_paged.kinds import LANES
from ...attention.numba_paged.team import Call, Team

NEXT, ROWS, COLUMNS, LOGITS, STEP, BEST, IDS = range(7)
"""Places in the kernel's arguments, an array of int64. STEP: bytes from one row of LOGITS to the next."""
ARGUMENTS = 7

ONE_THREAD = 1 << 17
"""Logits up to which one thread is faster than waking the others."""


@kernel_builder
def best_kernel() -> KernelFunction:
    from ...attention.numba_paged.operations import fetch_add, peek
    from .numba_intrinsics import best_of_row

    def kernel(a: Any) -> None:
        while True:
            row = fetch_add(a + 8 * NEXT, 1)
            if row >= peek(a + 8 * ROWS):
                return
            x = peek(a + 8 * LOGITS) + row * peek(a + 8 * STEP)
            best_of_row(peek(a + 8 * COLUMNS), x, peek(a + 8 * BEST) + 4 * row, peek(a + 8 * IDS) + 8 * row)

    return kernel


class BestTokens:
    """See `ranking.best_tokens`. All calls come from one thread."""

    def __init__(self) -> None:
        """Raises NoTeamError, and whatever compiling raises."""
        self._team = Team()
        self._call = Call(best_kernel(), ARGUMENTS)

    def __call__(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """logits: float32 [n, vocab], a row's numbers contiguous, at least LANES of them."""
        assert logits.dtype == torch.float32 and logits.stride(1) == 1 and logits.shape[1] >= LANES
        rows, columns = logits.shape
        best, ids, a = torch.empty(rows), torch.empty(rows, dtype=torch.int64), self._call.arguments
        a[NEXT], a[ROWS], a[COLUMNS] = 0, rows, columns
        a[LOGITS], a[STEP], a[BEST], a[IDS] = logits.data_ptr(), 4 * logits.stride(0), best.data_ptr(), ids.data_ptr()
        self._team.run(self._call, torch.get_num_threads() if rows > 1 and rows * columns > ONE_THREAD else 1)
        return best, ids
