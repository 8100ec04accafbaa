"""Logits, filters and keys for tests of the draws."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from baton.runtime.sampling.ops import Filters


@dataclass(frozen=True, slots=True)
class DrawCase:
    logits: torch.Tensor
    """float32 [rows, vocab]"""
    filters: Filters
    keys: torch.Tensor
    """int32 [rows, 2]"""


def random_case(
    seed: int, rows: int, vocab_size: int, *, most_top_k: int = 60, device: str = "cpu", ties: bool = True
) -> DrawCase:
    """Rows of many kinds; with ties everywhere, also where the filters cut, unless told otherwise."""
    generator = torch.Generator().manual_seed(seed)

    def uniform() -> torch.Tensor:
        return torch.rand(rows, generator=generator)

    logits = torch.randn(rows, vocab_size, generator=generator) * (0.3 + 6 * uniform()[:, None])
    top_p = torch.where(uniform() < 0.3, torch.inf, uniform().double())
    filters = Filters(
        temperature=0.2 + 2 * uniform(),
        top_k=torch.randint(1, most_top_k + 1, (rows,), generator=generator),
        top_p=top_p,
        log_min_p=torch.where(uniform() < 0.5, -torch.inf, -6 * uniform()),
    )
    keys = torch.randint(-(2**31), 2**31, (rows, 2), generator=generator).to(torch.int32)
    if ties:
        logits = logits.bfloat16().float()
    fields = (filters.temperature, filters.top_k, filters.top_p, filters.log_min_p)
    return DrawCase(logits.to(device), Filters(*(field.to(device) for field in fields)), keys.to(device))
