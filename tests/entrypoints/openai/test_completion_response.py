"""Answers and streams of completions in OpenAI's shape."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.entrypoints.openai.common import usage
from baton.entrypoints.openai.completion_response import CompletionResponse
from baton.entrypoints.openai.completions import parse_completion
from baton.runtime.answer import Output
from baton.runtime.messages import BeamOutput, ContinuationOutput, RetainedOutput
from baton.runtime.text.tokenizer import Tokenizer
from baton.scheduler.outcome import CacheReport, FinishReason, FoundTokens, MissedSpan, RequestRefused
from tests.doubles.byte_tokenizer import write_byte_tokenizer
from tests.doubles.prompts import make_prompt

LENGTH = FinishReason("length")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_byte_tokenizer(tmp_path_factory.mktemp("model")))


def output(text: str, finish: FinishReason | None, position: int = 0, **details: Any) -> Output:
    """An output of a request with n = 2."""
    return Output(
        make_prompt(rid="r"), position, position % 2, text, [],
        prompt_tokens=4, completion_tokens=2, found=FoundTokens(1, 0, 2), finish=finish, **details,
    )  # fmt: skip


def test_whole_completion_has_the_openai_shape(tokenizer: Tokenizer) -> None:
    call = parse_completion({"prompt": ["ab", "c"], "n": 2, "echo": True, "rid": "r"})
    inherited = ContinuationOutput(path="match", inherited_tokens=3, recomputed_tokens=2, trimmed_tokens=1)
    outputs = [
        output("x", LENGTH, 0),
        output("y", FinishReason("stop", matched="!"), 1, retained=RetainedOutput(tokens=5, ttl=1.0)),
        output("z", LENGTH, 2),
        output("", FinishReason("abort", message="gone"), 3, continuation=inherited),
    ]
    answer = CompletionResponse(call, "served", tokenizer).whole(outputs)
    assert answer.pop("created") > 1.7e9
    assert answer == {
        "id": "cmpl-r",
        "object": "text_completion",
        "model": "served",
        "choices": [
            {"index": 0, "text": "abx", "logprobs": None, "finish_reason": "length", "matched_stop": None,
             "baton": {"rid": "r", "index": 0}},
            {"index": 1, "text": "aby", "logprobs": None, "finish_reason": "stop", "matched_stop": "!",
             "baton": {"rid": "r", "index": 1, "retained": {"tokens": 5, "ttl": 1.0}}},
            {"index": 2, "text": "cz", "logprobs": None, "finish_reason": "length", "matched_stop": None,
             "baton": {"rid": "r", "index": 0}},
            {"index": 3, "text": "c", "logprobs": None, "finish_reason": "abort", "matched_stop": None,
             "baton": {"rid": "r", "index": 1, "continuation": {
                 "path": "match", "inherited_tokens": 3, "recomputed_tokens": 2, "trimmed_tokens": 1,
             }}},
        ],
        "usage": {"prompt_tokens": 8, "completion_tokens": 8, "total_tokens": 16,
                  "prompt_tokens_details": {
                      "cached_tokens": 6,
                      "cached_tokens_details": {"device": 2, "host": 0, "disk": 4, "remote": 0},
                  }},
    }  # fmt: skip


def test_beam_shortfall_is_reported_in_choices(tokenizer: Tokenizer) -> None:
    call = parse_completion({"prompt": ["ab", "c"], "n": 2, "use_beam_search": True, "rid": "r"})
    scores: dict[str, Any] = {"cumulative_logprob": -1.0, "sequence_score": -0.5}
    few = {"beam_search": {"results": 1, "reason": "no more"}}
    all_found, one_found = BeamOutput(**scores, num_results=2), BeamOutput(**scores, num_results=1, shortfall="no more")
    outputs = [output("x", LENGTH, 0, beam=all_found), output("y", LENGTH, 1, beam=all_found)]
    outputs.append(output("z", LENGTH, 2, beam=one_found))
    answer = CompletionResponse(call, "m", tokenizer).whole(outputs)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["choices"][2]["baton"] == {"rid": "r", "index": 0, **scores, **few}
    assert answer["usage"]["completion_tokens"] == 6 and answer["usage"]["prompt_tokens"] == 8


def test_echo_of_token_ids_is_decoded(tokenizer: Tokenizer) -> None:
    call = parse_completion({"prompt": [97, 256], "echo": True})
    answer = CompletionResponse(call, "m", tokenizer).whole([output("x", LENGTH)])
    assert answer["choices"][0]["text"] == "a<eos>x"


def stream(call: Any, tokenizer: Tokenizer, updates: list) -> list[dict]:
    async def source() -> AsyncIterator[Output]:
        for update in updates:
            if isinstance(update, Exception):
                raise update
            yield update

    async def run() -> list[dict]:
        return [chunk async for chunk in CompletionResponse(call, "m", tokenizer).chunks(source())]

    return asyncio.run(run())


def test_stream_delivers_the_answer_in_chunks(tokenizer: Tokenizer) -> None:
    fields = {"prompt": "p", "n": 2, "echo": True, "stream": True}
    updates = [
        output("a", None, 0),
        output("b", None, 1),
        output("", None, 0),  # half a character: nothing to say yet
        output("c", LENGTH, 0),
        output("", LENGTH, 1),
    ]
    chunks = stream(parse_completion({**fields, "stream_options": {"include_usage": True}}), tokenizer, updates)
    assert [(c["choices"][0]["index"], c["choices"][0]["text"]) for c in chunks[:-1]] == [
        (0, "pa"), (1, "pb"), (0, "c"), (1, ""),
    ]  # fmt: skip
    assert [c["choices"][0]["finish_reason"] for c in chunks[:-1]] == [None, None, "length", "length"]
    assert ["baton" in c["choices"][0] for c in chunks[:-1]] == [False, False, True, True]
    assert {c["usage"] for c in chunks[:-1]} == {None}
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["total_tokens"] == 4 + 2 * 2
    assert len({(c["id"], c["created"], c["model"]) for c in chunks}) == 1
    plain = stream(parse_completion(fields), tokenizer, updates)
    assert len(plain) == 4 and not any("usage" in chunk for chunk in plain)


def test_stream_error_uses_openai_field_names(tokenizer: Tokenizer) -> None:
    call = parse_completion({"prompt": "p", "stream": True})
    with pytest.raises(RequestRefused, match="max_tokens") as caught:
        stream(call, tokenizer, [RequestRefused("max_new_tokens", param="max_new_tokens")])
    assert caught.value.param == "max_tokens"


@pytest.mark.parametrize("wanted", [True, False, None])
def test_usage_has_the_cache_reports_that_were_asked_for(wanted: bool | None) -> None:
    report = CacheReport((MissedSpan("unseen", 3, 0), MissedSpan("required", 3, 1)))
    told = {
        "found": {"device": 1, "host": 0, "disk": 2, "remote": 0},
        "missed": [{"reason": "unseen", "start": 3, "tokens": 0}, {"reason": "required", "start": 3, "tokens": 1}],
    }
    outputs = [output("x", LENGTH, place, cache_report=report) for place in range(4)]
    for each in outputs:
        each.prompt = dataclasses.replace(each.prompt, return_cache_report=wanted)
    one, two = usage(outputs[:2])["prompt_tokens_details"], usage(outputs)["prompt_tokens_details"]
    assert one.get("cache_report") == (told if wanted else None) and "cache_reports" not in one
    assert two.get("cache_reports") == ([told, told] if wanted else None) and "cache_report" not in two
