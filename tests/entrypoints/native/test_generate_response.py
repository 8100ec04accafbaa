"""Outputs in SGLang's shape: whole, so far, and what is new."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from baton.entrypoints.native.generate import parse_generate
from baton.entrypoints.native.generate_response import dressed, stream_events, whole_response
from baton.runtime.answer import Answer, Output, TokenLogprob
from baton.runtime.messages import (
    BeamOutput,
    ContinuationOutput,
    LogprobChunk,
    RetainedOutput,
    TextOutput,
    TokenOutput,
)
from baton.runtime.prompt import Prompt
from baton.scheduler.outcome import CacheReport, FinishReason, FoundTokens, MissedSpan
from baton.scheduler.token_buffer import pack_ids
from tests.doubles.packed_logprobs import packed
from tests.doubles.prompts import make_prompt

LENGTH = FinishReason("length")


def output(finish: FinishReason | None = None, prompt: Prompt | None = None, **details: Any) -> Output:
    return Output(
        prompt or make_prompt(rid="r"), 0, 0, "ab", [1, 2], prompt_tokens=4, completion_tokens=2,
        found=FoundTokens(2, 1), finish=finish, **details,
    )  # fmt: skip


def test_unfinished_output_has_no_finish_reason() -> None:
    assert dressed(output()) == {
        "text": "ab",
        "output_ids": [1, 2],
        "meta_info": {
            "id": "r", "finish_reason": None, "prompt_tokens": 4, "completion_tokens": 2, "cached_tokens": 3,
            "cached_tokens_details": {"device": 2, "host": 1, "disk": 0, "remote": 0},
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("finish", "reason"),
    [
        (LENGTH, {"type": "length", "length": 2}),
        (FinishReason("stop", matched=7), {"type": "stop", "matched": 7}),
        (FinishReason("stop"), {"type": "stop", "matched": None}),
        (FinishReason("abort", message="why"), {"type": "abort", "message": "why"}),
        (FinishReason("abort"), {"type": "abort", "message": "aborted"}),
    ],
)
def test_finish_reasons(finish: FinishReason, reason: dict) -> None:
    meta = dressed(output(finish, e2e_latency=1.5))["meta_info"]
    assert (meta["finish_reason"], meta["e2e_latency"]) == (reason, 1.5)


def test_finished_output_carries_details() -> None:
    inherited = ContinuationOutput(path="handoff", inherited_tokens=9, recomputed_tokens=1, trimmed_tokens=0)
    beam = BeamOutput(sequence_score=-0.5, cumulative_logprob=-1.0, num_results=1, shortfall="no more")
    kept = RetainedOutput(tokens=10, ttl=4.5)
    meta = dressed(output(LENGTH, e2e_latency=1.5, beam=beam, continuation=inherited, retained=kept))["meta_info"]
    assert list(meta.items())[6:] == [
        ("e2e_latency", 1.5),
        ("cumulative_logprob", -1.0),
        ("sequence_score", -0.5),
        ("beam_search", {"results": 1, "reason": "no more"}),
        ("continuation", {"path": "handoff", "inherited_tokens": 9, "recomputed_tokens": 1, "trimmed_tokens": 0}),
        ("retained", {"tokens": 10, "ttl": 4.5}),
    ]
    assert dressed(output(LENGTH, retained=RetainedOutput(refused="full")))["meta_info"]["retained"] == {
        "refused": "full"
    }


def test_logprob_rows_hold_logprob_id_and_text() -> None:
    tokens = [
        TokenLogprob(None, 5, "five"),
        TokenLogprob(-0.5, 6, "six", [TokenLogprob(-0.5, 6, "six"), TokenLogprob(None, 7, "seven")]),
    ]
    asked = make_prompt(rid="r", return_logprob=True, top_logprobs_num=2)
    meta = dressed(output(prompt=asked, input_logprobs=packed(tokens)))["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 5, "five"], [-0.5, 6, "six"]]
    assert meta["input_top_logprobs"] == [None, [[-0.5, 6, "six"], [None, 7, "seven"]]]
    assert meta["output_token_logprobs"] == meta["output_top_logprobs"] == []
    without_top = dressed(output(prompt=make_prompt(rid="r", return_logprob=True)))["meta_info"]
    assert "output_token_logprobs" in without_top and "output_top_logprobs" not in without_top
    assert not [name for name in dressed(output())["meta_info"] if "logprobs" in name]


def update(text: str, finish: FinishReason | None = None, prompt_ids: bytes = b"") -> TextOutput:
    ids = pack_ids(list(text.encode()))
    chunk = LogprobChunk(ids=ids, values=b"\0\0\0\xbf" * len(text))  # -0.5
    output = TokenOutput(rid="r", new_ids=ids, prompt_ids=prompt_ids, finish=finish, output_logprobs=chunk)
    return TextOutput(output=output, text=text)


def streamed(incremental: bool, **fields: Any) -> list[dict]:
    """The events of "abc", and of "x" where there is a second prompt, read one by one."""

    async def run() -> list[dict]:
        batch = parse_generate({"return_logprob": True, "rid": "r", **fields})
        answer = Answer(batch.prompts, 0.0, lambda answer: None, chr)
        events = stream_events(answer, batch, incremental=incremental)
        got = []
        for letter, finish in (("a", None), ("b", None), ("c", LENGTH)):
            prompt_ids = pack_ids([7, 8]) if letter == "a" and fields.get("return_prompt_token_ids") else b""
            answer.feed(0, update(letter, finish, prompt_ids), 1.0)
            got.append(await anext(events))
        if len(batch.prompts) > 1:
            answer.feed(1, update("x", LENGTH), 1.0)
        return got + [event async for event in events]

    return asyncio.run(run())


def test_stream_events_are_cumulative() -> None:
    events = streamed(False, text="p")
    assert [event["text"] for event in events] == ["a", "ab", "abc"]
    assert [event["output_ids"] for event in events] == [[97], [97, 98], [97, 98, 99]]
    rows = [event["meta_info"]["output_token_logprobs"] for event in events]
    assert rows == [[[-0.5, token, None] for token in b"abc"[:length]] for length in (1, 2, 3)]
    assert not any("index" in event for event in events)


@pytest.mark.parametrize("incremental", [False, True])
def test_prompt_ids_appear_in_every_event_or_the_first(incremental: bool) -> None:
    events = streamed(incremental, text="p", return_prompt_token_ids=True)
    told = [event.get("prompt_token_ids") for event in events]
    assert told == ([[7, 8], None, None] if incremental else [[7, 8]] * 3)


def test_incremental_events_hold_only_new_output() -> None:
    events = streamed(True, text=["p", "q"])
    assert [(event["index"], event["text"]) for event in events] == [(0, "a"), (0, "b"), (0, "c"), (1, "x")]
    assert [event["output_ids"] for event in events] == [[97], [98], [99], [120]]
    assert [len(event["meta_info"]["output_token_logprobs"]) for event in events] == [1, 1, 1, 1]


@pytest.mark.parametrize(("text", "is_list"), [("p", False), (["p"], True)])
def test_response_is_a_list_for_a_list_of_prompts(text: Any, is_list: bool) -> None:
    async def run() -> None:
        batch = parse_generate({"text": text, "rid": "r"})
        answer = Answer(batch.prompts, 0.0, lambda answer: None, chr)
        answer.feed(0, update("ab"), 1.0)
        answer.feed(0, update("c", LENGTH), 1.5)
        response = whole_response(await answer.outputs(), batch)
        (got,) = response if isinstance(response, list) else [response]
        assert isinstance(response, list) is is_list
        assert (got["text"], got["meta_info"]["e2e_latency"]) == ("abc", 1.5)

    asyncio.run(run())


def test_finished_output_has_its_cache_report() -> None:
    report = CacheReport((MissedSpan("evicted", 3, 5, 1.5, "r0"), MissedSpan("required", 8, 1)), 3)
    assert "cache_report" not in dressed(output(cache_report=report))["meta_info"], "before the end"
    assert dressed(output(LENGTH, cache_report=report))["meta_info"]["cache_report"] == {
        "found": {"device": 2, "host": 1, "disk": 0, "remote": 0},
        "missed": [
            {"reason": "evicted", "start": 3, "tokens": 5, "seconds_ago": 1.5, "by": "r0"},
            {"reason": "required", "start": 8, "tokens": 1},
        ],
        "diverged_at": 3,
    }


def test_cache_report_can_be_left_out_and_has_the_divergence_of_a_chat() -> None:
    report, prompt = CacheReport((MissedSpan("required", 3, 1),)), make_prompt(rid="r")
    off = dataclasses.replace(prompt, return_cache_report=False)
    assert "cache_report" not in dressed(output(LENGTH, off, cache_report=report))["meta_info"]
    chat = dataclasses.replace(prompt, divergence={"kind": "system"})
    told = dressed(output(LENGTH, chat, cache_report=report))["meta_info"]["cache_report"]
    assert told["divergence"] == {"kind": "system"} and "diverged_at" not in told
