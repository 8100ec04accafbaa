"""The best continuations of beam searches, from logits: log-softmax and top-k over (beam, token) pairs, on the device.

The score of a pair, as in transformers' beam search (processors act on log-probabilities, nothing is normalised again):

    score of a beam + log_softmax(logits)[token] + logit_bias[token]         no eos, no stop id while `bans_ends`

Without a constraint all pairs count, and no [rows, vocab] tensor of scores is ever made. The vocabulary is cut into
chunks; the k best pairs lie in the k chunks with the best maxima:

    logits [rows, vocab] ─▶ chunk maxima [rows, chunks] ─▶ k best chunks ─▶ their k × CHUNK pairs ─▶ k best pairs

With a constraint that allows few tokens, as item tries do, only the pairs it allows are gathered; with one that allows
many, the others' logits become -inf. All ways give the same order for ties: lower beam, then lower id.
Searches of one shape are ranked together. Impossible pairs (-inf, NaN) are no candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...scheduler.batch import BeamCandidates, BeamStep
from ...scheduler.constraints.constraint import AllowedTokens
from ..runner.device_copy import to_host, upload
from .ops import TORCH_OPS, SamplingOps
from .ranking import SLICE_ELEMENTS, chunk_maxima, top_tokens
from .sequences import SequenceState
from .token_masks import allow_only

CHUNK = 128
"""Tokens per chunk. Near the square root of vocab / (k / rows), where there are as many maxima as gathered pairs."""

MAX_PADDING = 2
"""Searches are ranked together while the longest list of allowed pairs is at most this many times the shortest."""

DENSE_SHARE = 0.25
"""If at least this share of all pairs is allowed, they are not gathered; the others become -inf."""


@dataclass(slots=True)
class _LogSoftmax:
    """log_softmax of single logits of each row: (logit - best) - log_sum, the order that torch uses too. A row that
    holds a NaN, or nothing but -inf, is all NaN."""

    best: torch.Tensor
    """float32 [rows]"""
    log_sum: torch.Tensor
    """float32 [rows]"""

    def __call__(self, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """logits and rows (int64) of shapes that broadcast."""
        return (logits - self.best[rows]) - self.log_sum[rows]


@dataclass(slots=True)
class _Search:
    """A step, and the parameters of its search."""

    step: BeamStep
    bias: dict[int, float]
    """logit_bias, bans included, by token id."""
    top_k: int
    """Likeliest tokens wanted after each beam."""
    pairs: tuple[np.ndarray, np.ndarray] | None
    """int32 [m] each, (row counted from step.start, token): the allowed pairs, if they are few."""

    @property
    def width(self) -> int:
        return self.step.stop - self.step.start


@dataclass(slots=True)
class _Ranked:
    """The best pairs of some searches; [searches, k] each. Where ``scores`` is not finite there is no candidate."""

    steps: list[int]
    scores: torch.Tensor
    logprobs: torch.Tensor
    rows: torch.Tensor
    """Row of the logits."""
    tokens: torch.Tensor

    def tensors(self) -> list[torch.Tensor]:
        return [self.scores, self.logprobs, self.rows.to(torch.int32), self.tokens.to(torch.int32)]


class BeamRanker:
    """Ranks the continuations of a step's searches. Keeps no state between steps."""

    def __init__(
        self,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device | str,
        ops: SamplingOps = TORCH_OPS,
    ) -> None:
        self._ops = ops
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._device = torch.device(device)
        self._rows_at_once = max(1, SLICE_ELEMENTS[self._device.type] // vocab_size)

    @torch.inference_mode()
    def rank(
        self, logits: torch.Tensor, steps: Sequence[BeamStep], sequences: Sequence[SequenceState]
    ) -> list[BeamCandidates]:
        """One BeamCandidates for each step; ``stops`` are left empty.

        logits: float32 [rows, vocab], raw, not changed: the rows of all steps, one step after the other. Every
        step needs at least one candidate. sequences: the search of each step.
        """
        searches = [self._search(step, sequence) for step, sequence in zip(steps, sequences, strict=True)]
        firsts = _starts([step.stop - step.start for step in steps])
        maxima, best, log_sum = self._ops.row_statistics(logits, CHUNK)
        softmax = _LogSoftmax(best, log_sum)
        (scores,) = upload([np.concatenate([step.scores for step in steps])], self._device)
        ranked = [
            *self._rank_all(logits, maxima, softmax, scores, searches, firsts),
            *self._rank_allowed(logits, softmax, scores, searches, firsts),
        ]
        likeliest = self._likeliest(logits, softmax, searches, firsts)
        # One copy to the host for all of it.
        tensors = [t for part in ranked for t in part.tensors()] + [t for _, t in likeliest]
        *copied, log_sums = to_host([*tensors, softmax.log_sum]).wait()
        arrays = iter(copied)
        found = {i: pairs for part in ranked for i, pairs in _candidates(part.steps, *(next(arrays) for _ in range(4)))}
        tops: dict[int, list[np.ndarray]] = {}
        for i, _ in likeliest:
            tops.setdefault(i, []).append(next(arrays))
        result = []
        for i, (step, first) in enumerate(zip(steps, firsts)):
            top_ids, top_logprobs = tops.get(i, (None, None))
            pair_scores, logprobs, rows, tokens = (values[: step.num_candidates] for values in found[i])
            result.append(
                BeamCandidates(
                    parents=rows - np.int32(first),
                    tokens=tokens,
                    scores=pair_scores,
                    logprobs=logprobs,
                    top_ids=top_ids,
                    top_logprobs=top_logprobs,
                    is_finite=bool(np.isfinite(log_sums[first : first + step.stop - step.start]).all()),
                )
            )
        return result

    def _search(self, step: BeamStep, sequence: SequenceState) -> _Search:
        sampling, options = sequence.sampling, sequence.info.logprobs
        bias = {i: value for i, value in (sampling.logit_bias or {}).items() if 0 <= i < self._vocab_size}
        if step.bans_ends:
            eos = self._eos_token_ids if sequence.info.eos_ends and not sampling.ignore_eos else ()
            ends = sorted({*eos, *sampling.stop_token_ids})
            bias |= {i: -float("inf") for i in ends if 0 <= i < self._vocab_size}
        pairs = None
        if step.allowed is not None:
            are_few = step.allowed.count() < DENSE_SHARE * (step.stop - step.start) * self._vocab_size
            pairs = step.allowed.unpack() if are_few else None
        return _Search(step, bias, options.top_k if options is not None else 0, pairs)

    # -- log-softmax ---------------------------------------------------------------------------------------------------

    def _likeliest(
        self, logits: torch.Tensor, softmax: _LogSoftmax, searches: Sequence[_Search], firsts: Sequence[int]
    ) -> list[tuple[int, torch.Tensor]]:
        """(step, ids int32 [rows, top_k]), then (step, logprobs float32 [rows, top_k]), for steps that want them."""
        found = []
        for i, (search, first) in enumerate(zip(searches, firsts)):
            if search.top_k == 0:
                continue
            rows = torch.arange(first, first + search.width, device=logits.device)
            parts = [
                top_tokens(part, search.top_k) for part in logits[first : first + len(rows)].split(self._rows_at_once)
            ]
            values, ids = (torch.cat(column) for column in zip(*parts))
            found += [(i, ids.to(torch.int32)), (i, softmax(values, rows.unsqueeze(1)))]
        return found

    # -- all pairs -----------------------------------------------------------------------------------------------------

    def _rank_all(
        self,
        logits: torch.Tensor,
        maxima: torch.Tensor,
        softmax: _LogSoftmax,
        scores: torch.Tensor,
        searches: Sequence[_Search],
        firsts: Sequence[int],
    ) -> Iterator[_Ranked]:
        by_shape: dict[tuple[int, int], list[int]] = {}
        for i, search in enumerate(searches):
            if search.pairs is None:
                by_shape.setdefault((search.width, search.step.num_candidates), []).append(i)
        biased = self._biased(logits, [(searches[i], firsts[i]) for members in by_shape.values() for i in members])
        if biased is not logits:
            maxima = chunk_maxima(biased, CHUNK)
        for (width, count), members in by_shape.items():
            rows = np.array([firsts[i] for i in members])[:, None] + np.arange(width)
            yield _Ranked(members, *self._top_pairs(logits, biased, maxima, softmax, scores, rows, count))

    def _biased(self, logits: torch.Tensor, members: list[tuple[_Search, int]]) -> torch.Tensor:
        """Apply each search's allowed tokens, bias and bans to a copy of the logits; without any, return the same
        tensor."""
        allowed = AllowedTokens.join(
            [(first, search.step.allowed) for search, first in members if search.step.allowed is not None]
        )
        rows, tokens, values = [], [], []
        for search, first in members:
            bias, width = search.bias, search.width
            if bias:
                rows.append(np.repeat(np.arange(first, first + width), len(bias)))
                tokens.append(np.tile(np.array(list(bias)), width))
                values.append(np.tile(np.array(list(bias.values()), dtype=np.float32), width))
        if allowed is None and not rows:
            return logits
        biased = logits.clone()
        if allowed is not None:
            constrained = [np.arange(first, first + s.width) for s, first in members if s.step.allowed is not None]
            allow_only(biased, allowed, self._ops, rows=np.concatenate(constrained))
        if not rows:
            return biased
        row, token, value = upload(
            [np.concatenate(rows), np.concatenate(tokens), np.concatenate(values)], logits.device
        )
        biased[row, token] += value
        return biased

    def _top_pairs(
        self,
        logits: torch.Tensor,
        biased: torch.Tensor,
        maxima: torch.Tensor,
        softmax: _LogSoftmax,
        scores: torch.Tensor,
        host_rows: np.ndarray,
        count: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return scores, logprobs, rows, tokens, [searches, k] each. host_rows: int64 [searches, width]."""
        searches, width = host_rows.shape
        chunks = maxima.shape[1]
        (rows,) = upload([host_rows], logits.device)
        beam = rows.unsqueeze(2)
        best_of_chunk = softmax(maxima[rows], beam) + scores[beam]
        _, place = top_tokens(_possible(best_of_chunk.view(searches, -1)), min(count, width * chunks))
        place = place.sort(dim=-1).values  # pairs in order of beam and token, which settles ties
        row = rows.gather(1, place // chunks).unsqueeze(2)
        token = (place % chunks * CHUNK).unsqueeze(2) + torch.arange(CHUNK, device=logits.device)
        inside = token < self._vocab_size
        token = token.clamp_(max=self._vocab_size - 1)
        score = softmax(biased[row, token], row) + scores[row]
        score = _possible(score.masked_fill_(~inside, -float("inf"))).view(searches, -1)
        score, place = top_tokens(score, count)
        token = token.view(searches, -1).gather(1, place)
        row = row.view(searches, -1).gather(1, place // CHUNK)
        return score, softmax(logits[row, token], row), row, token

    # -- few allowed pairs --------------------------------------------------------------------------------------------

    def _rank_allowed(
        self,
        logits: torch.Tensor,
        softmax: _LogSoftmax,
        scores: torch.Tensor,
        searches: Sequence[_Search],
        firsts: Sequence[int],
    ) -> Iterator[_Ranked]:
        lists = [
            _PairList(i, first + search.pairs[0], search.pairs[1], _pair_bias(search.bias, search.pairs[1]))
            for i, (search, first) in enumerate(zip(searches, firsts))
            if search.pairs is not None
        ]
        for members in _alike(lists):
            shape = len(members), max(len(pairs.rows) for pairs in members)
            row, token = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
            bias = np.full(shape, -np.inf, dtype=np.float32)  # of the padding
            for i, pairs in enumerate(members):
                count = len(pairs.rows)
                row[i, :count], token[i, :count], bias[i, :count] = pairs.rows, pairs.tokens, pairs.bias
            rows, tokens, biases = upload([row, token, bias], logits.device)
            logprobs = softmax(logits[rows, tokens], rows)
            score = logprobs + biases + scores[rows]
            score, place = top_tokens(
                _possible(score), max(searches[pairs.step].step.num_candidates for pairs in members)
            )
            yield _Ranked(
                [pairs.step for pairs in members],
                score,
                logprobs.gather(1, place),
                rows.gather(1, place),
                tokens.gather(1, place),
            )


@dataclass(slots=True)
class _PairList:
    """All pairs that one search is allowed."""

    step: int
    rows: np.ndarray
    tokens: np.ndarray
    bias: np.ndarray


def _alike(lists: list[_PairList]) -> Iterator[list[_PairList]]:
    """Group lists of similar length."""
    lists = sorted(lists, key=lambda pairs: len(pairs.rows))
    while lists:
        limit = MAX_PADDING * len(lists[0].rows)
        count = sum(len(pairs.rows) <= limit for pairs in lists)
        yield lists[:count]
        lists = lists[count:]


def _pair_bias(bias: dict[int, float], tokens: np.ndarray) -> np.ndarray:
    """float32 [m]: the bias of each pair, by its token."""
    none = np.zeros(len(tokens), dtype=np.float32)
    if not bias or not len(tokens):
        return none
    ids = np.array(sorted(bias))
    place = np.minimum(np.searchsorted(ids, tokens), len(ids) - 1)
    values = np.array([bias[i] for i in ids.tolist()], dtype=np.float32)[place]
    return np.where(ids[place] == tokens, values, none)


def _starts(counts: Sequence[int]) -> list[int]:
    return (np.cumsum(counts) - counts).tolist()


def _possible(scores: torch.Tensor) -> torch.Tensor:
    """NaN, which would rank first, becomes -inf, in place."""
    return scores.masked_fill_(scores.isnan(), -float("inf"))


def _candidates(
    steps: list[int], scores: np.ndarray, logprobs: np.ndarray, rows: np.ndarray, tokens: np.ndarray
) -> Iterator[tuple[int, tuple[np.ndarray, ...]]]:
    """Yield (step, its arrays without the impossible pairs)."""
    counts = np.isfinite(scores).sum(axis=1)  # best first, so impossible ones come last
    for i, (step, count) in enumerate(zip(steps, counts.tolist())):
        yield step, (scores[i, :count], logprobs[i, :count], rows[i, :count], tokens[i, :count])
