"""The operations that draw and rank tokens, as a table of functions.

`TORCH_OPS` is for CPUs and is the oracle for all other tables; `probe` chooses the table of a device.
(`ranking.top_tokens` is the same everywhere: it never waits for the device, and reads the vocabulary once.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from .ranking import row_statistics
from .torch_ops import Filters, draw_all, draw_nucleus_at_second_look, draw_nucleus_by_sort, draw_top_k


class DrawTopKOp(Protocol):
    def __call__(self, logits: torch.Tensor, width: int, filters: Filters, keys: torch.Tensor, /) -> torch.Tensor:
        """See `torch_ops.draw_top_k`."""
        ...


class DrawAllOp(Protocol):
    def __call__(
        self, logits: torch.Tensor, filters: Filters, keys: torch.Tensor, kept: torch.Tensor | None = None, /
    ) -> torch.Tensor:
        """See `torch_ops.draw_all`."""
        ...


class DrawNucleusOp(Protocol):
    def __call__(self, logits: torch.Tensor, filters: Filters, keys: torch.Tensor, /) -> torch.Tensor:
        """Drawn token ids, int64 [m], where top_p and min_p filter. What a row gets depends on that row alone."""
        ...


class RowStatisticsOp(Protocol):
    def __call__(self, logits: torch.Tensor, chunk: int, /) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `ranking.row_statistics`."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingOps:
    """One implementation for each operation; all are functions without state."""

    draw_top_k: DrawTopKOp
    draw_all: DrawAllOp
    draw_nucleus: DrawNucleusOp
    row_statistics: RowStatisticsOp
    """For beam searches."""


TORCH_OPS = SamplingOps(draw_top_k, draw_all, draw_nucleus_at_second_look, row_statistics)
"""For CPUs."""

TORCH_GPU_OPS = SamplingOps(draw_top_k, draw_all, draw_nucleus_by_sort, row_statistics)
"""The same, but never waits for the device; the price is a full sort for rows with top_p alone."""
