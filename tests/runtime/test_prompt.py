"""What the model cannot serve: prompts and continuations against its limits."""

from __future__ import annotations

from typing import Any

import pytest

from baton.runtime.prompt import ModelLimits, Prompt, check_continuation, check_prompt, truncated
from baton.scheduler.outcome import RequestRefused
from baton.scheduler.request_spec import ContinuationSpec
from baton.scheduler.sampling_params import SamplingParams
from tests.doubles.prompts import make_prompt

LIMITS = ModelLimits(context_length=100, vocab_size=50)


def child(ids: list[int] | None = None, text: str | None = None, **fields: Any) -> Prompt:
    continuation = ContinuationSpec("p", suffix_text=text)
    return make_prompt(rid="c", continuation=continuation, suffix_ids=ids, **fields)


def test_source_names_the_prompt_field() -> None:
    assert make_prompt(rid="r", text="a").source == "text"
    assert make_prompt(rid="r", input_ids=[1]).source == "input_ids"
    assert child(text="a", input_ids=[1]).source == child().source == "continuation_suffix"
    assert child(ids=[1], text=None).source == "continuation_ids"


def test_beam_width_is_limited_by_vocabulary() -> None:
    for width in (50, 51):
        wide = make_prompt(rid="r", input_ids=[1], sampling=SamplingParams(max_new_tokens=9, beam_width=width))
        if width == 50:
            check_prompt(wide, [1], LIMITS)
            continue
        with pytest.raises(RequestRefused, match="beam_width is 51; the vocabulary has 50 tokens: use 50") as caught:
            check_prompt(wide, [1], LIMITS)
        assert caught.value.param == "beam_width"


def test_prompt_without_output_may_fill_the_context() -> None:
    prompt = make_prompt(rid="r", input_ids=[1], sampling=SamplingParams(max_new_tokens=0))
    check_prompt(prompt, [1] * 100, LIMITS)
    with pytest.raises(RequestRefused, match=r"101 tokens\) is longer than the model's context length \(100 tokens\)"):
        check_prompt(prompt, [1] * 101, LIMITS)
    one = make_prompt(rid="r", input_ids=[1], sampling=SamplingParams(max_new_tokens=1))
    with pytest.raises(RequestRefused, match="100 tokens, with at least one new one"):
        check_prompt(one, [1] * 100, LIMITS)


def test_default_output_limit_is_clamped_to_context() -> None:
    spec = {"rid": "r", "sampling": SamplingParams(max_new_tokens=16)}
    check_prompt(make_prompt(**spec, input_ids=[1], clamps_output=True), [1] * 99, LIMITS)
    with pytest.raises(RequestRefused, match="99 tokens from the input and 16 tokens for the output"):
        check_prompt(make_prompt(**spec, input_ids=[1]), [1] * 99, LIMITS)
    with pytest.raises(RequestRefused, match="100 tokens"):
        check_prompt(make_prompt(**spec, input_ids=[1], clamps_output=True), [1] * 100, LIMITS)


def test_empty_suffix_is_accepted_but_empty_prompt_is_refused() -> None:
    check_continuation(child(sampling=SamplingParams(max_new_tokens=99)), [], LIMITS)
    with pytest.raises(RequestRefused, match="empty"):
        check_prompt(make_prompt(rid="r", text=""), [], LIMITS)


@pytest.mark.parametrize(
    ("prompt", "suffix", "param", "words"),
    [
        (child(ids=[50]), [50], "continuation_ids", "50; token ids go from 0 to 49"),
        (child(ids=[1], input_ids=[-1]), [1], "input_ids", "-1"),
        (child(ids=[1] * 99), [1] * 99, "continuation_ids", "at least 100 tokens) is longer"),
        (child(text="x"), [1] * 99, "continuation_suffix", "at least 100"),
        (child(sampling=SamplingParams(max_new_tokens=100)), [], "max_new_tokens", "max_new_tokens <= 99"),
        (child(sampling=SamplingParams(max_new_tokens=10, stop_token_ids=(60,))), [], "stop_token_ids", "60"),
        (child(sampling=SamplingParams(max_new_tokens=10, allowed_token_ids=(1, 50))), [], "allowed_token_ids", "50"),
        (
            child(sampling=SamplingParams(max_new_tokens=10), return_logprob=True, top_logprobs_num=51),
            [],
            "top_logprobs_num",
            "51",
        ),
    ],
)
def test_invalid_continuations_are_refused(prompt: Prompt, suffix: list[int], param: str, words: str) -> None:
    with pytest.raises(RequestRefused) as caught:
        check_continuation(prompt, suffix, LIMITS)
    assert caught.value.param == param and words in caught.value.message


@pytest.mark.parametrize(
    ("truncate_to", "sampling", "left"),
    [
        (None, SamplingParams(), 150),
        (1, SamplingParams(), 1),
        (149, SamplingParams(), 149),
        (150, SamplingParams(), 150),
        (151, SamplingParams(), 150),
        (-1, SamplingParams(max_new_tokens=30), 70),
        (-1, SamplingParams(max_new_tokens=0), 100),
        (-1, SamplingParams(max_new_tokens=None), 99),
        (-1, SamplingParams(max_new_tokens=None, min_new_tokens=5), 95),
        (-1, SamplingParams(max_new_tokens=100), 150),  # no room at all: refused as it is
    ],
)
def test_truncation_keeps_the_last_tokens(truncate_to: int | None, sampling: SamplingParams, left: int) -> None:
    ids = list(range(150))
    prompt = make_prompt(rid="r", sampling=sampling, truncate_to=truncate_to)
    assert truncated(prompt, ids, LIMITS.context_length) == ids[150 - left :]
    assert truncated(prompt, [7], LIMITS.context_length) == [7]
