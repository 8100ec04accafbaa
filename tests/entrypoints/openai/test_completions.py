"""The fields of OpenAI's completions: each is served, refused by name or a label."""

from __future__ import annotations

from typing import Any

import pytest

from baton.entrypoints.fields.foreign_fields import FOREIGN_OF
from baton.entrypoints.fields.namespaces import namespace_of
from baton.entrypoints.http_statuses import status_of
from baton.entrypoints.openai.completions import (
    COMPLETION_NAMES,
    PROPERTIES,
    parse_completion,
)
from baton.runtime.prompt import Prompt
from baton.scheduler.limits import check_logprob_limit
from baton.scheduler.outcome import RequestRefused
from baton.scheduler.request_spec import ContinuationSpec
from baton.scheduler.sampling_params import SamplingParams


def prompt_of(**fields: Any) -> Prompt:
    (prompt,) = parse_completion(fields).batch.prompts
    return prompt


def refusal(**fields: Any) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        parse_completion(fields)
    assert status_of(caught.value) == 400
    return caught.value


def test_completion_defaults_match_openai() -> None:
    call = parse_completion({"prompt": "a", "rid": "r"})
    (prompt,) = call.batch.prompts
    assert prompt.sampling == SamplingParams(max_new_tokens=16, temperature=1.0)
    assert (call.response_id, call.model, call.echo, call.logprobs, call.include_usage) == (
        "cmpl-r", None, False, None, False,
    )  # fmt: skip
    assert parse_completion({"prompt": "a", "rid": "cmpl-r"}).response_id == "cmpl-r"


def test_null_is_the_default() -> None:
    nulls = dict.fromkeys([*PROPERTIES, *FOREIGN_OF["completions"]])
    (prompt,) = parse_completion({**nulls, "prompt": "a"}).batch.prompts
    assert prompt.sampling == SamplingParams(max_new_tokens=16) and prompt.continuation is None


def test_openai_sampling_fields_are_read() -> None:
    given = {
        "max_tokens": 7, "min_tokens": 2, "temperature": 0, "top_p": 0.5, "n": 2, "best_of": 2, "stop": ["x"],
        "seed": 3, "presence_penalty": 1, "frequency_penalty": -1, "logit_bias": {"5": 1}, "top_k": 4, "min_p": 0.1,
        "repetition_penalty": 1.5, "stop_token_ids": [1], "ignore_eos": True, "skip_special_tokens": False,
    }  # fmt: skip
    assert prompt_of(prompt="a", **given).sampling == SamplingParams(
        max_new_tokens=7, min_new_tokens=2, temperature=0.0, top_p=0.5, n=2, stop=("x",), seed=3, presence_penalty=1.0,
        frequency_penalty=-1.0, logit_bias={5: 1.0}, top_k=4, min_p=0.1, repetition_penalty=1.5, stop_token_ids=(1,),
        ignore_eos=True, skip_special_tokens=False,
    )  # fmt: skip
    assert prompt_of(prompt="a", no_stop_trim=True).sampling.no_stop_trim
    assert prompt_of(prompt="a", include_stop_str_in_output=True, no_stop_trim=True).sampling.no_stop_trim
    assert not prompt_of(prompt="a", include_stop_str_in_output=False).sampling.no_stop_trim
    assert prompt_of(prompt="a", allowed_token_ids=[3, 4]).sampling.allowed_token_ids == (3, 4)
    assert prompt_of(prompt="a", allowed_token_ids=None).sampling.allowed_token_ids == ()
    with pytest.raises(RequestRefused, match="allowed_token_ids is empty, so no token may be sampled") as refused:
        prompt_of(prompt="a", allowed_token_ids=[])
    assert refused.value.param == "allowed_token_ids"
    assert prompt_of(prompt="a", stop_regex=["a+", "b$"]).sampling.stop_regex == ("a+", "b$")
    assert prompt_of(prompt="a", bad_words=["b", " c"]).sampling.bad_words == ("b", " c")
    assert prompt_of(prompt="a", bad_words=[]).sampling.bad_words == ()
    assert prompt_of(prompt="a", stop_regex="").sampling.stop_regex == ()
    assert prompt_of(prompt="a", temperature=2).sampling.temperature == 2.0


def test_logprob_limit_error_uses_openai_field_names() -> None:
    asked = prompt_of(prompt="a", logprobs=500).spec.logprobs
    assert asked is not None and asked.top_k == 500
    with pytest.raises(RequestRefused) as caught, COMPLETION_NAMES.translated():
        check_logprob_limit(asked, 20)
    assert caught.value.message.startswith("logprobs is 500; this server gives at most 20.")
    assert caught.value.param == "logprobs"


@pytest.mark.parametrize(
    ("given", "width", "n"),
    [
        ({"use_beam_search": True, "n": 32}, 32, 32),
        ({"use_beam_search": True}, 1, 1),
        ({"use_beam_search": True, "n": 4, "best_of": 8}, 8, 4),
        ({"use_beam_search": True, "n": 4, "beam_width": 8}, 8, 4),
        ({"use_beam_search": True, "beam_width": 0, "n": 2}, 2, 2),
        ({"beam_width": 8}, 8, 1),
        ({"beam_width": 8, "best_of": 8}, 8, 1),
        ({"use_beam_search": False, "n": 2, "best_of": 2}, None, 2),
        ({"use_beam_search": False, "beam_width": 0, "n": 2}, None, 2),
        ({"beam_width": 0}, None, 1),
    ],
)
@pytest.mark.parametrize("temperature", [None, 0, 0.0, 1])
def test_use_beam_search_sets_width_and_n(given: dict, width: int | None, n: int, temperature: float | None) -> None:
    sampling = prompt_of(prompt="a", temperature=temperature, **given).sampling
    assert (sampling.beam_width, sampling.n) == (width, n)


def test_beam_search_end_parameters_are_read() -> None:
    given = {"length_penalty": 0.5, "early_stopping": "never", "item_trie": "t", "n": 2, "use_beam_search": True}
    assert prompt_of(prompt="a", **given).sampling == SamplingParams(
        max_new_tokens=16, beam_width=2, n=2, length_penalty=0.5, early_stopping="never", item_trie="t"
    )


@pytest.mark.parametrize(
    ("prompt", "texts", "ids"),
    [
        ("a", ["a"], [None]),
        (["a"], ["a"], [None]),
        (["a", "b"], ["a", "b"], [None, None]),
        ([1, 2], [None], [[1, 2]]),
        ([[1, 2]], [None], [[1, 2]]),
        ([[1], [2]], [None, None], [[1], [2]]),
    ],
)
def test_prompt_forms_are_read(prompt: Any, texts: list, ids: list) -> None:
    call = parse_completion({"prompt": prompt, "rid": "r"}).batch
    assert [p.text for p in call.prompts] == texts and [p.input_ids for p in call.prompts] == ids
    assert [p.rid for p in call.prompts] == (["r"] if len(texts) == 1 else ["r_0", "r_1"])


def test_continuations() -> None:
    fields = {"continuation_of": "cmpl-p", "continuation_suffix": "x", "retain_ttl": 5, "cache_salt": "s"}
    for prompt in (None, "", [], [""]):
        asked = prompt_of(prompt=prompt, **fields)
        assert asked.continuation == ContinuationSpec(parent_rid="p", suffix_text="x")
        assert (asked.text, asked.input_ids, asked.spec.retain_ttl) == (None, None, 5.0)
        assert asked.spec.namespace == namespace_of("s", "")
    assert prompt_of(prompt="whole", **fields).text == "whole"


def test_names() -> None:
    assert parse_completion({"prompt": "a", "request_id": "q"}).response_id == "cmpl-q"
    assert parse_completion({"prompt": "a", "request_id": "q", "rid": "q"}).response_id == "cmpl-q"
    assert parse_completion({"prompt": "a"}, rid="header").response_id == "cmpl-header"
    assert refusal(prompt="a", request_id="q", rid="r").param == "request_id"
    assert refusal(prompt="a", request_id=5).param == "request_id"


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": None}, "prompt", "prompt is missing"),
        ({"prompt": 5}, "prompt", "a string, token ids"),
        ({"prompt": {}}, "prompt", "a string, token ids"),
        ({"prompt": ["a", 1]}, "prompt", "prompt takes a list of whole numbers"),
        ({"prompt": [[1], "a"]}, "prompt", "whole numbers"),
        ({"max_tokens": -1}, "max_tokens", "max_tokens is -1; use 1 or more"),
        ({"max_tokens": "5"}, "max_tokens", "max_tokens: expected int"),
        ({"min_tokens": 17}, "min_tokens", "it exceeds max_tokens (16)"),
        ({"temperature": -1}, "temperature", "temperature is -1.0"),
        ({"n": 0}, "n", "n is 0"),
        ({"n": 2, "best_of": 3}, "best_of", "leave best_of out"),
        ({"best_of": 2}, "best_of", "leave best_of out"),
        ({"best_of": True}, "best_of", "whole number"),
        ({"use_beam_search": 1, "n": 2}, "use_beam_search", "true or false"),
        ({"use_beam_search": False, "beam_width": 4}, "use_beam_search", "leave one of them out"),
        ({"use_beam_search": True, "n": 4, "best_of": 2}, "n", "at most beam_width (2)"),
        ({"use_beam_search": True, "beam_width": 4, "best_of": 8}, "best_of", "they mean the same"),
        ({"use_beam_search": True, "n": "4"}, "n", "n: expected int, got str"),
        ({"beam_width": "4"}, "beam_width", "beam_width: expected int, got str"),
        ({"use_beam_search": True, "n": 2, "temperature": 0.5}, "temperature", "does not sample"),
        ({"length_penalty": 2}, "length_penalty", "it needs a beam_width"),
        ({"beam_width": 2, "early_stopping": "x"}, "early_stopping", 'it takes true, false or "never"'),
        ({"logprobs": -1}, "logprobs", "logprobs is -1; use 0 or more"),
        ({"temperature": 2.5}, "temperature", "temperature is 2.5; use 0 to 2"),
        ({"logprobs": True}, "logprobs", "whole number"),
        ({"echo": 1}, "echo", "true or false"),
        ({"echo": True, "continuation_of": "p"}, "echo", "leave it out"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "known fields: include_usage"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or false"),
        ({"stream": True, "stream_options": 1}, "stream_options", "an object"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output", "true or false"),
        ({"include_stop_str_in_output": True, "no_stop_trim": False}, "include_stop_str_in_output", "mean the same"),
        ({"allowed_token_ids": "x"}, "allowed_token_ids", "expected array"),
        ({"stop_regex": r"(a)\1"}, "stop_regex", "back-references are not supported"),
        ({"stop_regex": ["a", ""]}, "stop_regex", "an empty expression"),
        ({"bad_words": "a"}, "bad_words", "expected array"),
        ({"bad_words": ["a"], "beam_width": 4}, "beam_width", "it does not go with bad_words"),
        ({"allowed_token_ids": [1] * 16_385}, "allowed_token_ids", "use at most 16384"),
        ({"max_new_tokens": 5, "max_tokens": 6}, "max_new_tokens", "mean the same"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "logit_bias: its keys must be token ids"),
        ({"text": "x"}, "text", "text is not supported; use prompt"),
        ({"continuation_suffix": "x"}, "continuation_suffix", "add continuation_of"),
        ({"continuation_of": ["p", "q"]}, "prompt", "list 2 prompts and text holds 1"),
        ({"no_stop_trim": 1}, "no_stop_trim", "true or false"),
    ],
)  # fmt: skip
def test_invalid_fields_are_named_in_openai_terms(fields: dict, param: str, words: str) -> None:
    error = refusal(**{"prompt": "a", **fields})
    assert error.param == param and words in error.message
    assert "sampling_params" not in error.message


def test_worker_refusal_is_translated_to_openai_names() -> None:
    with pytest.raises(RequestRefused) as caught, COMPLETION_NAMES.translated():
        raise RequestRefused(
            "max_new_tokens (5) and input_ids; send its full prompt as text or input_ids too",
            code="parent_forgotten", param="max_new_tokens",
        )  # fmt: skip
    error = caught.value
    assert error.message == "max_tokens (5) and prompt; send its full prompt as prompt too"
    assert (status_of(error), error.code, error.param) == (410, "parent_forgotten", "max_tokens")
    with pytest.raises(RequestRefused) as caught, COMPLETION_NAMES.translated():
        raise RequestRefused("busy")
    assert caught.value.param is None


def test_excess_prompts_are_refused() -> None:
    with pytest.raises(RequestRefused, match="prompt holds 3 prompts; send at most 2") as refused:
        parse_completion({"prompt": [[1], [2], [3]]}, max_prompts=2)
    assert refused.value.param == "prompt"


@pytest.mark.parametrize("best_of", [0, -1, 513])
@pytest.mark.parametrize("search", [False, True])
def test_best_of_is_limited_like_n(best_of: int, search: bool) -> None:
    """A search of no beams would be none."""
    error = refusal(prompt="a", best_of=best_of, use_beam_search=search)
    assert (error.message, error.param) == (f"best_of is {best_of}; use 1 to 512", "best_of")
