"""Beam searches as the caller sees them: one request, as many outputs as the search has results."""

from __future__ import annotations

import pytest

from baton.runtime.clients import SOLE_CLIENT
from baton.runtime.messages import AbortRequest, BeamOutput, TextOutput, TextOutputs, TokenOutput
from baton.runtime.text.tokenizer import Tokenizer
from baton.scheduler.outcome import FinishReason, FoundTokens
from baton.scheduler.request_spec import RequestSpec
from baton.scheduler.sampling_params import SamplingParams
from baton.scheduler.token_buffer import pack_ids
from tests.doubles.manager_rig import Backend, check, prompt

LENGTH = FinishReason("length")


def search_end(rid: str, texts: list[str], shortfall: str | None = None) -> TextOutputs:
    """All results of a search, the i-th with the score -i, as the detokenizer sends them."""
    items = []
    for rank, text in enumerate(texts):
        beam = BeamOutput(
            sequence_score=-rank, cumulative_logprob=-2 * rank, num_results=len(texts), shortfall=shortfall
        )
        ids, tokens = pack_ids(list(text.encode())), len(text)
        output = TokenOutput(
            rid=rid, index=rank, new_ids=ids, completion_tokens=tokens, found=FoundTokens(5), finish=LENGTH, beam=beam
        )
        items.append(TextOutput(output=output, text=text))
    return TextOutputs(items=items)


@pytest.mark.parametrize("stream", [False, True])
def test_search_answer_has_all_results(tokenizer: Tokenizer, stream: bool) -> None:
    async def body(backend: Backend) -> None:
        search = SamplingParams(beam_width=4, n=3)
        with await backend.manager.open_answer(
            SOLE_CLIENT, [prompt("s", sampling=search), prompt("t")], stream=stream
        ) as call:
            first, second = backend.received()
            assert isinstance(first, RequestSpec) and not first.stream, "there is nothing to stream"
            assert isinstance(second, RequestSpec) and second.stream is stream
            await backend.send(search_end("s", ["a", "bc", "d"]))
            await backend.output("t", "x", LENGTH)
            outputs = [output async for output in call.updates()] if stream else await call.outputs()
            assert [(output.position, output.text) for output in outputs] == list(enumerate(["a", "bc", "d", "x"]))
            for rank, output in enumerate(outputs[:3]):
                assert output.beam is not None and output.beam.shortfall is None
                assert (output.beam.sequence_score, output.beam.cumulative_logprob) == (-rank, -2 * rank)
            assert outputs[3].beam is None
        assert backend.manager.num_open == 0 and backend.received() == []

    check(tokenizer, body)


@pytest.mark.parametrize("stream", [False, True])
def test_a_search_may_have_fewer_results_than_requested(tokenizer: Tokenizer, stream: bool) -> None:
    async def body(backend: Backend) -> None:
        sampling = SamplingParams(beam_width=4, n=4)
        prompts = [prompt(rid, sampling=sampling) for rid in "st"]
        with await backend.manager.open_answer(SOLE_CLIENT, prompts, stream=stream) as call:
            await backend.send(search_end("s", ["a", "b"], "2 of 4 sequences: no more"))
            assert backend.manager.num_open == 1 and not call.finished
            await backend.send(search_end("t", ["x", "y", "z"], "3 of 4 sequences: no more"))
            outputs = [output async for output in call.updates()] if stream else await call.outputs()
            texts = {output.position: output.text for output in outputs}
            assert texts == {0: "a", 1: "b", 4: "x", 5: "y", 6: "z"}
            few = [(output.beam.num_results, output.beam.shortfall) for output in outputs if output.beam is not None]
            assert few == [(2, "2 of 4 sequences: no more")] * 2 + [(3, "3 of 4 sequences: no more")] * 3
        assert backend.manager.num_open == 0

    check(tokenizer, body)


def test_a_search_of_a_disconnected_caller(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        sampling = SamplingParams(beam_width=4, n=4)
        with await backend.manager.open_answer(SOLE_CLIENT, [prompt("s", sampling=sampling)], stream=False):
            pass
        assert [type(message) for message in backend.received()] == [RequestSpec, AbortRequest]
        await backend.send(search_end("s", ["a", "b"], "no more"))
        assert backend.manager.num_open == 0
        with await backend.manager.open_answer(SOLE_CLIENT, [prompt("s", sampling=sampling)], stream=False) as call:
            assert backend.manager.abort_requests(SOLE_CLIENT, "s") == ["s"]
            aborted = FinishReason("abort", message="why")
            for index in range(4):
                await backend.output("s", finish=aborted, index=index)
            assert [output.finish for output in await call.outputs()] == [aborted] * 4
        assert backend.manager.num_open == 0

    check(tokenizer, body)


def test_search_counts_as_one_request_with_all_tokens(tokenizer: Tokenizer) -> None:
    async def body(backend: Backend) -> None:
        sampling = SamplingParams(beam_width=4, n=4)
        with await backend.manager.open_answer(SOLE_CLIENT, [prompt("s", sampling=sampling)], stream=True) as call:
            await backend.send(search_end("s", ["a", "bc", "def"], "no more"))
            await call.outputs()
        metrics = backend.manager.metrics.render().decode()
        for line in (
            'generation_tokens_total{model_name="m"} 6.0',
            'e2e_request_latency_seconds_count{model_name="m"} 1.0',
            'time_to_first_token_seconds_count{model_name="m"} 0.0',
            'cached_tokens_total{model_name="m"} 5.0',
        ):
            assert f"baton:{line}" in metrics, metrics

    check(tokenizer, body)
