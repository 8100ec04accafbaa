"""Copies rows of numbers, from one type to another, and by index: a call of its own, so that it can be recorded."""

from __future__ import annotations

from typing import Any

import torch

from .compiling import KernelFunction, kernel_builder
from .kinds import KINDS
from .team import Call, Team

NEXT, COUNT, SOURCE, SOURCE_STEP, TARGET, TARGET_STEP, IDS = range(7)
"""Indices of the kernel's arguments. The steps are bytes from one row to the next."""
ARGUMENTS = 7

AT_ONCE = 8
"""Rows that a thread takes."""


@kernel_builder
def copy_kernel(size: int, source_kind: str, target_kind: str, *, by_id: bool) -> KernelFunction:
    from .operations import copy_row, fetch_add, peek

    first_kind, second_kind = KINDS.index(source_kind), KINDS.index(target_kind)

    def kernel(a: Any) -> None:
        source, target = peek(a + 8 * SOURCE), peek(a + 8 * TARGET)
        while True:
            first = fetch_add(a + 8 * NEXT, AT_ONCE)
            if first >= peek(a + 8 * COUNT):
                return
            for row in range(first, min(first + AT_ONCE, peek(a + 8 * COUNT))):
                number = peek(peek(a + 8 * IDS) + 8 * row) if by_id else row
                from_row = source + number * peek(a + 8 * SOURCE_STEP)
                copy_row(size, first_kind, second_kind, from_row, target + row * peek(a + 8 * TARGET_STEP))

    return kernel


class RowCopy:
    """Rows of ``size`` numbers, copied."""

    def __init__(self, team: Team, size: int, source: torch.dtype, target: torch.dtype, *, by_id: bool = False) -> None:
        """by_id: ids select the rows."""
        names = (str(dtype).removeprefix("torch.") for dtype in (source, target))
        self._team, self._size, self._dtypes = team, size, (source, target)
        self._call = Call(copy_kernel(size, *names, by_id=by_id), ARGUMENTS)

    def __call__(self, rows: torch.Tensor, ids: torch.Tensor | None = None) -> torch.Tensor:
        """rows: [n, …], the numbers of a row contiguous; ids: int64 [m], contiguous -> [n or m, …], contiguous."""
        assert rows.dtype == self._dtypes[0], f"{rows.dtype}: this copies {self._dtypes[0]}"
        count = len(rows) if ids is None else len(ids)
        out, a = self._team.empty((count, *rows.shape[1:]), self._dtypes[1]), self._call.arguments
        a[NEXT], a[COUNT], a[IDS] = 0, count, 0 if ids is None else ids.data_ptr()
        a[SOURCE], a[SOURCE_STEP] = rows.data_ptr(), rows.stride(0) * rows.element_size()
        a[TARGET], a[TARGET_STEP] = out.data_ptr(), self._size * out.element_size()
        self._team.run(self._call, 1)
        return out
