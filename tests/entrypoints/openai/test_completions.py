"""OpenAI's completions: every field served, refused by name or a label; answers and streams in OpenAI's shape."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from byte_tokenizer import write_byte_tokenizer

from baton.entrypoints.openai.completions import (
    FIELDS,
    UNSUPPORTED,
    WITHOUT_EFFECT,
    CompletionAnswer,
    in_openai_words,
    parse_completion,
)
from baton.runtime.prompt import ContinuationPrompt, Prompt
from baton.runtime.text.tokenizer import Tokenizer
from baton.scheduler.refusal import RequestRefused
from baton.scheduler.sampling_params import SamplingParams


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(write_byte_tokenizer(tmp_path_factory.mktemp("model")))


def prompt_of(**fields: Any) -> Prompt:
    (prompt,) = parse_completion(fields).generate.prompts
    return prompt


def refusal(**fields: Any) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        parse_completion(fields)
    assert caught.value.status == 400
    return caught.value


# -- fields ------------------------------------------------------------------------------------------------------------


def test_openais_defaults() -> None:
    call = parse_completion({"prompt": "a", "rid": "r"})
    (prompt,) = call.generate.prompts
    assert prompt.sampling == SamplingParams(max_new_tokens=16, temperature=1.0)
    assert (call.response_id, call.model, call.echo, call.logprobs, call.include_usage) == (
        "cmpl-r", None, False, None, False,
    )  # fmt: skip
    assert parse_completion({"prompt": "a", "rid": "cmpl-r"}).response_id == "cmpl-r"


def test_null_is_the_default() -> None:
    nulls = dict.fromkeys([*FIELDS, *UNSUPPORTED, *WITHOUT_EFFECT])
    (prompt,) = parse_completion({**nulls, "prompt": "a"}).generate.prompts
    assert prompt.sampling == SamplingParams(max_new_tokens=16) and prompt.continuation is None


def test_sampling_fields_under_openais_names() -> None:
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
def test_beam_searches(given: dict, width: int | None, n: int, temperature: float | None) -> None:
    sampling = prompt_of(prompt="a", temperature=temperature, **given).sampling
    assert (sampling.beam_width, sampling.n) == (width, n)


def test_how_a_beam_search_ends() -> None:
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
def test_prompts(prompt: Any, texts: list, ids: list) -> None:
    call = parse_completion({"prompt": prompt, "rid": "r"}).generate
    assert [p.text for p in call.prompts] == texts and [p.input_ids for p in call.prompts] == ids
    assert [p.rid for p in call.prompts] == (["r"] if len(texts) == 1 else ["r_0", "r_1"])


def test_continuations() -> None:
    fields = {"continuation_of": "cmpl-p", "continuation_suffix": "x", "retain_ttl": 5, "cache_salt": "s"}
    for prompt in (None, "", [], [""]):
        asked = prompt_of(prompt=prompt, **fields)
        assert asked.continuation == ContinuationPrompt(parent_rid="p", suffix_text="x")
        assert (asked.text, asked.input_ids, asked.retain_ttl, asked.namespace) == (None, None, 5.0, "s")
    assert prompt_of(prompt="whole", **fields).text == "whole"


def test_names() -> None:
    assert parse_completion({"prompt": "a", "request_id": "q"}).response_id == "cmpl-q"
    assert parse_completion({"prompt": "a", "request_id": "q", "rid": "q"}).response_id == "cmpl-q"
    assert parse_completion({"prompt": "a"}, rid="header").response_id == "cmpl-header"
    assert refusal(prompt="a", request_id="q", rid="r").param == "request_id"
    assert refusal(prompt="a", request_id=5).param == "request_id"


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_fields_pass_at_neutral_values_only(name: str) -> None:
    for neutral in UNSUPPORTED[name]:
        parse_completion({"prompt": "a", name: neutral})
    error = refusal(prompt="a", **{name: "something"})
    assert error.param == name and error.code == "unsupported_field"


def test_labels_are_without_effect() -> None:
    assert prompt_of(prompt="a", **dict.fromkeys(WITHOUT_EFFECT, "x")).sampling == SamplingParams(max_new_tokens=16)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": None}, "prompt", "prompt is missing"),
        ({"prompt": 5}, "prompt", "a string, token ids"),
        ({"prompt": {}}, "prompt", "a string, token ids"),
        ({"prompt": ["a", 1]}, "prompt", "prompt takes a list of whole numbers"),
        ({"prompt": [[1], "a"]}, "prompt", "whole numbers"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens is 0; use 1 or more"),
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
        ({"logprobs": 6}, "logprobs", "use 0 to 5"),
        ({"logprobs": True}, "logprobs", "whole number"),
        ({"echo": 1}, "echo", "true or false"),
        ({"echo": True, "continuation_of": "p"}, "echo", "leave it out"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "add stream: true"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or false"),
        ({"stream": True, "stream_options": 1}, "stream_options", "an object"),
        ({"stream": "yes"}, "stream", "true or false"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"max_new_tokens": 5}, "max_new_tokens", "did you mean"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "logit_bias: its keys must be token ids"),
        ({"continuation_suffix": "x"}, "continuation_suffix", "add continuation_of"),
        ({"continuation_of": ["p", "q"]}, "prompt", "list 2 prompts and text holds 1"),
        ({"no_stop_trim": 1}, "no_stop_trim", "true or false"),
    ],
)  # fmt: skip
def test_wrong_fields_are_named_in_openais_words(fields: dict, param: str, words: str) -> None:
    error = refusal(**{"prompt": "a", **fields})
    assert error.param == param and words in error.message
    assert "sampling_params" not in error.message


def test_a_refusal_by_the_worker_in_openais_words() -> None:
    with pytest.raises(RequestRefused) as caught, in_openai_words():
        raise RequestRefused(
            "max_new_tokens (5) and input_ids; send its full prompt as text or input_ids too",
            status=410, code="c", param="max_new_tokens",
        )  # fmt: skip
    error = caught.value
    assert error.message == "max_tokens (5) and prompt; send its full prompt as prompt too"
    assert (error.status, error.code, error.param) == (410, "c", "max_tokens")
    with pytest.raises(RequestRefused) as caught, in_openai_words():
        raise RequestRefused("busy", status=503)
    assert caught.value.param is None


# -- answers -----------------------------------------------------------------------------------------------------------


def output(text: str, finish: dict | None, **meta: Any) -> dict:
    counts = {"prompt_tokens": 4, "completion_tokens": 2, "cached_tokens": 3}
    return {"text": text, "output_ids": [], "meta_info": {"id": "r", "finish_reason": finish, **counts, **meta}}


LENGTH = {"type": "length", "length": 2}


def test_a_whole_answer(tokenizer: Tokenizer) -> None:
    call = parse_completion({"prompt": ["ab", "c"], "n": 2, "echo": True, "rid": "r"})
    outputs = [
        output("x", LENGTH),
        output("y", {"type": "stop", "matched": "!"}, retained={"tokens": 5, "ttl": 1.0}),
        output("z", LENGTH),
        output("", {"type": "abort", "message": "gone"}, continuation={"path": "match"}),
    ]
    answer = CompletionAnswer(call, "served", tokenizer).whole(list(enumerate(outputs)))
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
             "baton": {"rid": "r", "index": 1, "continuation": {"path": "match"}}},
        ],
        "usage": {"prompt_tokens": 8, "completion_tokens": 8, "total_tokens": 16,
                  "prompt_tokens_details": {"cached_tokens": 6}},
    }  # fmt: skip


def test_a_search_with_fewer_results_than_asked_for(tokenizer: Tokenizer) -> None:
    call = parse_completion({"prompt": ["ab", "c"], "n": 2, "use_beam_search": True, "rid": "r"})
    scores = {"cumulative_logprob": -1.0, "sequence_score": -0.5}
    few = {"beam_search": {"results": 1, "reason": "no more"}}
    outputs = [(0, output("x", LENGTH, **scores)), (1, output("y", LENGTH, **scores))]
    outputs.append((2, output("z", LENGTH, **scores, **few)))
    answer = CompletionAnswer(call, "m", tokenizer).whole(outputs)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert answer["choices"][2]["baton"] == {"rid": "r", "index": 0, **scores, **few}
    assert answer["usage"]["completion_tokens"] == 6 and answer["usage"]["prompt_tokens"] == 8


def test_echo_of_ids(tokenizer: Tokenizer) -> None:
    call = parse_completion({"prompt": [97, 256], "echo": True})
    answer = CompletionAnswer(call, "m", tokenizer).whole([(0, output("x", LENGTH))])
    assert answer["choices"][0]["text"] == "a<eos>x"


def stream(call: Any, tokenizer: Tokenizer, updates: list) -> list[dict]:
    async def source() -> AsyncIterator[tuple[int, dict]]:
        for update in updates:
            if isinstance(update, Exception):
                raise update
            yield update

    async def run() -> list[dict]:
        return [chunk async for chunk in CompletionAnswer(call, "m", tokenizer).chunks(source())]

    return asyncio.run(run())


def test_a_stream(tokenizer: Tokenizer) -> None:
    fields = {"prompt": "p", "n": 2, "echo": True, "stream": True}
    updates = [
        (0, output("a", None)),
        (1, output("b", None)),
        (0, output("", None)),  # half a character: nothing to say yet
        (0, output("c", LENGTH)),
        (1, output("", LENGTH)),
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


def test_an_error_in_a_stream_speaks_openais_words(tokenizer: Tokenizer) -> None:
    call = parse_completion({"prompt": "p", "stream": True})
    with pytest.raises(RequestRefused, match="max_tokens") as caught:
        stream(call, tokenizer, [RequestRefused("max_new_tokens", param="max_new_tokens")])
    assert caught.value.param == "max_tokens"
