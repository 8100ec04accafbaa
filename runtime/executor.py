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
from .penalties import PendingTokens
from .sampler import Sampler
from .step_profile import StepProfiler
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


@dataclass(slots=True)
class StepInFlight:
    """A step that the device works on, or has done. `Executor.finish` waits for it."""

    batch: ScheduleBatch
    next_ids: torch.Tensor
    """Device int64 [bs]: the sampled token of each row, anything where none is. The next step reads it there."""
    sampled_rows: np.ndarray
    """int64 [n]: the rows that sample, beams left out."""
    host_ids: torch.Tensor
    """int64 [n]: their tokens on the host, once ``copied``."""
    copied: torch.cuda.Event | None
    """None where the copy does not run beside the host."""
    output: StepOutput


class Executor:
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
        self._ranker = BeamRanker(runner.config.vocab_size, runner.config.eos_token_ids, runner.device)
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
        sampled = self._sample(output, forward.logits, batch, rows, previous_ids)
        output.result.beams = self._rank_beams(forward.logits, batch)
        if forward.logprob_hidden is not None:
            self._add_input_logprobs(output, forward.logprob_hidden, batch)
        next_ids = sampled
        if len(rows) < len(batch):
            next_ids = sampled.new_zeros(len(batch))
            next_ids[torch.from_numpy(rows).to(sampled.device)] = sampled
        host_ids, copied = _to_host(sampled)
        self._profiler.lap("launch")
        return StepInFlight(batch, next_ids, rows, host_ids, copied, output)

    def finish(self, step: StepInFlight) -> StepOutput:
        """Wait for a step. Tokens of requests that have ended since are dropped: nobody asked for them."""
        if step.copied is not None:
            step.copied.synchronize()
        self._profiler.lap("wait")
        batch, output = step.batch, step.output
        next_ids = output.result.next_ids
        next_ids[step.sampled_rows] = step.host_ids.numpy()
        output.input_logprobs = [pair for pair in output.input_logprobs if pair[0].finish is None]
        requests = batch.requests
        for row in step.sampled_rows.tolist():
            if requests[row].finish is not None:
                next_ids[row] = -1
        if any(requests[row].sampling.stop for row in step.sampled_rows.tolist()):
            for row, found in self._stop_string_checker().check(requests, next_ids).items():
                output.result.stop_matches[row] = _stop_match(found)
        return output

    def _sample(
        self,
        output: StepOutput,
        logits: torch.Tensor,
        batch: ScheduleBatch,
        rows: np.ndarray,
        previous_ids: torch.Tensor | None,
    ) -> torch.Tensor:
        """Device int64 [n]: a token for each of ``rows``."""
        if not len(rows):
            return torch.empty(0, dtype=torch.int64, device=logits.device)
        requests = [batch.requests[row] for row in rows]
        allowed = {i: batch.allowed[row] for i, row in enumerate(rows.tolist()) if row in batch.allowed}
        logits = _take_rows(logits, _logits_rows(batch)[rows])
        pending = None if previous_ids is None else _pending_tokens(batch, rows, previous_ids)
        sampled = self._sampler.sample(logits, requests, allowed, pending)
        self._add_output_logprobs(output, logits, sampled, rows, requests)
        return sampled

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


def _pending_tokens(batch: ScheduleBatch, rows: np.ndarray, previous_ids: torch.Tensor) -> PendingTokens:
    """The output tokens of ``rows`` that the host does not know yet."""
    last_ids = batch.input_ids[np.cumsum(batch.extend_lens)[rows] - 1].astype(np.int64)
    index = np.flatnonzero(last_ids < 0)
    return PendingTokens(index, previous_ids[torch.from_numpy(-last_ids[index] - 1).to(previous_ids.device)])


def _to_host(ids: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    """The ids on the host, or on their way there."""
    if ids.device.type != "cuda":
        return ids, None
    host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True)
    host.copy_(ids, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()
    return host, copied


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
