"""Beam search: which sequences a search follows, and which have finished. Numbers only; memory is beam_memory.py's.

    live beams ──forward, log-softmax, top-k (runtime)──▶ BeamCandidates ──BeamGroup.select──▶ live beams
                                                                 │
                                                                 └── ended by eos, stop, item or length ──▶ finished

The rules are those of transformers' `generate(num_beams=…)` (its vectorized beam search, version 5), so that results
can be compared: candidates that end a sequence count as finished only if they are among the best ``width``; the best
``width`` that do not end go on. Unlike there, a search that has fewer possible continuations than beams goes on with
fewer. The sequences are kept as back-pointers, one array of parents and one of tokens per step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from .batch import BeamCandidates
from .item_trie import ItemTrie
from .request import FinishReason, Retained
from .sampling_params import SamplingParams

ITEM = "item"
"""What `FinishReason.matched` says where a sequence ended because it is a whole item of the trie."""


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
    rest: str = ""
    """What the client sees between them and a matched stop string."""
    slots: np.ndarray | None = None
    """int32: the slots of its tokens behind the whole pages of the prompt, if its KV is kept for a lease."""
    top_ids: np.ndarray | None = None
    """int32 [generated tokens, top_k], where the request wants them; likewise below."""
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
class Selection:
    """What a step chose. parents: int32 [live], the former beam each live one goes on from. finished: those that have
    just entered the results, with the former beam they came from."""

    parents: np.ndarray
    finished: list[tuple[Hypothesis, int]] = field(default_factory=list)


class BeamGroup:
    """The state of one search."""

    def __init__(self, sampling: SamplingParams, max_new_tokens: int, trie: ItemTrie | None, num_end_ids: int) -> None:
        """num_end_ids: how many token ids end a sequence of this request."""
        assert sampling.beam_width is not None
        self._sampling = sampling
        self._max_new_tokens = max_new_tokens
        self._trie = trie
        self.width = sampling.beam_width
        self._num_candidates = max(2, 1 + num_end_ids) * self.width
        self.scores = np.zeros(1, dtype=np.float32)
        """float32 [live]: accumulated log-probability of each live beam, best first. Before the first step there is
        one: the prompt."""
        self._nodes = np.zeros(1, dtype=np.int32)
        """int32 [live]: where in the trie each live beam is."""
        self._steps: list[_Step] = []
        self.finished: list[Hypothesis] = []
        """Best first, at most ``width``."""
        self.retained: list[Retained | None] = []
        """What became of the request's retain_ttl, for each of ``results``; set at the end, if it asked for it."""
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
        """What the request returns, best first; meant for a search that is done."""
        return self.finished[: self._sampling.n]

    @property
    def shortfall(self) -> str | None:
        """Why there are fewer results than asked for; None if there are as many."""
        found, wanted = len(self.finished), self._sampling.n
        if found >= wanted:
            return None
        if self._trie is None:
            return (
                f"{found} of {wanted} sequences: no beam could go on (all ended, or no token had a finite probability)"
            )
        trie = f"the item trie {self._sampling.item_trie!r}"
        return f"{found} of {wanted} sequences: {trie} has no more within max_new_tokens {self._max_new_tokens}"

    def tokens_at(self, position: int) -> np.ndarray:
        """int32 [live]: what each live beam has generated at this place."""
        if position == self.num_tokens - 1:
            return self._steps[-1].tokens
        return self.sequences()[:, position]

    # -- what a step needs ---------------------------------------------------------------------------------------------

    @property
    def num_candidates(self) -> int:
        """How many continuations the next step has to rank: so many that ``width`` of them do not end. Where items of
        several lengths meet, that takes all of them."""
        if self._trie is not None and not self._trie.is_uniform:
            return int(self._trie.num_children(self._nodes).sum())
        return self._num_candidates

    @property
    def bans_ends(self) -> bool:
        return self.num_tokens < self._sampling.min_new_tokens

    def allowed(self) -> tuple[np.ndarray, np.ndarray] | None:
        """int32 [m] each, (beam, token id): the only continuations there are; None without a trie."""
        return None if self._trie is None else self._trie.children(self._nodes)

    # -- what a step brings --------------------------------------------------------------------------------------------

    def select(self, candidates: BeamCandidates, ends_by_id: Callable[[int], bool]) -> Selection:
        """Take the ranked continuations of the live beams; sets ``done``.

        ends_by_id: is this token id an eos or stop id of the request?
        """
        length = self.num_tokens + 1
        is_last = length >= self._max_new_tokens
        leaves = self._leaves(candidates)
        is_closed = self._sampling.early_stopping is True and len(self.finished) >= self.width
        running: list[int] = []
        finished: list[tuple[Hypothesis, int]] = []
        self._steps.append(
            _Step(
                candidates.parents,
                candidates.tokens,
                candidates.logprobs,
                candidates.top_ids,
                candidates.top_logprobs,
            )
        )
        for rank, token_id in enumerate(candidates.tokens.tolist()):
            if rank >= self.width and (is_last or len(running) == self.width):
                break  # what follows neither ends nor goes on
            reason, kept, rest = self._ending(candidates, rank, token_id, length, ends_by_id, leaves)
            if reason is None and not is_last:
                if len(running) < self.width:
                    running.append(rank)
            elif rank < self.width:
                if reason is None and self._trie is None:
                    reason, kept = FinishReason(type="length"), length
                score = self._score_at_end(candidates.scores[rank])
                # Without a reason: the start of an item is no item.
                if reason is not None and not is_closed and self._is_among_best(score):
                    hypothesis = self._finish(rank, score, reason, kept, rest)
                    self._enter(hypothesis)
                    finished.append((hypothesis, int(candidates.parents[rank])))
        kept_ranks = np.array(running, dtype=np.int32)
        parents = candidates.parents[kept_ranks]
        self._keep(kept_ranks, candidates)
        self.done = is_last or not running or not self._can_improve()
        return Selection(parents, [pair for pair in finished if pair[0] in self.finished])

    def _leaves(self, candidates: BeamCandidates) -> np.ndarray | None:
        if self._trie is None:
            return None
        return self._trie.is_leaf(self._trie.advance(self._nodes[candidates.parents], candidates.tokens))

    def _ending(
        self,
        candidates: BeamCandidates,
        rank: int,
        token_id: int,
        length: int,
        ends_by_id: Callable[[int], bool],
        leaves: np.ndarray | None,
    ) -> tuple[FinishReason | None, int, str]:
        """(why this candidate ends its sequence, or None; tokens a child inherits; visible rest)."""
        trimmed = not self._sampling.no_stop_trim
        if length > self._sampling.min_new_tokens:
            if ends_by_id(token_id):
                return FinishReason(type="stop", matched=token_id), length - 1 if trimmed else length, ""
            if (match := candidates.stops.get(rank)) is not None:
                kept, rest = (match.kept_tokens, match.rest) if trimmed else (length, "")
                return FinishReason(type="stop", matched=self._sampling.stop[match.stop_index]), kept, rest
        if leaves is not None and leaves[rank]:
            return FinishReason(type="stop", matched=ITEM), length, ""
        return None, 0, ""

    def _finish(self, rank: int, score: float, reason: FinishReason, kept: int, rest: str) -> Hypothesis:
        ids, logprobs, top_ids, top_logprobs = self._path(rank)
        return Hypothesis(
            ids=ids,
            score=score,
            cumulative_logprob=float(logprobs.sum(dtype=np.float64)),
            logprobs=logprobs,
            finish=reason,
            kept_tokens=kept,
            rest=rest,
            top_ids=top_ids,
            top_logprobs=top_logprobs,
        )

    def _score_at_end(self, score: np.floating) -> float:
        """What a sequence that ends with the newest step scores."""
        return float(np.float32(score) / np.float32(self.num_tokens**self._sampling.length_penalty))

    def _is_among_best(self, score: float) -> bool:
        return len(self.finished) < self.width or score > self.finished[-1].score

    def _enter(self, hypothesis: Hypothesis) -> None:
        """Into the results, in place of the worst."""
        place = sum(other.score >= hypothesis.score for other in self.finished)
        self.finished.insert(place, hypothesis)
        del self.finished[self.width :]

    def _keep(self, ranks: np.ndarray, candidates: BeamCandidates) -> None:
        """These candidates are the live beams now."""
        step = self._steps[-1]
        if self._trie is not None:
            self._nodes = self._trie.advance(self._nodes[candidates.parents[ranks]], candidates.tokens[ranks])
        self.scores = candidates.scores[ranks]
        step.parents, step.tokens, step.logprobs = step.parents[ranks], step.tokens[ranks], step.logprobs[ranks]

    def _can_improve(self) -> bool:
        """Could a live beam still get among the results?"""
        if len(self.finished) < self.width:
            return True
        early, penalty = self._sampling.early_stopping, self._sampling.length_penalty
        if early is True:
            return False
        length = self._max_new_tokens if early == "never" and penalty > 0.0 else self.num_tokens
        best = np.float32(self.scores[0]) / np.float32(length**penalty)
        return bool(best > np.float32(self.finished[-1].score))

    # -- sequences -----------------------------------------------------------------------------------------------------

    def sequences(self) -> np.ndarray:
        """int32 [live, num_tokens]: what the live beams have generated."""
        beam = np.arange(self.num_live, dtype=np.int32)
        ids = np.empty((self.num_live, self.num_tokens), dtype=np.int32)
        for position in range(self.num_tokens - 1, -1, -1):
            step = self._steps[position]
            ids[:, position] = step.tokens[beam]
            beam = step.parents[beam]
        return ids

    def _path(self, beam: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]:
        """(ids, logprobs, top ids, top logprobs) of one sequence, back to the prompt."""
        steps = reversed(self._steps)
        ids, logprobs, top_ids, top_logprobs = [], [], [], []
        for step in steps:
            ids.append(step.tokens[beam])
            logprobs.append(step.logprobs[beam])
            beam = int(step.parents[beam])
            if step.top_ids is not None and step.top_logprobs is not None:
                top_ids.append(step.top_ids[beam])
                top_logprobs.append(step.top_logprobs[beam])
        return (
            np.array(ids[::-1], dtype=np.int32),
            np.array(logprobs[::-1], dtype=np.float32),
            np.array(top_ids[::-1]) if top_ids else None,
            np.array(top_logprobs[::-1]) if top_logprobs else None,
        )
