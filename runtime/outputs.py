"""Turns the scheduler's events into messages to the clients.

A streaming request gets a message for every token; any other gets one at its end, so that a long batch job does not
cost a message per token. A beam search also reports at its end: one output for each result, numbered best first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np

from ..scheduler.beam.search import Hypothesis
from ..scheduler.outcome import NO_DRAFTS, FinishReason, Retained
from ..scheduler.request import Inheritance, Request, RequestEvent
from ..scheduler.request_spec import LogprobOptions
from ..scheduler.token_buffer import pack_ids
from .messages import (
    BeamOutput,
    ContinuationOutput,
    DetokenizeParams,
    LogprobChunk,
    RetainedOutput,
    TokenOutput,
    TokenOutputs,
)
from .sampling.logprobs import TokenLogprobs
from .step_runner import StepOutput


@dataclass(slots=True)
class _Pending:
    """The unsent output of one sample; for a beam search, only its prompt's logprobs."""

    stream: bool
    params: DetokenizeParams | None
    ids: list[int] = field(default_factory=list)
    input_logprobs: list[TokenLogprobs] = field(default_factory=list)
    output_logprobs: list[TokenLogprobs] = field(default_factory=list)


class OutputBuilder:
    """Owns the unsent tokens of every open sample."""

    def __init__(self) -> None:
        self._pending: dict[int, _Pending] = {}
        """Unsent outputs by serial."""
        self._failures: list[tuple[Request, Exception]] = []

    def open_sample(self, request: Request) -> None:
        sampling, stream = request.sampling, request.spec.stream
        self._pending[request.serial] = _Pending(
            stream=stream,
            params=DetokenizeParams(
                skip_special_tokens=sampling.skip_special_tokens,
                spaces_between_special_tokens=sampling.spaces_between_special_tokens,
                stop=sampling.stop,
                no_stop_trim=sampling.no_stop_trim,
                stream=stream,
            ),
        )

    def build_outputs(self, events: list[RequestEvent], output: StepOutput | None, now: float) -> TokenOutputs | None:
        """One message with all outputs that are due, or None. ``output``: the step the events came from; ``now``: the
        scheduler's clock."""
        if output is not None:
            for serial, chunk in output.input_logprobs:
                if (pending := self._pending.get(serial)) is not None:  # else it has ended
                    pending.input_logprobs.append(chunk)
        items: list[TokenOutput] = []
        for event in events:
            try:
                items += self._outputs_of(event, output, now)
            except Exception as error:
                self._failures.append((event.request, error))
        return TokenOutputs(items=items) if items else None

    def take_failures(self) -> list[tuple[Request, Exception]]:
        """Take the requests with outputs that could not be built, each with its error: they must end with it."""
        failures, self._failures = self._failures, []
        return failures

    def _outputs_of(self, event: RequestEvent, output: StepOutput | None, now: float) -> list[TokenOutput]:
        """The outputs to send for one event; empty if none is due."""
        pending = self._pending[event.request.serial]
        if event.token_ids:
            pending.ids.extend(event.token_ids)
            if output is not None and event.request.logprobs is not None:
                pending.output_logprobs.append(output.output_logprobs[event.row].first(len(event.token_ids)))
        if event.finish is not None:
            self.close_sample(event.request)
        if event.finish is not None and event.request.sampling.beam_width is not None:
            return _search_outputs(event.request, event.finish, pending, now)
        if event.finish is not None and output is not None and event.row in output.vectors:
            return [_with_vector(_flush(event, pending, now), output.vectors[event.row])]
        return [_flush(event, pending, now)] if pending.stream or event.finish is not None else []

    def close_sample(self, request: Request) -> None:
        """Forget a sample that has ended; it may be forgotten already."""
        self._pending.pop(request.serial, None)


def _flush(event: RequestEvent, pending: _Pending, now: float) -> TokenOutput:
    request = event.request
    ended = event.finish is not None
    # Where the server found the job of a request that asked for nothing, its client is not told what is kept for it.
    asked = request.job_id == request.spec.job_id or request.asked_ttl > 0
    _add_first_token(request, pending)
    message = TokenOutput(
        rid=request.rid,
        index=request.index,
        new_ids=pack_ids(pending.ids),
        prompt_tokens=request.prompt_len,
        found=request.found,
        prepared_tokens=request.prepared_tokens,
        completion_tokens=request.num_output_tokens,
        finish=event.finish,
        params=pending.params,
        prompt_ids=_prompt_ids(request, pending),
        input_logprobs=_chunk(pending.input_logprobs),
        output_logprobs=_chunk(pending.output_logprobs),
        continuation=_continuation(request.inheritance) if ended and request.inheritance is not None else None,
        retained=_retained(request.retained, now) if ended and request.retained is not None and asked else None,
        drafts=request.drafts if ended else NO_DRAFTS,
        cache_report=request.cache_report if ended else None,
        is_job_step=ended and request.job is not None,
    )
    pending.params = None
    pending.ids, pending.input_logprobs, pending.output_logprobs = [], [], []
    return message


def _with_vector(message: TokenOutput, vector: np.ndarray) -> TokenOutput:
    return msgspec.structs.replace(message, vector=vector.astype(np.float32).tobytes())


def _search_outputs(request: Request, finish: FinishReason, pending: _Pending, now: float) -> list[TokenOutput]:
    """All outputs of a beam search that ended with ``finish``: one for each result, or n empty ones if aborted."""
    _add_first_token(request, pending)
    common = TokenOutput(
        rid=request.rid,
        prompt_tokens=request.prompt_len,
        found=request.found,
        finish=finish,
        params=pending.params,
        prompt_ids=_prompt_ids(request, pending),
        input_logprobs=_chunk(pending.input_logprobs),
        continuation=_continuation(request.inheritance) if request.inheritance is not None else None,
        cache_report=request.cache_report,
    )
    if finish.type == "abort":
        return [msgspec.structs.replace(common, index=index) for index in range(request.sampling.n)]
    assert request.beams is not None
    results, shortfall = request.beams.results, request.beams.shortfall
    retained = request.beams.retained or [None] * len(results)
    return [
        msgspec.structs.replace(
            common,
            index=rank,
            new_ids=pack_ids(result.ids),
            completion_tokens=len(result.ids),
            finish=result.finish,
            output_logprobs=_chunk([_logprobs(result)]) if request.logprobs is not None else None,
            retained=_retained(kept, now) if kept is not None else None,
            beam=BeamOutput(
                sequence_score=result.score,
                cumulative_logprob=result.cumulative_logprob,
                num_results=len(results),
                shortfall=shortfall,
            ),
        )
        for rank, (result, kept) in enumerate(zip(results, retained, strict=True))
    ]


def _logprobs(result: Hypothesis) -> TokenLogprobs:
    top_ids, top_values = result.top_ids, result.top_logprobs
    if top_ids is None or top_values is None:
        top_ids, top_values = np.empty((len(result.ids), 0), np.int32), np.empty((len(result.ids), 0), np.float32)
    return TokenLogprobs(result.ids, result.logprobs, top_ids, top_values)


def _continuation(inheritance: Inheritance) -> ContinuationOutput:
    return ContinuationOutput(
        path=inheritance.path,
        inherited_tokens=inheritance.inherited_tokens,
        recomputed_tokens=inheritance.recomputed_tokens,
        trimmed_tokens=inheritance.trimmed_tokens,
    )


def _retained(retained: Retained, now: float) -> RetainedOutput:
    # Clocks count from the machine's start: the difference of two large numbers is off by less than a microsecond.
    ttl = round(max(0.0, retained.deadline - now), 6) if retained.refused is None else 0.0
    return RetainedOutput(tokens=retained.tokens, ttl=ttl, refused=retained.refused, tier=retained.tier)


def _chunk(parts: list[TokenLogprobs]) -> LogprobChunk | None:
    if not parts:
        return None
    return LogprobChunk(
        ids=np.concatenate([p.ids for p in parts]).tobytes(),
        values=np.concatenate([p.values for p in parts]).tobytes(),
        top_ids=np.concatenate([p.top_ids.reshape(-1) for p in parts]).tobytes(),
        top_values=np.concatenate([p.top_values.reshape(-1) for p in parts]).tobytes(),
        ranks=b"".join(p.ranks.tobytes() for p in parts if p.ranks is not None),
        named_values=b"".join(p.named_values.tobytes() for p in parts if p.named_values is not None),
    )


def _prompt_ids(request: Request, pending: _Pending) -> bytes:
    """Packed, for the first output of a sample that returns its prompt."""
    is_first = pending.params is not None
    return pack_ids(request.token_ids.view(0, request.prompt_len)) if is_first and request.spec.returns_prompt else b""


def _add_first_token(request: Request, pending: _Pending) -> None:
    """Add the first prompt token before the first output, if the logprobs of the whole prompt are wanted."""
    options = request.logprobs
    if pending.params is not None and options is not None and options.start_len == 0 and request.prompt_len:
        pending.input_logprobs.insert(0, _first_token(request, options))


def _first_token(request: Request, options: LogprobOptions) -> TokenLogprobs:
    """The first prompt token follows nothing: its logprob is NaN, "none" on the wire."""
    return TokenLogprobs(
        ids=request.token_ids.view(0, 1).copy(),
        values=np.full(1, np.nan, dtype=np.float32),
        top_ids=np.zeros((1, options.input_top_k), dtype=np.int32),
        top_values=np.full((1, options.input_top_k), np.nan, dtype=np.float32),
        ranks=np.zeros(1, dtype=np.int32) if options.ranks_prompt else None,
        named_values=np.full((1, len(options.token_ids)), np.nan, dtype=np.float32) if options.token_ids else None,
    )
