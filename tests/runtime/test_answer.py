"""The neutral answer: updates add up to the whole output, logprobs are typed, missing results are left out."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from baton.runtime.answer import Answer, Output, TokenLogprob
from baton.runtime.messages import BeamOutput, TextOutput, TokenOutput
from baton.runtime.prompt import Prompt
from baton.scheduler.outcome import FinishReason, FoundTokens, RequestRefused
from baton.scheduler.sampling_params import SamplingParams
from baton.scheduler.token_buffer import pack_ids
from tests.doubles.packed_logprobs import chunk
from tests.doubles.prompts import make_prompt

LENGTH = FinishReason("length")
NAN, NONE_LEFT = float("nan"), float("-inf")


def answer_to(*prompts: Prompt) -> Answer:
    texts = {5: "five", 6: "six", 7: "seven", 97: "a", 98: "b"}
    return Answer(list(prompts), started=10.0, abandon=lambda answer: None, token_text=texts.__getitem__)


def update(text: str = "", finish: FinishReason | None = None, **fields: Any) -> TextOutput:
    output = TokenOutput(rid="r", new_ids=pack_ids(list(text.encode())), finish=finish, **fields)
    return TextOutput(output=output, text=text)


async def updates_between(answer: Answer, feeds: list[list[tuple[int, TextOutput]]]) -> list[Output]:
    """Feed one list after the other, and read all that is new in between."""
    found: list[Output] = []

    async def read() -> None:
        found.extend([output async for output in answer.updates()])

    reading = asyncio.create_task(read())
    for feed in feeds:
        for position, item in feed:
            answer.feed(position, item, now=12.5)
        for _ in range(3):
            await asyncio.sleep(0)
    await reading
    return found


def added_up(updates: list[Output]) -> list[Output]:
    """One output per position."""
    whole: dict[int, Output] = {}
    for output in updates:
        if output.position in whole:
            whole[output.position].extend(output)
        else:
            whole[output.position] = output
    return [whole[position] for position in sorted(whole)]


def some_feeds() -> list[list[tuple[int, TextOutput]]]:
    first, later = chunk((1, NAN), (2, -1.0)), chunk((98, -0.5), (99, -0.25))
    counts: dict[str, Any] = {"prompt_tokens": 2, "found": FoundTokens(1)}
    return [
        [(0, update("a", **counts, completion_tokens=1, input_logprobs=first, output_logprobs=chunk((97, -0.1))))],
        [(1, update("x", **counts, completion_tokens=1))],
        [(0, update("bc", **counts, completion_tokens=3, output_logprobs=later)), (0, update(**counts))],
        [(1, update("y", LENGTH, **counts, completion_tokens=2))],
        [(0, update("d", FinishReason("stop", matched="!"), **counts, completion_tokens=4))],
    ]


def test_updates_add_up_to_the_whole() -> None:
    async def run() -> None:
        prompt = make_prompt(rid="r", sampling=SamplingParams(n=2), return_logprob=True)
        streamed, at_once = answer_to(prompt), answer_to(prompt)
        for feed in some_feeds():
            for position, item in feed:
                at_once.feed(position, item, now=12.5)
        updates = await updates_between(streamed, some_feeds())
        assert [(output.position, output.text) for output in updates] == [
            (0, "a"), (1, "x"), (0, "bc"), (1, "y"), (0, "d"),
        ]  # fmt: skip
        assert [len(output.output_logprobs) for output in updates] == [1, 0, 2, 0, 0], "an update brings the new ones"
        whole = await at_once.outputs()
        assert added_up(updates) == whole
        assert [(output.text, output.sample, output.e2e_latency) for output in whole] == [
            ("abcd", 0, 2.5), ("xy", 1, 2.5),
        ]  # fmt: skip
        assert whole[0].finish == FinishReason("stop", matched="!") and whole[0].token_ids == list(b"abcd")
        assert [token.logprob for token in whole[0].input_logprobs] == [None, -1.0]
        assert [token.id for token in whole[0].output_logprobs] == [97, 98, 99]

    asyncio.run(run())


def test_positions_number_the_samples_of_all_prompts() -> None:
    async def run() -> None:
        one, two = make_prompt(rid="a", sampling=SamplingParams(n=2)), make_prompt(rid="b")
        answer = answer_to(one, two)
        for position in (2, 0, 1):
            answer.feed(position, update(str(position), LENGTH), now=11.0)
        got = [(output.prompt.rid, output.sample, output.text) for output in await answer.outputs()]
        assert got == [("a", 0, "0"), ("a", 1, "1"), ("b", 0, "2")]

    asyncio.run(run())


@pytest.mark.parametrize("streamed", [False, True])
def test_search_with_fewer_results_omits_last_positions(streamed: bool) -> None:
    async def run() -> None:
        search = SamplingParams(beam_width=3, n=3)
        answer = answer_to(make_prompt(rid="s", sampling=search), make_prompt(rid="t"))
        beam = BeamOutput(sequence_score=-0.5, cumulative_logprob=-1.0, num_results=1, shortfall="no more")
        answer.leave_empty(range(1, 3))
        answer.feed(0, update("a", LENGTH, beam=beam), now=11.0)
        assert not answer.finished, "the other prompt has not ended"
        answer.feed(3, update("x", LENGTH), now=11.0)
        outputs = [output async for output in answer.updates()] if streamed else await answer.outputs()
        assert [(output.position, output.text, output.beam) for output in outputs] == [(0, "a", beam), (3, "x", None)]

    asyncio.run(run())


@pytest.mark.parametrize("with_text", [False, True])
def test_logprobs_with_and_without_text(with_text: bool) -> None:
    async def run() -> None:
        answer = answer_to(
            make_prompt(rid="r", return_logprob=True, top_logprobs_num=2, return_text_in_logprobs=with_text)
        )
        item = update(
            "a",
            LENGTH,
            input_logprobs=chunk((5, NAN), (6, -1.5), top=[(0, NAN), (0, NAN), (6, -1.5), (7, NONE_LEFT)]),
            output_logprobs=chunk((97, -0.5), top=[(97, -0.5), (98, -2.0)]),
        )
        answer.feed(0, item, now=11.0)
        (output,) = await answer.outputs()

        def text(shown: str) -> str | None:
            return shown if with_text else None

        assert list(output.input_logprobs) == [
            TokenLogprob(None, 5, text("five")),  # follows nothing: no alternatives either
            TokenLogprob(
                -1.5, 6, text("six"), [TokenLogprob(-1.5, 6, text("six")), TokenLogprob(None, 7, text("seven"))]
            ),
        ]
        assert list(output.output_logprobs) == [
            TokenLogprob(-0.5, 97, text("a"), [TokenLogprob(-0.5, 97, text("a")), TokenLogprob(-2.0, 98, text("b"))])
        ]

    asyncio.run(run())


def test_logprobs_without_alternatives() -> None:
    async def run() -> None:
        answer = answer_to(make_prompt(rid="r", return_logprob=True))
        answer.feed(0, update("a", LENGTH, output_logprobs=chunk((97, -0.5), (98, NONE_LEFT))), now=11.0)
        (output,) = await answer.outputs()
        assert list(output.output_logprobs) == [TokenLogprob(-0.5, 97), TokenLogprob(None, 98)]

    asyncio.run(run())


def test_a_failed_call_drops_its_unread_outputs() -> None:
    async def run() -> None:
        answer = answer_to(make_prompt(rid="a"), make_prompt(rid="b"))
        answer.feed(0, update("x", LENGTH), now=11.0)
        answer.fail(RequestRefused("too large"))
        answer.fail(RequestRefused("the second error"))
        assert answer.finished
        for work in (answer.outputs(), anext(answer.updates())):
            with pytest.raises(RequestRefused, match="too large"):
                await work

    asyncio.run(run())
