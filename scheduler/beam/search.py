"""Beam search: which sequences a search follows, and which have finished. Numbers only; for memory see beam_memory.py.

    live beams ──forward, log-softmax, top-k (runtime)──▶ BeamCandidates ──BeamGroup.select──▶ live beams
                                                                 │
                                                                 └── ended by eos, stop, item or length ──▶ finished

The rules are those of transformers' `generate(num_beams=…)` (its vectorized beam search, version 5), so that results
can be compared: candidates that end a sequence count as finished only if they are among the best ``width``; the best
``width`` that do not end go on. Unlike there, a search that has fewer possible continuations than beams goes on with
fewer. The sequences are kept as back-pointers, one array of parents and one of tokens per step.
"""

from __future__ import annotations

from bisect import insort_right
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from ..batch import BeamCandidates
from ..constraints.constraint import AllowedTokens, Constraint, ConstraintState
from ..outcome import FinishReason, Retained
from ..sampling_params import SamplingParams

_SAFE_DIVISOR = 1e-30
"""Between this and its inverse a float32 divides any score, which is above -1e8, by length ** length_penalty."""


@dataclass(slots=True, eq=False)
class Hypothesis:
    """A finished sequence."""

    ids: np.ndarray
    """int32 [generated tokens], the one that ended it included."""
    score: float
    """cumulative log-probability (logit_bias included) / len(ids) ** length_penalty."""
    cumulative_logprob: float
    """Sum of ``logprobs``."""
    logprobs: np.ndarray
    """float32 [generated tokens]"""
    finish: FinishReason
    kept_tokens: int
    """Output tokens that a continuation inherits: a matched stop is left out, unless no_stop_trim."""
    visible_tail: str = ""
    """Text between the inherited tokens and a matched stop string, which the client sees."""
    slots: np.ndarray | None = None
    """int32: the slots of its tokens behind the whole pages of the prompt, if its KV is kept for a lease."""
    state: int = 0
    """Slot of the recurrent state after those tokens, which `BeamKV.kept_states` names; 0 for none."""
    top_ids: np.ndarray | None = None
    """int32 [generated tokens, top_k], if the request asked for them; likewise below."""
    top_logprobs: np.ndarray | None = None
    """float32 [generated tokens, top_k]"""


@dataclass(slots=True)
class _Step:
    """One selected step. Beam j of the step came from beam ``parents[j]`` of the step before."""

    parents: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    top_ids: np.ndarray | None
    top_logprobs: np.ndarray | None


@dataclass(slots=True, frozen=True)
class _Paths:
    """n sequences of equal length, from the prompt on; the fields of `Hypothesis`, but for all of them."""

    ids: np.ndarray
    logprobs: np.ndarray
    cumulative_logprobs: list[float]
    top_ids: np.ndarray | None
    top_logprobs: np.ndarray | None


@dataclass(slots=True, frozen=True)
class Selection:
    """The choice of a step. parents: int32 [live], the former beam that each live beam continues. finished: sequences
    that have just entered the results, each with the former beam it came from."""

    parents: np.ndarray
    finished: list[tuple[Hypothesis, int]] = field(default_factory=list)


class BeamGroup:
    """The state of one search."""

    def __init__(
        self, sampling: SamplingParams, max_new_tokens: int, constraint: Constraint | None, num_end_ids: int
    ) -> None:
        """num_end_ids: how many token ids end a sequence of this request."""
        assert sampling.beam_width is not None
        self._sampling = sampling
        self._max_new_tokens = max_new_tokens
        self._constraint = constraint
        self.width = sampling.beam_width
        self._num_candidates = max(2, 1 + num_end_ids) * self.width
        self._constraint_ends = constraint is not None and not (constraint.eos_ends and num_end_ids)
        """Outputs end where the constraint says so. Otherwise an eos token follows: the only one that may."""
        self.scores = np.zeros(1, dtype=np.float32)
        """float32 [live]: accumulated log-probability of each live beam, best first. Before the first step there is
        one: the prompt."""
        self._states: ConstraintState | None = constraint.start() if constraint is not None else None
        """Position of each live beam in the constraint."""
        self._steps: list[_Step] = []
        self.finished: list[Hypothesis] = []
        """Best first, at most ``width``."""
        self.retained: list[Retained | None] = []
        """Outcome of retain_ttl for each of ``results``; set at the end, if the request asked for it."""
        self.done = False

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far, in each live beam."""
        return len(self._steps)

    @property
    def num_live(self) -> int:
        return len(self.scores)

    @property
    def results(self) -> list[Hypothesis]:
        """The sequences that the request returns, best first; final once the search is done."""
        return self.finished[: self._sampling.n]

    @property
    def shortfall(self) -> str | None:
        """Why there are fewer results than asked for; None if there are as many."""
        found, wanted = len(self.finished), self._sampling.n
        if found >= wanted:
            return None
        if self._constraint is None:
            return (
                f"{found} of {wanted} sequences: no beam could go on (all ended, or no token had a finite probability)"
            )
        name = self._constraint.name
        return f"{found} of {wanted} sequences: {name} has no more within max_new_tokens {self._max_new_tokens}"

    def tokens_at(self, position: int) -> np.ndarray:
        """int32 [live]: each live beam's token at this position of its output."""
        if position == self.num_tokens - 1:
            return self._steps[-1].tokens
        return self.sequences()[:, position]

    # -- inputs of a step ----------------------------------------------------------------------------------------------

    @property
    def num_candidates(self) -> int:
        """How many continuations the next step ranks: enough that ``width`` of them do not end. Where outputs
        differ in length, that takes all of them."""
        if self._constraint is not None and self._constraint_ends and not self._constraint.is_uniform:
            assert self._states is not None
            return int(self._states.num_allowed().sum())
        return self._num_candidates

    @property
    def bans_ends(self) -> bool:
        return self.num_tokens < self._sampling.min_new_tokens

    def allowed(self) -> AllowedTokens | None:
        """The only continuations of each live beam; None without a constraint."""
        return None if self._states is None else self._states.allowed()

    # -- results of a step ---------------------------------------------------------------------------------------------

    def select(self, candidates: BeamCandidates, end_ids: Collection[int]) -> Selection:
        """Take the ranked continuations of the live beams; sets ``done``. end_ids: eos and stop ids of the request."""
        length = self.num_tokens + 1
        is_last = length >= self._max_new_tokens
        endings = self._endings(candidates, length, end_ids)
        self._steps.append(
            _Step(
                candidates.parents,
                candidates.tokens,
                candidates.logprobs,
                candidates.top_ids,
                candidates.top_logprobs,
            )
        )
        best = range(min(self.width, len(candidates.tokens)))
        if not is_last:
            ending = [rank for rank in best if rank in endings]
            goes_on = np.ones(len(candidates.tokens), dtype=bool)
            goes_on[list(endings)] = False
            running = np.flatnonzero(goes_on)[: self.width]
        else:
            # Without an ending it is cut off by its length; but the start of an item is not an item.
            cut_is_whole = self._constraint is None or not self._constraint.must_complete
            ending = [rank for rank in best if rank in endings or cut_is_whole]
            running = np.empty(0, dtype=np.int64)
        finished = self._finish(ending, endings, candidates) if ending else []
        parents = candidates.parents[running]
        self._keep(running, candidates)
        self.done = is_last or not len(running) or not self._can_improve()
        return Selection(parents, finished)

    def _endings(
        self, candidates: BeamCandidates, length: int, end_ids: Collection[int]
    ) -> dict[int, tuple[FinishReason, int, str]]:
        """The candidates that end their sequence: rank -> (why, tokens that a child inherits, visible tail)."""
        trimmed = not self._sampling.no_stop_trim
        endings: dict[int, tuple[FinishReason, int, str]] = {}
        if self._constraint is not None and self._states is not None and self._constraint_ends:
            states = self._states.select(candidates.parents).advance(candidates.tokens)
            reason = FinishReason(type="stop", matched=self._constraint.matched)
            for rank in np.flatnonzero(states.at_end()).tolist():
                endings[rank] = reason, length, ""
        if length <= self._sampling.min_new_tokens:
            return endings
        for rank, match in candidates.stops.items():
            kept, tail = (match.kept_tokens, match.visible_tail) if trimmed else (length, "")
            endings[rank] = FinishReason(type="stop", matched=self._sampling.stop[match.stop_index]), kept, tail
        # An id takes precedence over a stop string, and that over the end that a constraint sets.
        if end_ids:
            for rank, token_id in enumerate(candidates.tokens.tolist()):
                if token_id in end_ids:
                    reason = FinishReason(type="stop", matched=token_id)
                    endings[rank] = reason, length - 1 if trimmed else length, ""
        return endings

    def _finish(
        self, ranks: list[int], endings: dict[int, tuple[FinishReason, int, str]], candidates: BeamCandidates
    ) -> list[tuple[Hypothesis, int]]:
        """Enter these candidates of the newest step, best first, into the results if they are good enough. Returns
        those that are, each with the beam it came from."""
        if self._sampling.early_stopping is True and len(self.finished) >= self.width:
            return []
        of_length = FinishReason(type="length"), self.num_tokens, ""
        scores = self._scores_at_end(candidates.scores[ranks])
        paths = self._paths(np.array(ranks))
        entered: list[tuple[Hypothesis, int]] = []
        for i, (rank, score) in enumerate(zip(ranks, scores)):
            if len(self.finished) >= self.width and score <= self.finished[-1].score:
                continue
            reason, kept, tail = endings.get(rank, of_length)
            hypothesis = Hypothesis(
                ids=paths.ids[i],
                score=score,
                cumulative_logprob=paths.cumulative_logprobs[i],
                logprobs=paths.logprobs[i],
                finish=reason,
                kept_tokens=kept,
                visible_tail=tail,
                top_ids=None if paths.top_ids is None else paths.top_ids[i],
                top_logprobs=None if paths.top_logprobs is None else paths.top_logprobs[i],
            )
            insort_right(self.finished, hypothesis, key=lambda other: -other.score)
            del self.finished[self.width :]
            entered.append((hypothesis, int(candidates.parents[rank])))
        return [pair for pair in entered if pair[0] in self.finished]

    def _scores_at_end(self, scores: np.ndarray, length: int | None = None) -> list[float]:
        """Scores of sequences that end with the newest step, or at a length. scores: float32 [n], accumulated
        log-probabilities. In float32, as transformers divides; in float64 where that cannot hold the divisor, or could
        not hold the quotient."""
        divisor = float(self.num_tokens if length is None else length) ** self._sampling.length_penalty
        if _SAFE_DIVISOR <= divisor <= 1.0 / _SAFE_DIVISOR:
            return (scores / np.float32(divisor)).tolist()
        return (scores.astype(np.float64) / divisor).tolist()

    def _keep(self, ranks: np.ndarray, candidates: BeamCandidates) -> None:
        """Make these candidates the live beams."""
        step = self._steps[-1]
        if self._states is not None:
            self._states = self._states.select(candidates.parents[ranks]).advance(candidates.tokens[ranks])
        self.scores = candidates.scores[ranks]
        step.parents, step.tokens, step.logprobs = step.parents[ranks], step.tokens[ranks], step.logprobs[ranks]

    def _can_improve(self) -> bool:
        """Could a live beam still enter the results?"""
        if len(self.finished) < self.width:
            return True
        early, penalty = self._sampling.early_stopping, self._sampling.length_penalty
        if early is True:
            return False
        length = self._max_new_tokens if early == "never" and penalty > 0.0 else self.num_tokens
        return self._scores_at_end(self.scores[:1], length)[0] > self.finished[-1].score

    # -- sequences -----------------------------------------------------------------------------------------------------

    def sequences(self) -> np.ndarray:
        """int32 [live, num_tokens]: the tokens that the live beams have generated."""
        beam = np.arange(self.num_live, dtype=np.int32)
        ids = np.empty((self.num_live, self.num_tokens), dtype=np.int32)
        for position in range(self.num_tokens - 1, -1, -1):
            step = self._steps[position]
            ids[:, position] = step.tokens[beam]
            beam = step.parents[beam]
        return ids

    def _paths(self, beams: np.ndarray) -> _Paths:
        """Everything that these beams (int [n]) of the newest step have generated."""
        places: list[np.ndarray] = []
        for step in reversed(self._steps):
            places.append(beams)
            beams = step.parents[beams]
        places.reverse()
        origins = [step.parents[beams] for step, beams in zip(self._steps, places)]

        def gather(parts: list[np.ndarray], rows: list[np.ndarray]) -> np.ndarray:
            return np.stack([part[beams] for part, beams in zip(parts, rows, strict=True)], axis=1)

        logprobs = gather([step.logprobs for step in self._steps], places)
        # The likeliest tokens after a beam are stored for that beam, not for its continuations.
        top_ids = [step.top_ids for step in self._steps if step.top_ids is not None]
        top_logprobs = [step.top_logprobs for step in self._steps if step.top_logprobs is not None]
        return _Paths(
            ids=gather([step.tokens for step in self._steps], places),
            logprobs=logprobs,
            cumulative_logprobs=logprobs.sum(axis=1, dtype=np.float64).tolist(),
            top_ids=gather(top_ids, origins) if top_ids else None,
            top_logprobs=gather(top_logprobs, origins) if top_logprobs else None,
        )
