"""What clients get to hear, and when."""

from __future__ import annotations

import numpy as np

from baton.runtime.messages import GenerateRequest
from baton.scheduler.token_buffer import pack_ids, unpack_ids
from baton.runtime.outputs import OutputBuilder
from baton.runtime.sampling.logprobs import TokenLogprobs
from baton.runtime.step_runner import StepOutput
from baton.scheduler.batch import StepResult
from baton.scheduler.request import RequestEvent
from baton.scheduler.request import Request
from baton.scheduler.request_spec import LogprobOptions, RequestSpec
from baton.scheduler.outcome import FinishReason
from baton.scheduler.sampling_params import SamplingParams


def open_request(builder: OutputBuilder, prompt: list[int], *, stream: bool, logprobs: LogprobOptions | None = None):
    ids = np.array(prompt, dtype=np.int32)
    request = Request(
        RequestSpec("r", ids, SamplingParams(), logprobs=logprobs), index=0, seed=0, arrival=0.0, sequence_number=0
    )
    request.begin(request.token_ids, max_new_tokens=10)
    builder.open(
        request, GenerateRequest(rid="r", input_ids=pack_ids(prompt), sampling=SamplingParams(), stream=stream)
    )
    return request


def token(request: Request, token_id: int, finish: FinishReason | None = None) -> RequestEvent:
    request.token_ids.append(token_id)
    return RequestEvent(request, 0, token_id, finish)


def logprobs_of(*ids: int) -> TokenLogprobs:
    values = np.full(len(ids), -0.5, dtype=np.float32)
    nothing = np.empty((len(ids), 0))
    return TokenLogprobs(np.array(ids, dtype=np.int32), values, nothing.astype(np.int32), nothing.astype(np.float32))


def test_streams_hear_of_every_token_the_others_only_at_the_end() -> None:
    for stream in (True, False):
        builder = OutputBuilder()
        request = open_request(builder, [1, 2], stream=stream)
        heard = []
        for token_id in (5, 6, 7):
            finish = FinishReason(type="length") if token_id == 7 else None
            message = builder.build([token(request, token_id, finish)], None, 0.0)
            heard.append(unpack_ids(message.items[0].new_ids).tolist() if message is not None else None)
        assert heard == ([[5], [6], [7]] if stream else [None, None, [5, 6, 7]])


def test_the_first_prompt_token_has_no_logprob_and_says_so_once() -> None:
    builder = OutputBuilder()
    request = open_request(builder, [1, 2, 3], stream=True, logprobs=LogprobOptions(start_len=0))
    output = StepOutput(StepResult(np.array([5], dtype=np.int32)))
    output.input_logprobs = [(request, logprobs_of(2, 3))]
    output.output_logprobs = {0: logprobs_of(5)}
    message = builder.build([token(request, 5)], output, 0.0)
    assert message is not None
    chunk = message.items[0].input_logprobs
    assert chunk is not None and unpack_ids(chunk.ids).tolist() == [1, 2, 3]
    values = np.frombuffer(chunk.values, dtype=np.float32)
    assert np.isnan(values[0]) and values[1:].tolist() == [-0.5, -0.5]
    again = builder.build([token(request, 6)], StepOutput(StepResult(np.array([6])), {0: logprobs_of(6)}), 0.0)
    assert again is not None and again.items[0].input_logprobs is None


def test_a_discarded_request_is_heard_of_no_more() -> None:
    builder = OutputBuilder()
    request = open_request(builder, [1], stream=True)
    builder.discard([RequestEvent(request, -1, -1, FinishReason(type="abort"))])
    assert builder._pending == {}
