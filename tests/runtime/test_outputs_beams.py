"""What clients get to hear of beam searches."""

from __future__ import annotations

import numpy as np
import pytest

from baton.runtime.messages import RetainedOutput, TokenOutput
from baton.runtime.outputs import OutputBuilder
from baton.runtime.sampling.logprobs import TokenLogprobs
from baton.runtime.step_runner import StepOutput
from baton.scheduler.batch import StepResult
from baton.scheduler.beam.search import BeamGroup, Hypothesis
from baton.scheduler.outcome import FinishReason, Retained
from baton.scheduler.request import Inheritance, Request, RequestEvent
from baton.scheduler.request_spec import LogprobOptions
from baton.scheduler.sampling_params import SamplingParams
from baton.scheduler.token_buffer import unpack_ids
from tests.doubles.specs import make_spec

ENDED = FinishReason(type="stop")


def open_search(
    builder: OutputBuilder, *, stream: bool = False, logprobs: LogprobOptions | None = None, n: int = 2
) -> Request:
    spec = make_spec("r", [1, 2], SamplingParams(beam_width=4, n=n), stream=stream, logprobs=logprobs)
    request = Request(spec, index=0, seed=0, arrival=0, serial=3)
    request.set_prompt(request.token_ids, max_new_tokens=3)
    builder.open_sample(request)
    return request


def hypothesis(ids: list[int], score: float, matched: int | str | None = None, top_k: int = 0) -> Hypothesis:
    count = len(ids)
    return Hypothesis(
        ids=np.array(ids, dtype=np.int32),
        score=score,
        cumulative_logprob=score * count,
        logprobs=np.full(count, score, dtype=np.float32),
        finish=FinishReason("stop", matched=matched) if matched is not None else FinishReason("length"),
        kept_tokens=count,
        top_ids=np.arange(count * top_k, dtype=np.int32).reshape(count, top_k) if top_k else None,
        top_logprobs=np.full((count, top_k), -9.0, dtype=np.float32) if top_k else None,
    )


def end(builder: OutputBuilder, request: Request, results: list[Hypothesis]) -> list[TokenOutput]:
    request.beams = BeamGroup(request.sampling, 3, None, 1)
    request.beams.finished = results
    message = builder.build_outputs([RequestEvent(request, finish=ENDED)], None, 10.0)
    assert message is not None
    return message.items


@pytest.mark.parametrize("stream", [False, True])
def test_search_results_are_outputs_best_first(stream: bool) -> None:
    builder = OutputBuilder()
    request = open_search(builder, stream=stream)
    found = [hypothesis([5, 6], -0.5, matched="item"), hypothesis([7, 8, 9], -0.75), hypothesis([4], -0.9, matched=4)]
    first, second = end(builder, request, found)
    assert (first.index, unpack_ids(first.new_ids).tolist(), first.completion_tokens) == (0, [5, 6], 2)
    assert (second.index, unpack_ids(second.new_ids).tolist(), second.completion_tokens) == (1, [7, 8, 9], 3)
    assert first.finish == FinishReason("stop", matched="item") and second.finish == FinishReason("length")
    for output, score, total in ((first, -0.5, -1.0), (second, -0.75, -2.25)):
        assert output.beam is not None and output.params is not None and output.params.stream is stream
        assert (output.beam.sequence_score, output.beam.cumulative_logprob) == (score, total)
        assert (output.beam.num_results, output.beam.shortfall) == (2, None)
        assert output.prompt_tokens == 2 and output.output_logprobs is None and output.retained is None
    assert builder._pending == {}


def test_missing_search_results_report_shortfall() -> None:
    builder = OutputBuilder()
    (only,) = end(builder, open_search(builder), [hypothesis([5], -0.5)])
    assert only.beam is not None and only.beam.num_results == 1
    assert only.beam.shortfall is not None and only.beam.shortfall.startswith("1 of 2 sequences")


@pytest.mark.parametrize("has_begun", [False, True])
def test_failed_search_ends_all_its_outputs(has_begun: bool) -> None:
    builder = OutputBuilder()
    request = open_search(builder, n=3)
    if has_begun:
        request.beams = BeamGroup(request.sampling, 3, None, 1)
        request.beams.finished = [hypothesis([5], -0.5)]
    finish = FinishReason("abort", message="why")
    message = builder.build_outputs([RequestEvent(request, finish=finish)], None, 0.0)
    assert message is not None
    assert [(output.index, output.finish) for output in message.items] == [(0, finish), (1, finish), (2, finish)]
    assert all(output.new_ids == b"" and output.beam is None and output.params for output in message.items)
    assert builder._pending == {}


def test_logprobs_of_the_prompt_and_of_each_result() -> None:
    builder = OutputBuilder()
    request = open_search(builder, logprobs=LogprobOptions(start_len=0, top_k=2))
    step = StepOutput(StepResult.of_rows([[]]))
    tops = np.array([[3, 4]], dtype=np.int32), np.full((1, 2), -3.0, dtype=np.float32)
    step.input_logprobs = [
        (request.serial, TokenLogprobs(np.array([2], dtype=np.int32), np.full(1, -0.25, np.float32), *tops))
    ]
    assert builder.build_outputs([], step, 0.0) is None, "nothing is said before the end"
    outputs = end(builder, request, [hypothesis([5, 6], -0.5, top_k=2), hypothesis([7], -1.5, top_k=2)])
    for output, ids, value in zip(outputs, ([5, 6], [7]), (-0.5, -1.5)):
        prompt, chosen = output.input_logprobs, output.output_logprobs
        assert prompt is not None and chosen is not None
        assert unpack_ids(prompt.ids).tolist() == [1, 2] and unpack_ids(prompt.top_ids).tolist() == [0, 0, 3, 4]
        assert unpack_ids(chosen.ids).tolist() == ids
        assert np.frombuffer(chosen.values, dtype=np.float32).tolist() == [value] * len(ids)
        assert unpack_ids(chosen.top_ids).tolist() == list(range(2 * len(ids)))
        assert np.frombuffer(chosen.top_values, dtype=np.float32).tolist() == [-9.0] * 2 * len(ids)


def test_logprobs_without_alternatives() -> None:
    builder = OutputBuilder()
    request = open_search(builder, n=1, logprobs=LogprobOptions())
    (output,) = end(builder, request, [hypothesis([5, 6], -0.5)])
    assert output.output_logprobs is not None and output.output_logprobs.top_ids == b""
    assert output.input_logprobs is None


def test_search_outputs_report_inheritance_and_leases() -> None:
    builder = OutputBuilder()
    request = open_search(builder)
    request.inheritance = Inheritance("handoff", inherited_tokens=2, recomputed_tokens=1)
    request.beams = BeamGroup(request.sampling, 3, None, 1)
    request.beams.finished = [hypothesis([5], -0.5), hypothesis([6], -0.75)]
    request.beams.retained = [Retained(tokens=3, deadline=14.0), Retained(refused="no room")]
    message = builder.build_outputs([RequestEvent(request, finish=ENDED)], None, 10.0)
    assert message is not None
    assert [output.retained for output in message.items] == [
        RetainedOutput(tokens=3, ttl=4.0),
        RetainedOutput(refused="no room"),
    ]
    for output in message.items:
        assert output.continuation is not None and output.continuation.path == "handoff"
