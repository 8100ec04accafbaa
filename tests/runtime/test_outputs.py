"""What clients get to hear, and when."""

from __future__ import annotations

import numpy as np

from baton.runtime.outputs import OutputBuilder
from baton.runtime.sampling.logprobs import TokenLogprobs
from baton.runtime.step_runner import StepOutput
from baton.scheduler.batch import StepResult
from baton.scheduler.outcome import FinishReason, Retained
from baton.scheduler.request import Request, RequestEvent
from baton.scheduler.request_spec import LogprobOptions
from baton.scheduler.token_buffer import unpack_ids
from tests.doubles.specs import make_spec


def open_request(builder: OutputBuilder, prompt: list[int], *, stream: bool, logprobs: LogprobOptions | None = None):
    spec = make_spec("r", prompt, stream=stream, logprobs=logprobs)
    request = Request(spec, index=0, seed=0, arrival=0.0, serial=3)
    request.set_prompt(request.token_ids, max_new_tokens=10)
    builder.open_sample(request)
    return request


def token(request: Request, token_id: int, finish: FinishReason | None = None) -> RequestEvent:
    request.token_ids.append(token_id)
    return RequestEvent(request, 0, (token_id,), finish)


def logprobs_of(*ids: int) -> TokenLogprobs:
    values = np.full(len(ids), -0.5, dtype=np.float32)
    nothing = np.empty((len(ids), 0))
    return TokenLogprobs(np.array(ids, dtype=np.int32), values, nothing.astype(np.int32), nothing.astype(np.float32))


def test_streams_get_every_token_and_others_only_the_end() -> None:
    for stream in (True, False):
        builder = OutputBuilder()
        request = open_request(builder, [1, 2], stream=stream)
        heard = []
        for token_id in (5, 6, 7):
            finish = FinishReason(type="length") if token_id == 7 else None
            message = builder.build_outputs([token(request, token_id, finish)], None, 0.0)
            heard.append(unpack_ids(message.items[0].new_ids).tolist() if message is not None else None)
        assert heard == ([[5], [6], [7]] if stream else [None, None, [5, 6, 7]])


def test_the_first_prompt_token_has_no_logprob_and_is_sent_once() -> None:
    builder = OutputBuilder()
    request = open_request(builder, [1, 2, 3], stream=True, logprobs=LogprobOptions(start_len=0))
    output = StepOutput(StepResult.of_rows([[5]]))
    output.input_logprobs = [(request.serial, logprobs_of(2, 3))]
    output.output_logprobs = {0: logprobs_of(5)}
    message = builder.build_outputs([token(request, 5)], output, 0.0)
    assert message is not None
    chunk = message.items[0].input_logprobs
    assert chunk is not None and unpack_ids(chunk.ids).tolist() == [1, 2, 3]
    values = np.frombuffer(chunk.values, dtype=np.float32)
    assert np.isnan(values[0]) and values[1:].tolist() == [-0.5, -0.5]
    again = builder.build_outputs([token(request, 6)], StepOutput(StepResult.of_rows([[6]]), {0: logprobs_of(6)}), 0.0)
    assert again is not None and again.items[0].input_logprobs is None


def test_closed_request_sends_no_more_output() -> None:
    builder = OutputBuilder()
    request = open_request(builder, [1], stream=True)
    builder.close_sample(request)
    builder.close_sample(request)
    assert builder._pending == {}
    late = StepOutput(StepResult.of_rows([[5]]), input_logprobs=[(request.serial, logprobs_of(2))])
    assert builder.build_outputs([], late, 0.0) is None and builder._pending == {}


def test_only_the_tokens_that_count_are_sent_with_their_logprobs() -> None:
    builder = OutputBuilder()
    request = open_request(builder, [1], stream=True, logprobs=LogprobOptions())
    request.token_ids.extend(np.array([5, 6], dtype=np.int32))
    output = StepOutput(StepResult.of_rows([[5, 6, 7]]), {0: logprobs_of(5, 6, 7)})
    message = builder.build_outputs([RequestEvent(request, 0, (5, 6), FinishReason(type="stop"))], output, 0.0)
    assert message is not None
    (item,) = message.items
    assert unpack_ids(item.new_ids).tolist() == [5, 6] and item.completion_tokens == 2
    assert item.output_logprobs is not None and unpack_ids(item.output_logprobs.ids).tolist() == [5, 6]
    assert np.frombuffer(item.output_logprobs.values, dtype=np.float32).tolist() == [-0.5, -0.5]


def test_prompt_ids_are_sent_once_if_requested() -> None:
    for wanted in (True, False):
        builder = OutputBuilder()
        spec = make_spec("r", [7, 8], stream=True, returns_prompt=wanted)
        request = Request(spec, index=0, seed=0, arrival=0.0, serial=3)
        request.set_prompt(request.token_ids, max_new_tokens=10)
        builder.open_sample(request)
        told = []
        for token_id in (5, 6):
            message = builder.build_outputs([token(request, token_id)], None, 0.0)
            assert message is not None
            told.append(unpack_ids(message.items[0].prompt_ids).tolist())
        assert told == [[7, 8] if wanted else [], []]


def test_prompt_ranks_across_chunks_align_with_tokens() -> None:
    builder = OutputBuilder()
    request = open_request(builder, [1, 2, 3], stream=False, logprobs=LogprobOptions(start_len=0, prompt_top_k=1))
    for token_id, rank in ((2, 40), (3, 50)):
        chunk = logprobs_of(token_id)
        one = np.array([[9]], dtype=np.int32), np.array([[-0.1]], dtype=np.float32)
        chunk = TokenLogprobs(chunk.ids, chunk.values, *one, np.array([rank], dtype=np.int32))
        output = StepOutput(StepResult.of_rows([[]]), input_logprobs=[(request.serial, chunk)])
        assert builder.build_outputs([], output, 0.0) is None
    output = StepOutput(StepResult.of_rows([[5]]), {0: logprobs_of(5)})
    message = builder.build_outputs([token(request, 5, FinishReason("length"))], output, 0.0)
    assert message is not None
    chunk = message.items[0].input_logprobs
    assert chunk is not None and unpack_ids(chunk.ids).tolist() == [1, 2, 3]
    assert unpack_ids(chunk.ranks).tolist() == [0, 40, 50] and unpack_ids(chunk.top_ids).tolist() == [0, 9, 9]
    assert message.items[0].output_logprobs is not None and message.items[0].output_logprobs.top_ids == b""


def test_seconds_of_a_lease_do_not_depend_on_the_clock() -> None:
    """8,000 s after the machine's start, 600 s later is 600.0000000000009 s later."""
    for now in (100.1, 7700.3, 8000.7):
        builder = OutputBuilder()
        request = open_request(builder, [1, 2], stream=False)
        request.retained = Retained(tokens=2, deadline=now + 600)
        message = builder.build_outputs([token(request, 5, FinishReason(type="length"))], None, now)
        assert message is not None and (retained := message.items[0].retained) is not None
        assert retained.ttl == 600
