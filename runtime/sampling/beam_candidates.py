"""The best continuations of beam searches, from logits: log-softmax and top-k over (beam, token) pairs, on the device.

What is ranked, as in transformers' beam search (processors act on log-probabilities, nothing is normalised again):

    score of a beam + log_softmax(logits)[token] + logit_bias[token]         no eos, no stop id while `bans_ends`

Without an item trie all pairs count, and no [rows, vocab] tensor of scores is ever made. The vocabulary is cut into
chunks; the k best pairs lie in the k chunks with the best maxima:

    logits [rows, vocab] ─▶ chunk maxima [rows, chunks] ─▶ k best chunks ─▶ their k × CHUNK pairs ─▶ k best pairs

With a trie only the pairs it allows are gathered. Both ways give the same order for ties: lower beam, then lower id.
Searches of one shape are ranked together. Pairs that cannot be (-inf, NaN) are no candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...scheduler.batch import BeamCandidates, BeamStep
from ..runner.device_copy import to_host, upload
from .ops import TORCH_OPS, SamplingOps
from .ranking import SLICE_ELEMENTS, chunk_maxima, top_tokens

CHUNK = 128
"""Tokens per chunk. Near the square root of vocab / (k / rows), where maxima and gathered pairs are as many."""

MAX_PADDING = 2
"""Searches with tries are ranked together while the longest list of pairs is at most so many times the shortest."""


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
    """Holds what is the same for every step; no state."""

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
    def rank(self, logits: torch.Tensor, steps: Sequence[BeamStep]) -> list[BeamCandidates]:
        """One BeamCandidates for each step; ``stops`` are left empty.

        logits: float32 [rows, vocab], raw, left as they are: the rows of all steps, one step after the other. Every
        step wants at least one candidate.
        """
        firsts = _starts([step.stop - step.start for step in steps])
        maxima, *shape = self._ops.row_statistics(logits, CHUNK)
        softmax = _LogSoftmax(*shape)
        (scores,) = upload([np.concatenate([step.scores for step in steps])], self._device)
        ranked = [
            *self._rank_all(logits, maxima, softmax, scores, steps, firsts),
            *self._rank_allowed(logits, softmax, scores, steps, firsts),
        ]
        likeliest = self._likeliest(logits, softmax, steps, firsts)
        # One copy to the host for all of it.
        arrays = iter(to_host([t for part in ranked for t in part.tensors()] + [t for _, t in likeliest]).wait())
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
                )
            )
        return result

    def _end_ids(self, step: BeamStep) -> list[int]:
        """Token ids that end a sequence of this search."""
        request = step.request
        eos = self._eos_token_ids if request.ends_at_eos else ()
        return [i for i in sorted({*eos, *request.sampling.stop_token_ids}) if 0 <= i < self._vocab_size]

    def _bias(self, step: BeamStep) -> dict[int, float]:
        """logit_bias of the search, bans included, by token id."""
        named = step.request.sampling.logit_bias or {}
        bias = {i: value for i, value in named.items() if 0 <= i < self._vocab_size}
        return bias | dict.fromkeys(self._end_ids(step), -float("inf")) if step.bans_ends else bias

    # -- log-softmax ---------------------------------------------------------------------------------------------------

    def _likeliest(
        self, logits: torch.Tensor, softmax: _LogSoftmax, steps: Sequence[BeamStep], firsts: Sequence[int]
    ) -> list[tuple[int, torch.Tensor]]:
        """(step, ids int32 [rows, top_k]) and then (step, logprobs float32 [rows, top_k]), where they are wanted."""
        found = []
        for i, (step, first) in enumerate(zip(steps, firsts)):
            options = step.request.logprobs
            if options is None or options.top_k == 0:
                continue
            rows = torch.arange(first, first + step.stop - step.start, device=logits.device)
            parts = [
                top_tokens(part, options.top_k) for part in logits[first : first + len(rows)].split(self._rows_at_once)
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
        steps: Sequence[BeamStep],
        firsts: Sequence[int],
    ) -> Iterator[_Ranked]:
        by_shape: dict[tuple[int, int], list[int]] = {}
        for i, step in enumerate(steps):
            if step.allowed is None:
                by_shape.setdefault((step.stop - step.start, step.num_candidates), []).append(i)
        biased = self._biased(logits, [(steps[i], firsts[i]) for members in by_shape.values() for i in members])
        if biased is not logits:
            maxima = chunk_maxima(biased, CHUNK)
        for (width, count), members in by_shape.items():
            rows = np.array([firsts[i] for i in members])[:, None] + np.arange(width)
            yield _Ranked(members, *self._top_pairs(logits, biased, maxima, softmax, scores, rows, count))

    def _biased(self, logits: torch.Tensor, members: list[tuple[BeamStep, int]]) -> torch.Tensor:
        """The logits with each search's bias and bans, on a copy; the same tensor where there are none."""
        rows, tokens, values = [], [], []
        for step, first in members:
            bias, width = self._bias(step), step.stop - step.start
            if bias:
                rows.append(np.repeat(np.arange(first, first + width), len(bias)))
                tokens.append(np.tile(np.array(list(bias)), width))
                values.append(np.tile(np.array(list(bias.values()), dtype=np.float32), width))
        if not rows:
            return logits
        row, token, value = upload(
            [np.concatenate(rows), np.concatenate(tokens), np.concatenate(values)], logits.device
        )
        biased = logits.clone()
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
        """host_rows: int64 [searches, width]. scores, logprobs, rows, tokens, [searches, k] each."""
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

    # -- pairs of item tries -------------------------------------------------------------------------------------------

    def _rank_allowed(
        self,
        logits: torch.Tensor,
        softmax: _LogSoftmax,
        scores: torch.Tensor,
        steps: Sequence[BeamStep],
        firsts: Sequence[int],
    ) -> Iterator[_Ranked]:
        lists = [
            _PairList(i, *self._pairs(step, first))
            for i, (step, first) in enumerate(zip(steps, firsts))
            if step.allowed is not None
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
            score, place = top_tokens(_possible(score), max(steps[pairs.step].num_candidates for pairs in members))
            yield _Ranked(
                [pairs.step for pairs in members],
                score,
                logprobs.gather(1, place),
                rows.gather(1, place),
                tokens.gather(1, place),
            )

    def _pairs(self, step: BeamStep, first: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(row of the logits, token, bias) of every pair that the trie allows."""
        assert step.allowed is not None
        beams, tokens = step.allowed
        bias = np.zeros(len(tokens), dtype=np.float32)
        named = self._bias(step)
        if named and len(tokens):
            ids = np.array(sorted(named))
            place = np.minimum(np.searchsorted(ids, tokens), len(ids) - 1)
            values = np.array([named[i] for i in ids.tolist()], dtype=np.float32)[place]
            bias = np.where(ids[place] == tokens, values, bias)
        return first + beams, tokens, bias


@dataclass(slots=True)
class _PairList:
    """What the trie allows one search."""

    step: int
    rows: np.ndarray
    tokens: np.ndarray
    bias: np.ndarray


def _alike(lists: list[_PairList]) -> Iterator[list[_PairList]]:
    """Lists of about one length together."""
    lists = sorted(lists, key=lambda pairs: len(pairs.rows))
    while lists:
        limit = MAX_PADDING * len(lists[0].rows)
        count = sum(len(pairs.rows) <= limit for pairs in lists)
        yield lists[:count]
        lists = lists[count:]


def _starts(counts: Sequence[int]) -> list[int]:
    return (np.cumsum(counts) - counts).tolist()


def _possible(scores: torch.Tensor) -> torch.Tensor:
    """NaN, which would rank first, becomes -inf, in place."""
    return scores.masked_fill_(scores.isnan(), -float("inf"))


def _candidates(
    steps: list[int], scores: np.ndarray, logprobs: np.ndarray, rows: np.ndarray, tokens: np.ndarray
) -> Iterator[tuple[int, tuple[np.ndarray, ...]]]:
    """(step, its arrays without the pairs that cannot be)."""
    counts = np.isfinite(scores).sum(axis=1)  # best first: those that cannot be are the last
    for i, (step, count) in enumerate(zip(steps, counts.tolist())):
        yield step, (scores[i, :count], logprobs[i, :count], rows[i, :count], tokens[i, :count])
