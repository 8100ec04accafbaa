"""One step, from a ScheduleBatch to tokens on the host: forward, sample or rank beams, logprobs, stop strings.

Everything between the scheduler's two calls. Knows the model runner and the sampler, not the queues.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from ..scheduler.batch import BeamCandidates, BeamStep, ScheduleBatch, StepResult, StopMatch
from ..scheduler.request import Request
from .runner.device_copy import HostCopy, to_host, upload
from .runner.model_runner import ModelRunner
from .runner.step_profile import StepProfiler
from .sampling.beam_candidates import BeamRanker
from .sampling.logprobs import LogprobsInFlight, TokenLogprobs, input_logprobs, output_logprobs
from .sampling.penalties import PendingTokens
from .sampling.sampler import Sampler
from .text.stop_strings import FoundStop, StopStringChecker
from .text.token_bytes import TokenBytes


@dataclass(slots=True)
class StepOutput:
    """What a step computed: ``result`` for the scheduler, the rest for the clients."""

    result: StepResult
    output_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """Batch row -> logprobs of its new token, for requests that want them."""
    input_logprobs: list[tuple[Request, TokenLogprobs]] = field(default_factory=list)
    """Logprobs of prompt tokens this step computed, in prompt order per request."""


@dataclass(slots=True, frozen=True)
class _OutputLogprobs:
    """Logprobs of new tokens, on their way."""

    sampled: np.ndarray
    """int64 [m]: which of the sampled rows want them."""
    scores: LogprobsInFlight


@dataclass(slots=True, frozen=True)
class _InputLogprobs:
    """Logprobs of prompt tokens, on their way."""

    requests: list[Request]
    targets: list[np.ndarray]
    scores: LogprobsInFlight


@dataclass(slots=True)
class StepInFlight:
    """A step that the device works on, or has done. `StepRunner.finish` waits for it."""

    batch: ScheduleBatch
    next_ids: torch.Tensor
    """Device int64 [bs]: the sampled token of each row, anything where none is. The next step reads it there."""
    sampled_rows: np.ndarray
    """int64 [n]: the rows that sample, beams left out."""
    output_logprobs: _OutputLogprobs | None
    input_logprobs: _InputLogprobs | None
    copy: HostCopy
    """Tokens of the sampled rows, int64 [n], then the tensors of the logprobs."""
    output: StepOutput


class StepRunner:
    """Runs steps. ``load_token_bytes`` is called once, when the first request brings a stop string."""

    def __init__(
        self,
        runner: ModelRunner,
        sampler: Sampler,
        load_token_bytes: Callable[[], TokenBytes],
        profiler: StepProfiler,
    ) -> None:
        self._runner = runner
        self._profiler = profiler
        self._sampler = sampler
        self._ranker = BeamRanker(runner.config.vocab_size, runner.config.eos_token_ids, runner.device, sampler.ops)
        self._load_token_bytes = load_token_bytes
        self._stop_strings: StopStringChecker | None = None

    def run(self, batch: ScheduleBatch) -> StepOutput:
        """Compute one step and wait for it."""
        return self.finish(self.launch(batch, None))

    @torch.inference_mode()
    def launch(self, batch: ScheduleBatch, previous: StepInFlight | None) -> StepInFlight:
        """Begin a step. ``previous``: the step launched before it, if that is not finished: tokens of its that are not
        known on the host are taken over on the device."""
        previous_ids = None if previous is None else previous.next_ids
        forward = self._runner.forward(batch, previous_ids)
        output = StepOutput(StepResult(np.full(len(batch), -1, dtype=np.int32)))
        samples = batch.samples.copy()
        for step in batch.beams:
            samples[step.start : step.stop] = False
        rows = np.flatnonzero(samples)
        sampled, outputs = self._sample(forward.logits, batch, rows, previous_ids)
        inputs = None if forward.logprob_hidden is None else self._input_logprobs(forward.logprob_hidden, batch)
        scores = [wanted.scores for wanted in (outputs, inputs) if wanted is not None]
        copy = to_host([sampled, *(tensor for score in scores for tensor in score.tensors)])
        next_ids = sampled
        if len(rows) < len(batch):
            (index,) = upload([rows], sampled.device)
            next_ids = sampled.new_zeros(len(batch)).index_copy_(0, index, sampled)
        self._profiler.lap("launch")
        if batch.beams:
            output.result.beams = self._rank_beams(forward.logits, batch)  # last: it waits for what it finds
            self._profiler.lap("wait")
        return StepInFlight(batch, next_ids, rows, outputs, inputs, copy, output)

    def finish(self, step: StepInFlight) -> StepOutput:
        """Wait for a step. Tokens of requests that have ended since are dropped: nobody asked for them."""
        sampled, *arrays = step.copy.wait()
        self._profiler.lap("wait")
        batch, output = step.batch, step.output
        next_ids = output.result.next_ids
        next_ids[step.sampled_rows] = sampled
        if (outputs := step.output_logprobs) is not None:
            ids = sampled[outputs.sampled].astype(np.int32).reshape(-1, 1)
            chunks = outputs.scores.read(arrays[:3], list(ids))
            output.output_logprobs = dict(zip(step.sampled_rows[outputs.sampled].tolist(), chunks))
        if (inputs := step.input_logprobs) is not None:
            chunks = inputs.scores.read(arrays[-3:], inputs.targets)
            output.input_logprobs = [pair for pair in zip(inputs.requests, chunks) if pair[0].finish is None]
        requests = batch.requests
        for row in step.sampled_rows.tolist():
            if requests[row].finish is not None:
                next_ids[row] = -1
        if any(requests[row].sampling.stop for row in step.sampled_rows.tolist()):
            for row, found in self._stop_string_checker().check(requests, next_ids).items():
                output.result.stop_matches[row] = _stop_match(found)
        return output

    def _sample(
        self, logits: torch.Tensor, batch: ScheduleBatch, rows: np.ndarray, previous_ids: torch.Tensor | None
    ) -> tuple[torch.Tensor, _OutputLogprobs | None]:
        """Device int64 [n], a token for each of ``rows``, and the logprobs of those that want them."""
        if not len(rows):
            return torch.empty(0, dtype=torch.int64, device=logits.device), None
        requests = [batch.requests[row] for row in rows.tolist()]
        allowed = batch.allowed and {
            i: batch.allowed[row] for i, row in enumerate(rows.tolist()) if row in batch.allowed
        }
        if len(rows) < len(logits):
            logits = _take_rows(logits, _logits_rows(batch)[rows])
        pending = None
        if previous_ids is not None:
            pending = PendingTokens(batch.input_ids[np.cumsum(batch.extend_lens)[rows] - 1], previous_ids)
        sampled = self._sampler.sample(logits, requests, allowed, pending)
        top_ks = [options.top_k for r in requests if (options := r.logprobs) is not None]
        if not top_ks:
            return sampled, None
        wanted = np.array([i for i, request in enumerate(requests) if request.logprobs is not None])
        chosen = sampled
        if len(wanted) < len(requests):
            (index,) = upload([wanted], logits.device)
            logits, chosen = logits.index_select(0, index), sampled.index_select(0, index)
        return sampled, _OutputLogprobs(wanted, output_logprobs(logits, chosen, top_ks))

    def _rank_beams(self, logits: torch.Tensor, batch: ScheduleBatch) -> list[BeamCandidates | None]:
        """Parallel to batch.beams; None for searches that want no candidates."""
        steps = [step for step in batch.beams if step.num_candidates > 0]
        if not steps:
            return [None] * len(batch.beams)
        rows = np.concatenate([np.arange(step.start, step.stop) for step in steps])
        ranked = iter(self._ranker.rank(_take_rows(logits, _logits_rows(batch)[rows]), steps))
        found = [next(ranked) if step.num_candidates > 0 else None for step in batch.beams]
        for step, candidates in zip(batch.beams, found):
            if candidates is not None and step.request.sampling.stop:
                candidates.stops.update(self._stops_of(step, candidates))
        return found

    def _stops_of(self, step: BeamStep, candidates: BeamCandidates) -> dict[int, StopMatch]:
        beams = step.request.beams
        assert beams is not None, f"{step.request} is in a search that has not begun"
        matches = self._stop_string_checker().check_beams(
            step.request, beams.sequences(), candidates.parents, candidates.tokens
        )
        return {candidate: _stop_match(found) for candidate, found in matches.items()}

    def _stop_string_checker(self) -> StopStringChecker:
        if self._stop_strings is None:
            self._stop_strings = StopStringChecker(self._load_token_bytes())
        return self._stop_strings

    def forget(self, request: Request) -> None:
        """Drop what is kept for a request that ended."""
        if self._stop_strings is not None:
            self._stop_strings.drop(request.key)

    def _input_logprobs(self, hidden: torch.Tensor, batch: ScheduleBatch) -> _InputLogprobs:
        """``hidden`` holds, for each row that asks, its new tokens from logprob_start on. The last of them may predict
        a token that is no prompt token; those are left out."""
        requests: list[Request] = []
        targets: list[np.ndarray] = []
        top_ks: list[int] = []
        kept: list[np.ndarray] = []
        start = 0
        for request, prefix_len, first, count in zip(
            batch.requests, batch.prefix_lens.tolist(), batch.logprob_starts.tolist(), batch.extend_lens.tolist()
        ):
            if first == count or request.logprobs is None:
                continue
            target = request.token_ids.view(prefix_len + first + 1, min(prefix_len + count + 1, request.prompt_len))
            requests.append(request)
            targets.append(target.astype(np.int32))
            top_ks.append(request.logprobs.top_k)
            kept.append(np.arange(start, start + len(target)))
            start += count - first
        (index,) = upload([np.concatenate(kept)], hidden.device)
        scores = input_logprobs(hidden.index_select(0, index), targets, top_ks, self._runner.compute_logits)
        return _InputLogprobs(requests, targets, scores)


def _logits_rows(batch: ScheduleBatch) -> np.ndarray:
    """int64 [bs]: where the logits of a batch row are, if it has any (ForwardOutput.logits)."""
    return np.cumsum(batch.samples) - 1


def _take_rows(logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """These rows (int64 [n], ascending, at least one) of the logits; a view where they lie side by side."""
    first, count = int(rows[0]), len(rows)
    if int(rows[-1]) - first == count - 1:
        return logits[first : first + count]
    (index,) = upload([rows], logits.device)
    return logits.index_select(0, index)


def _stop_match(found: FoundStop) -> StopMatch:
    return StopMatch(found.stop_index, found.kept_tokens, found.rest)
