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
from .beam_candidates import BeamRanker
from .logprobs import TokenLogprobs, input_logprobs, output_logprobs
from .model_runner import ModelRunner
from .sampler import Sampler
from .stop_strings import FoundStop, StopStringChecker
from .token_bytes import TokenBytes


@dataclass(slots=True)
class StepOutput:
    """What a step computed: ``result`` for the scheduler, the rest for the clients."""

    result: StepResult
    output_logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    """Batch row -> logprobs of its new token, for requests that want them."""
    input_logprobs: list[tuple[Request, TokenLogprobs]] = field(default_factory=list)
    """Logprobs of prompt tokens this step computed, in prompt order per request."""
    stop_rests: dict[int, str] = field(default_factory=dict)
    """Batch row -> visible text between the last whole token before a matched stop string and the match."""


class Executor:
    """Runs steps. ``load_token_bytes`` is called once, when the first request brings a stop string."""

    def __init__(self, runner: ModelRunner, sampler: Sampler, load_token_bytes: Callable[[], TokenBytes]) -> None:
        self._runner = runner
        self._sampler = sampler
        self._ranker = BeamRanker(runner.config.vocab_size, runner.config.eos_token_ids, runner.device)
        self._load_token_bytes = load_token_bytes
        self._stop_strings: StopStringChecker | None = None

    @torch.inference_mode()
    def run(self, batch: ScheduleBatch) -> StepOutput:
        """Compute one step and wait for it."""
        forward = self._runner.forward(batch)
        output = StepOutput(StepResult(np.full(len(batch), -1, dtype=np.int32)))
        self._sample(output, forward.logits, batch)
        output.result.beams = self._rank_beams(forward.logits, batch)
        if forward.logprob_hidden is not None:
            self._add_input_logprobs(output, forward.logprob_hidden, batch)
        return output

    def _sample(self, output: StepOutput, logits: torch.Tensor, batch: ScheduleBatch) -> None:
        """A token for every row that samples and is no beam."""
        samples = batch.samples.copy()
        for step in batch.beams:
            samples[step.start : step.stop] = False
        rows = np.flatnonzero(samples)
        if not len(rows):
            return
        requests = [batch.requests[row] for row in rows]
        allowed = {i: batch.allowed[row] for i, row in enumerate(rows.tolist()) if row in batch.allowed}
        logits = _take_rows(logits, _logits_rows(batch)[rows])
        sampled = self._sampler.sample(logits, requests, allowed)
        next_ids = output.result.next_ids
        next_ids[rows] = sampled.cpu().numpy()
        self._add_output_logprobs(output, logits, sampled, rows, requests)
        if any(request.sampling.stop for request in requests):
            for row, found in self._stop_string_checker().check(batch.requests, next_ids).items():
                output.result.stop_matches[row] = _stop_match(found)
                if found.rest:
                    output.stop_rests[row] = found.rest

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

    def _add_output_logprobs(
        self,
        output: StepOutput,
        logits: torch.Tensor,
        sampled: torch.Tensor,
        rows: np.ndarray,
        requests: list[Request],
    ) -> None:
        wanted = [i for i, request in enumerate(requests) if request.logprobs is not None]
        if not wanted:
            return
        top_ks = [options.top_k for r in requests if (options := r.logprobs) is not None]
        index = torch.tensor(wanted, device=logits.device)
        chunks = output_logprobs(logits[index], sampled[index], top_ks)
        output.output_logprobs = {int(rows[i]): chunk for i, chunk in zip(wanted, chunks)}

    def _add_input_logprobs(self, output: StepOutput, hidden: torch.Tensor, batch: ScheduleBatch) -> None:
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
            targets.append(target)
            top_ks.append(request.logprobs.top_k)
            kept.append(np.arange(start, start + len(target)))
            start += count - first
        index = torch.from_numpy(np.concatenate(kept)).to(hidden.device)
        chunks = input_logprobs(hidden[index], targets, top_ks, self._runner.compute_logits)
        output.input_logprobs += zip(requests, chunks)


def _logits_rows(batch: ScheduleBatch) -> np.ndarray:
    """int64 [bs]: where the logits of a batch row are, if it has any (ForwardOutput.logits)."""
    return np.cumsum(batch.samples) - 1


def _take_rows(logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
    """These rows (int64 [n], ascending, at least one) of the logits; a view where they lie side by side."""
    first, count = int(rows[0]), len(rows)
    if int(rows[-1]) - first == count - 1:
        return logits[first : first + count]
    return logits.index_select(0, torch.from_numpy(rows).to(logits.device))


def _stop_match(found: FoundStop) -> StopMatch:
    return StopMatch(found.stop_index, found.kept_tokens, found.rest)
