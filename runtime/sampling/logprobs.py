"""Log-probabilities of sampled or prompt tokens, of the likeliest tokens, and of tokens that a request names.

They are the log_softmax of the model's raw logits, before bias, penalties, temperature and filters, as in SGLang and
vLLM. The device computes them in the step and copies them to the host with the sampled tokens; the results are numpy
arrays, which go into messages as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...scheduler.batch import ScheduleBatch
from ...scheduler.request_spec import LogprobOptions
from ..runner.device_copy import upload
from .ranking import SLICE_ELEMENTS, top_tokens
from .sequences import SequenceState, SequenceTable

PROMPT_SLICE = 256
"""Hidden states turned into logits at once: 256 × 152,000 float32 are 150 MiB."""


@dataclass(slots=True, frozen=True)
class TokenLogprobs:
    """Logprobs of m consecutive tokens of one sequence, of the k likeliest tokens at each place, likeliest first, and
    of the tokens that the request names."""

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


@dataclass(slots=True, kw_only=True)
class LogprobsInFlight:
    """Logprobs that the device is computing: of n tokens, sequence after sequence. Copy ``tensors`` to the host, where
    `read_logprobs` splits them by sequence."""

    values: torch.Tensor
    """float32 [n]; NaN where a logit is NaN or +inf, or all are -inf."""
    top_ids: torch.Tensor
    """int32 [n, k], k the largest of ``top_ks``."""
    top_values: torch.Tensor
    """float32 [n, k]"""
    ranks: torch.Tensor | None = None
    """int32 [n]; None if no sequence needs ranks."""
    named_values: torch.Tensor | None = None
    """float32 [n, most named ids of a sequence]; None if no sequence names any."""
    lengths: list[int]
    """Tokens of each sequence."""
    top_ks: Sequence[int]
    """Likeliest tokens wanted by each sequence."""
    ranked: Sequence[bool] = ()
    """True for sequences that want ranks; empty if none does."""
    num_named: Sequence[int] = ()
    """Ids that each sequence names; empty if none names any."""

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors to copy to the host."""
        optional = [tensor for tensor in (self.ranks, self.named_values) if tensor is not None]
        return [self.values, self.top_ids, self.top_values, *optional]

    def read_logprobs(self, arrays: Iterable[np.ndarray], ids: Sequence[np.ndarray]) -> list[TokenLogprobs]:
        """One TokenLogprobs for each sequence. arrays: begins with ``tensors`` on the host; ids: int32 [length] each,
        the tokens."""
        on_host = iter(arrays)
        values, top_ids, top_values = next(on_host), next(on_host), next(on_host)
        ranks = next(on_host) if self.ranks is not None else None
        named_values = next(on_host) if self.named_values is not None else None
        found, start = [], 0
        for place, (token_ids, length, k) in enumerate(zip(ids, self.lengths, self.top_ks, strict=True)):
            part = slice(start, start + length)
            own_ranks = ranks[part] if ranks is not None and self.ranked[place] else None
            own_named = None
            if named_values is not None and self.num_named[place]:
                own_named = named_values[part, : self.num_named[place]]
            # Copies: a view would keep the arrays of the whole step alive as long as the request keeps its chunk.
            found.append(
                TokenLogprobs(
                    ids=token_ids,
                    values=values[part].copy(),
                    top_ids=top_ids[part, :k].copy(),
                    top_values=top_values[part, :k].copy(),
                    ranks=own_ranks.copy() if own_ranks is not None else None,
                    named_values=own_named.copy() if own_named is not None else None,
                )
            )
            start += length
        return found


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
    values, top_ids, top_values = _score(logits, next_ids, max(top_ks, default=0))
    named_values = None
    if named:
        table, row_of = _named_table(named, np.repeat(np.arange(len(named)), lengths), logits.device)
        named_values = _named_values(logits, table[row_of])
    return LogprobsInFlight(
        values=values,
        top_ids=top_ids,
        top_values=top_values,
        named_values=named_values,
        lengths=list(lengths),
        top_ks=top_ks,
        num_named=[len(ids) for ids in named],
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
    ranks = torch.empty(len(hidden), dtype=torch.int32, device=hidden.device) if any(ranked) else None
    named_parts: list[torch.Tensor] = []
    named_ids = _named_table(named, np.repeat(np.arange(len(lengths)), lengths), hidden.device) if named else None
    for start in range(0, len(hidden), PROMPT_SLICE):
        part = slice(start, start + PROMPT_SLICE)
        logits = compute_logits(hidden[part])
        values[part], ids, top = _score(logits, targets[part], int(k_of_token[part].max()))
        top_ids[part, : ids.shape[1]], top_values[part, : ids.shape[1]] = ids, top
        if ranks is not None:
            ranks[part] = _ranks(logits, targets[part])
        if named_ids is not None:
            table, row_of = named_ids
            named_parts.append(_named_values(logits, table[row_of[part]]))
    return LogprobsInFlight(
        values=values,
        top_ids=top_ids,
        top_values=top_values,
        ranks=ranks,
        named_values=torch.cat(named_parts) if named_parts else None,
        lengths=lengths,
        top_ks=top_ks,
        ranked=ranked if ranks is not None else (),
        num_named=[len(ids) for ids in named] if named_parts else (),
    )


@dataclass(slots=True, frozen=True)
class SampledLogprobs:
    """Logprobs of the tokens that a step samples, on their way to the host."""

    rows: list[int]
    """The batch rows that want them."""
    sampled: np.ndarray
    """int64 [m]: indices of these rows' tokens among the sampled tokens."""
    scores: LogprobsInFlight

    def read_rows(
        self, arrays: Iterable[np.ndarray], sampled: np.ndarray, counts: np.ndarray
    ) -> dict[int, TokenLogprobs]:
        """Batch row -> logprobs of its first ``counts`` tokens. arrays: see `LogprobsInFlight.read_logprobs`; sampled:
        int [n], the sampled tokens; counts: int [bs]."""
        ids = np.split(sampled[self.sampled].astype(np.int32), np.cumsum(self.scores.lengths)[:-1])
        chunks = self.scores.read_logprobs(arrays, ids)
        return {row: chunk.first(counts[row]) for row, chunk in zip(self.rows, chunks)}


def sampled_logprobs(
    logits: torch.Tensor, sampled: torch.Tensor, sequences: Sequence[SequenceState], rows: np.ndarray
) -> SampledLogprobs | None:
    """Compute the logprobs of sampled tokens; None if no sequence needs any. The arguments are parallel: logits,
    tokens, their sequences and their batch rows."""
    if all(sequence.info.logprobs is None for sequence in sequences):
        return None
    wanted = np.array([i for i, sequence in enumerate(sequences) if sequence.info.logprobs is not None])
    if len(wanted) < len(sequences):
        (index,) = upload([wanted], logits.device)
        logits, sampled = logits.index_select(0, index), sampled.index_select(0, index)
    own, firsts, lengths = np.unique(rows[wanted], return_index=True, return_counts=True)
    asked = [options for i in wanted[firsts] if (options := sequences[i].info.logprobs) is not None]
    top_ks = [options.top_k for options in asked]
    scores = output_logprobs(logits, sampled, lengths.tolist(), top_ks, _named_ids(asked))
    return SampledLogprobs(own.tolist(), wanted, scores)


def prompt_logprobs(
    hidden: torch.Tensor,
    batch: ScheduleBatch,
    sequences: SequenceTable,
    compute_logits: Callable[[torch.Tensor], torch.Tensor],
) -> LogprobsInFlight:
    """Logprobs of the prompt tokens that a step computes, one entry for each of batch.logprob_targets.

    hidden: for each row that asks, the states of its new tokens from logprob_start on. The last may predict a token
    beyond the prompt; those are left out.
    """
    counts = batch.extend_lens - batch.logprob_starts
    ends = np.cumsum(counts[counts > 0]).tolist()
    starts = [0, *ends[:-1]]
    targets = batch.logprob_targets
    kept = [np.arange(start, start + len(target)) for start, target in zip(starts, targets, strict=True)]
    asked: list[LogprobOptions] = []
    for serial in batch.serials[logprob_rows(batch)].tolist():
        options = sequences[serial].info.logprobs
        assert options is not None, "only sequences with logprobs have targets"
        asked.append(options)
    (index,) = upload([np.concatenate(kept)], hidden.device)
    return input_logprobs(
        hidden.index_select(0, index),
        targets,
        [options.input_top_k for options in asked],
        compute_logits,
        [options.ranks_prompt for options in asked],
        _named_ids(asked),
    )


def logprob_rows(batch: ScheduleBatch) -> np.ndarray:
    """int64 [n]: the row of each entry of batch.logprob_targets."""
    return np.flatnonzero(batch.logprob_starts < batch.extend_lens)


def _named_ids(asked: list[LogprobOptions]) -> list[tuple[int, ...]]:
    """The ids that each request names; empty if none names any."""
    named = [options.token_ids for options in asked]
    return named if any(named) else []


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
    # A row without a finite sum has no logprobs at all.
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
