"""One step, from a ScheduleBatch to tokens on the host: forward, sample, logprobs, stop strings.

Everything between the scheduler's two calls. Knows the model runner and the sampler, not the queues.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from ..scheduler.batch import ScheduleBatch, StepResult, StopMatch
from ..scheduler.request import Request
from .logprobs import TokenLogprobs, input_logprobs, output_logprobs
from .model_runner import ModelRunner
from .sampler import Sampler
from .stop_strings import StopStringChecker
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
        self._load_token_bytes = load_token_bytes
        self._stop_strings: StopStringChecker | None = None

    @torch.inference_mode()
    def run(self, batch: ScheduleBatch) -> StepOutput:
        """Compute one step and wait for it."""
        forward = self._runner.forward(batch)
        rows = np.flatnonzero(batch.samples)
        requests = [batch.requests[row] for row in rows]
        next_ids = np.full(len(batch), -1, dtype=np.int32)
        output = StepOutput(StepResult(next_ids))
        if requests:
            sampled = self._sampler.sample(forward.logits, requests)
            next_ids[rows] = sampled.cpu().numpy()
            self._add_output_logprobs(output, forward.logits, sampled, rows, requests)
        if forward.logprob_hidden is not None:
            self._add_input_logprobs(output, forward.logprob_hidden, batch)
        if any(request.sampling.stop for request in requests):
            if self._stop_strings is None:
                self._stop_strings = StopStringChecker(self._load_token_bytes())
            for row, found in self._stop_strings.check(batch.requests, next_ids).items():
                output.result.stop_matches[row] = StopMatch(found.stop_index, found.kept_tokens)
                if found.rest:
                    output.stop_rests[row] = found.rest
        return output

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
