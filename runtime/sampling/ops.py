"""The operations that draw tokens from filtered distributions, in torch, and the tables that name a device's own.

A draw is a race (`noise`): of the tokens that the filters keep, the one with the largest p / noise wins; in a tie, the
first of the ranking. Logits are float32, raw; temperature divides their distance to the likeliest, so that
not even a tiny one makes them overflow. The filters keep:

    top_k   the k first tokens of the ranking (`ranking.top_tokens`)
    top_p   the shortest start of those that holds top_p of their mass, summed in float64
    min_p   tokens at least min_p times as likely as the likeliest

The likeliest token is always kept.

`TORCH_OPS` is for CPUs and is the oracle for all other tables; `op_providers` chooses the table of a device.
(`ranking.top_tokens` is the same everywhere: it never waits for the device, and reads the vocabulary once.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from ...scheduler.constraints.constraint import TokenMasks
from .mask_ops import apply_masks_on_device, apply_masks_on_host
from .noise import exponential_noise
from .ranking import best_tokens, row_statistics, top_tokens

NUCLEUS_WIDTH = 256
"""Tokens ranked at first for a row with top_p and no top_k; real models' nuclei are nearly always smaller."""


LEAST_WEIGHT = -80.0
"""Smaller logarithms of weights are raised to this in a race. Such a token wins as seldom: noise spans 2**-32 to 17.
An exponential below the normal numbers, as of -inf, takes a CPU three times as long."""


@dataclass(slots=True, frozen=True)
class Filters:
    """The filters of m rows; device tensors [m]."""

    temperature: torch.Tensor
    """float32, > 0."""
    top_k: torch.Tensor
    """int64; at least the vocabulary where off."""
    top_p: torch.Tensor
    """float64; infinite where off."""
    log_min_p: torch.Tensor
    """float32; -inf where off."""

    def select_rows(self, rows: torch.Tensor) -> Filters:
        return Filters(self.temperature[rows], self.top_k[rows], self.top_p[rows], self.log_min_p[rows])


def weigh(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """float32 [m, vocab]: each token's probability relative to the likeliest. (Relative to the sum of all, the last
    bits could differ from batch to batch.)"""
    return _scaled(logits, logits.amax(dim=-1, keepdim=True), filters).exp_()


def draw_ranked(values: torch.Tensor, ids: torch.Tensor, filters: Filters, keys: torch.Tensor) -> torch.Tensor:
    """Drawn token ids, int64 [m], where no top_k is larger than k.

    values: float32 [m, k], ids: int64 [m, k], the k first tokens of each row's ranking; keys: int32 [m, 2].
    """
    return _draw_ranked(values, ids, None, filters, keys)[0]


def draw_top_k(logits: torch.Tensor, width: int, filters: Filters, keys: torch.Tensor) -> torch.Tensor:
    """Drawn token ids, int64 [m], where no top_k is larger than ``width``. logits: float32 [m, vocab]."""
    return draw_ranked(*top_tokens(logits, width), filters, keys)


def draw_all(
    logits: torch.Tensor, filters: Filters, keys: torch.Tensor, kept: torch.Tensor | None = None
) -> torch.Tensor:
    """Drawn token ids, int64 [m], where only min_p filters. logits: float32 [m, vocab].

    kept: float32 [m, vocab], the other filters' verdict: > 0 for tokens that may be drawn. None for all.
    """
    scaled = _scaled(logits, logits.amax(dim=-1, keepdim=True), filters)
    keeps = scaled >= filters.log_min_p[:, None]
    if kept is not None:
        keeps &= kept > 0
    ids = torch.arange(logits.shape[-1], dtype=torch.int32, device=logits.device)
    return _race(scaled, keeps, exponential_noise(keys, ids))


def draw_nucleus_by_sort(logits: torch.Tensor, filters: Filters, keys: torch.Tensor) -> torch.Tensor:
    """Drawn token ids, int64 [m], where top_p and min_p filter: by a full sort. Never waits for the device."""
    return draw_top_k(logits, logits.shape[-1], filters, keys)


def draw_nucleus_at_second_look(logits: torch.Tensor, filters: Filters, keys: torch.Tensor) -> torch.Tensor:
    """The same, for CPUs: ranks NUCLEUS_WIDTH tokens, then all tokens of the rows where those hold too little. To know
    these rows it waits for the device."""
    if logits.shape[-1] <= NUCLEUS_WIDTH:
        return draw_nucleus_by_sort(logits, filters, keys)
    total = weigh(logits, filters).sum(dim=-1, dtype=torch.float64)
    next_ids, inside = _draw_ranked(*top_tokens(logits, NUCLEUS_WIDTH), total, filters, keys)
    if not inside.all():
        wide = (~inside).nonzero().view(-1)
        ranked = top_tokens(logits[wide], logits.shape[-1])
        next_ids[wide], _ = _draw_ranked(*ranked, total[wide], filters.select_rows(wide), keys[wide])
    return next_ids


def _draw_ranked(
    values: torch.Tensor, ids: torch.Tensor, total: torch.Tensor | None, filters: Filters, keys: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw among the ranked tokens; also bool [m]: the cut of top_p lies among them. total: float64 [m], the mass that
    top_p is a share of; None: the mass of the ranked tokens that top_k keeps."""
    scaled = _scaled(values, values[:, :1], filters)
    in_top_k = torch.arange(values.shape[-1], device=values.device) < filters.top_k[:, None]
    mass = scaled.double().exp_().mul_(in_top_k)
    cumulative = mass.cumsum(dim=-1)
    wanted = filters.top_p * (cumulative[:, -1] if total is None else total)
    kept = in_top_k & ((cumulative - mass) < wanted[:, None]) & (scaled >= filters.log_min_p[:, None])
    kept[:, :1].fill_(True)
    winner = _race(scaled, kept, exponential_noise(keys, ids.to(torch.int32)))
    return ids.gather(-1, winner[:, None]).view(-1), cumulative[:, -1] >= wanted


def _scaled(logits: torch.Tensor, best: torch.Tensor, filters: Filters) -> torch.Tensor:
    return (logits - best).div_(filters.temperature[:, None])


def _race(log_weights: torch.Tensor, kept: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Column of the winner, int64 [m]: kept column v with probability proportional to exp(log_weights[v]). Overwrites
    the weights, of which the largest is 0."""
    return best_tokens(log_weights.clamp_(min=LEAST_WEIGHT).exp_().div_(noise).mul_(kept))[1]


class DrawTopKOp(Protocol):
    def __call__(self, logits: torch.Tensor, width: int, filters: Filters, keys: torch.Tensor, /) -> torch.Tensor:
        """See `draw_top_k`."""
        ...


class DrawAllOp(Protocol):
    def __call__(
        self, logits: torch.Tensor, filters: Filters, keys: torch.Tensor, kept: torch.Tensor | None = None, /
    ) -> torch.Tensor:
        """See `draw_all`."""
        ...


class DrawNucleusOp(Protocol):
    def __call__(self, logits: torch.Tensor, filters: Filters, keys: torch.Tensor, /) -> torch.Tensor:
        """Drawn token ids, int64 [m], where top_p and min_p filter. What a row gets depends on that row alone."""
        ...


class BestTokensOp(Protocol):
    def __call__(self, logits: torch.Tensor, /) -> tuple[torch.Tensor, torch.Tensor]:
        """See `ranking.best_tokens`."""
        ...


class RowStatisticsOp(Protocol):
    def __call__(self, logits: torch.Tensor, chunk: int, /) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `ranking.row_statistics`."""
        ...


class ApplyMasksOp(Protocol):
    def __call__(self, logits: torch.Tensor, masks: TokenMasks, finite: bool, /) -> None:
        """See `mask_ops.apply_masks_on_host`."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingOps:
    """One implementation for each operation. All calls come from one thread."""

    draw_top_k: DrawTopKOp
    draw_all: DrawAllOp
    draw_nucleus: DrawNucleusOp
    row_statistics: RowStatisticsOp
    """For beam searches."""
    apply_masks: ApplyMasksOp = apply_masks_on_host
    """For grammars."""
    best_tokens: BestTokensOp = best_tokens
    """For greedy rows."""


TORCH_OPS = SamplingOps(draw_top_k, draw_all, draw_nucleus_at_second_look, row_statistics)
"""For CPUs."""

TORCH_GPU_OPS = SamplingOps(draw_top_k, draw_all, draw_nucleus_by_sort, row_statistics, apply_masks_on_device)
"""The same, but never waits for the device; the price is a full sort for rows with top_p alone."""
