"""Log-probabilities of chosen, of likeliest and of named tokens, for output and prompt.

They are those of the model itself: log_softmax of the raw logits, before bias, penalties, temperature and filters, as
in SGLang and vLLM. The device computes them in the step and copies them to the host with the sampled tokens; the
result is numpy, so that the worker can put it into messages as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..runner.device_copy import upload
from .ranking import SLICE_ELEMENTS, top_tokens

PROMPT_SLICE = 256
"""Hidden states turned into logits at once: 256 × 152,000 float32 are 150 MiB."""


@dataclass(slots=True, frozen=True)
class TokenLogprobs:
    """m consecutive tokens of one sequence, and the k likeliest tokens at each place, likeliest first; also those
    that the request names."""

    ids: np.ndarray
    """int32 [m]"""
    values: np.ndarray
    """float32 [m]"""
    top_ids: np.ndarray
    """int32 [m, k]"""
    top_values: np.ndarray
    """float32 [m, k]"""
    ranks: np.ndarray | None = None
    """int32 [m]: rank from 1, the number of likelier tokens plus one; None where not requested."""
    named_values: np.ndarray | None = None
    """float32 [m, named tokens]; None if the request names none."""

    def first(self, count: int) -> TokenLogprobs:
        """The logprobs of the first ``count`` tokens."""
        if count == len(self.ids):
            return self
        ranks = None if self.ranks is None else self.ranks[:count]
        named = None if self.named_values is None else self.named_values[:count]
        return TokenLogprobs(
            self.ids[:count], self.values[:count], self.top_ids[:count], self.top_values[:count], ranks, named
        )


@dataclass(slots=True)
class LogprobsInFlight:
    """Logprobs that the device is computing. Copy ``tensors`` to the host, where `read` splits them by sequence."""

    tensors: list[torch.Tensor]
    """values float32 [n], top_ids int32 [n, k], top_values float32 [n, k]: n tokens, sequence after sequence, k the
    largest of ``top_ks``. A value is NaN where a logit is NaN or +inf, or all are -inf. Then ranks int32 [n], if any
    sequence wants them, and float32 [n, most of ``named``], if any names tokens."""
    lengths: list[int]
    """Tokens of each sequence."""
    top_ks: Sequence[int]
    """Likeliest tokens wanted by each sequence."""
    ranked: Sequence[bool] = ()
    """Does it want ranks? Empty where none does."""
    named: Sequence[int] = ()
    """How many tokens each sequence names; empty if none does."""

    def read_logprobs(self, arrays: Sequence[np.ndarray], ids: Sequence[np.ndarray]) -> list[TokenLogprobs]:
        """One TokenLogprobs for each sequence. arrays: ``tensors`` on the host; ids: int32 [length] each, the
        tokens."""
        values, top_ids, top_values, *rest = arrays
        ranks, named_values = rest[0] if self.ranked else None, rest[-1] if self.named else None
        result, start = [], 0
        nothing = [0] * len(self.lengths)
        each = zip(ids, self.lengths, self.top_ks, self.ranked or nothing, self.named or nothing, strict=True)
        for token_ids, length, k, is_ranked, names in each:
            part = slice(start, start + length)
            # Copies: a view would keep the arrays of the whole step alive as long as the request keeps its chunk.
            own = values[part].copy(), top_ids[part, :k].copy(), top_values[part, :k].copy()
            own_ranks = ranks[part].copy() if ranks is not None and is_ranked else None
            own_named = named_values[part, :names].copy() if named_values is not None and names else None
            result.append(TokenLogprobs(token_ids, *own, own_ranks, own_named))
            start += length
        return result


@torch.inference_mode()
def output_logprobs(
    logits: torch.Tensor,
    next_ids: torch.Tensor,
    lengths: Sequence[int],
    top_ks: Sequence[int],
    named: Sequence[Sequence[int]] = (),
) -> LogprobsInFlight:
    """Logprobs of the new tokens of each sequence.

    logits: float32 [sum of lengths, vocab], raw; next_ids: int64 [sum of lengths], what was sampled; top_ks: likeliest
    tokens wanted by each; named: ids that each names, empty if none does.
    """
    tensors, lengths = [*_score(logits, next_ids, max(top_ks, default=0))], list(lengths)
    if not named:
        return LogprobsInFlight(tensors, lengths, top_ks)
    table, row_of = _named_table(named, np.repeat(np.arange(len(named)), lengths), logits.device)
    return LogprobsInFlight(
        [*tensors, _named_values(logits, table[row_of])], lengths, top_ks, named=[len(ids) for ids in named]
    )


@torch.inference_mode()
def input_logprobs(
    hidden: torch.Tensor,
    target_ids: Sequence[np.ndarray],
    top_ks: Sequence[int],
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
    ranked: Sequence[bool] = (),
    named: Sequence[Sequence[int]] = (),
) -> LogprobsInFlight:
    """Logprobs of prompt tokens, and the ranks of those of ``ranked`` sequences.

    hidden: [sum of lengths, hidden_size], the final hidden states that predict the targets, request after request;
    target_ids: int32 [length] for each request, the tokens that really follow; top_ks, named as above;
    compute_logits: [s, hidden_size] -> float32 [s, vocab], called on at most PROMPT_SLICE rows at a time.
    """
    lengths = [len(ids) for ids in target_ids]
    if sum(lengths) != len(hidden):
        raise ValueError(f"{len(hidden)} hidden states for {sum(lengths)} target tokens; they must be as many")
    (targets,) = upload([np.concatenate([np.empty(0, dtype=np.int64), *target_ids])], hidden.device)
    k_of_token = np.repeat(np.asarray(top_ks, dtype=np.int64), lengths)
    values = torch.empty(len(hidden), device=hidden.device)
    # A slice without a wide request leaves its last columns zero.
    top_ids = torch.zeros(len(hidden), max(top_ks, default=0), dtype=torch.int32, device=hidden.device)
    top_values = torch.zeros(top_ids.shape, device=hidden.device)
    ranks = [torch.empty(len(hidden), dtype=torch.int32, device=hidden.device)] if any(ranked) else []
    named_parts: list[torch.Tensor] = []
    named_ids = _named_table(named, np.repeat(np.arange(len(lengths)), lengths), hidden.device) if named else None
    for start in range(0, len(hidden), PROMPT_SLICE):
        part = slice(start, start + PROMPT_SLICE)
        logits = compute_logits(hidden[part])
        values[part], ids, top = _score(logits, targets[part], int(k_of_token[part].max()))
        top_ids[part, : ids.shape[1]], top_values[part, : ids.shape[1]] = ids, top
        for column in ranks:
            column[part] = _ranks(logits, targets[part])
        if named_ids is not None:
            table, row_of = named_ids
            named_parts.append(_named_values(logits, table[row_of[part]]))
    tensors = [values, top_ids, top_values, *ranks]
    if named_parts:
        tensors.append(torch.cat(named_parts))
    counts = [len(ids) for ids in named] if named_parts else ()
    return LogprobsInFlight(tensors, lengths, top_ks, ranked if ranks else (), counts)


def _named_table(
    named: Sequence[Sequence[int]], owners: np.ndarray, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [sequences, most of their named ids], a row for each, filled up with 0; and ``owners``, int64 [n], the
    sequence of each token. Both on the device."""
    table = np.zeros((len(named), max(map(len, named))), dtype=np.int64)
    for row, ids in enumerate(named):
        table[row, : len(ids)] = ids
    on_device, row_of = upload([table, owners], device)
    return on_device, row_of


def _named_values(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """float32 [n, m]: logprobs of ids, int64 [n, m]; some rows at a time, to bound memory."""
    rows = _rows_at_once(logits)
    return torch.cat(
        [part.gather(-1, each) - _log_sum(part) for part, each in zip(logits.split(rows), ids.split(rows))]
    )


def _log_sum(logits: torch.Tensor) -> torch.Tensor:
    """float32 [n, 1]"""
    log_sum = logits.logsumexp(dim=-1, keepdim=True)
    # A row that says nothing has no logprobs at all.
    return log_sum.masked_fill_(~log_sum.isfinite(), torch.nan)


def _ranks(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 [n]: the place of each token among all, the likeliest at 1; equal ones share the best of their places."""
    rows = _rows_at_once(logits)
    likelier = [(part > part.gather(-1, at[:, None])).sum(-1) for part, at in zip(logits.split(rows), ids.split(rows))]
    return torch.cat(likelier) + 1


def _rows_at_once(logits: torch.Tensor) -> int:
    return max(1, SLICE_ELEMENTS[logits.device.type] // logits.shape[-1])


def _score(logits: torch.Tensor, ids: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """values float32 [n], top_ids int32 [n, k], top_values float32 [n, k]; some rows at a time, to bound memory."""
    rows = _rows_at_once(logits)
    parts = [_score_rows(*pair, k) for pair in zip(logits.split(rows), ids.split(rows))]
    values, top_ids, top_values = (column[0] if len(column) == 1 else torch.cat(column) for column in zip(*parts))
    return values, top_ids, top_values


def _score_rows(logits: torch.Tensor, ids: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    log_sum = _log_sum(logits)
    values = logits.gather(-1, ids[:, None]) - log_sum
    if k == 0:
        nothing = logits.new_empty(len(logits), 0)
        return values.view(-1), nothing.to(torch.int32), nothing
    top_logits, top_ids = top_tokens(logits, k)
    return values.view(-1), top_ids.to(torch.int32), top_logits - log_sum
