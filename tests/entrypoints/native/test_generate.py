"""The fields that /generate takes: served as in SGLang, refused by name, or accepted with a value without effect."""

from __future__ import annotations

from typing import Any

import pytest

from baton.entrypoints.fields.foreign_fields import FOREIGN_OF
from baton.entrypoints.fields.sampling import parse_sampling_params
from baton.entrypoints.http_statuses import status_of
from baton.entrypoints.native.generate import PROPERTIES, parse_generate
from baton.scheduler.outcome import RequestRefused
from baton.scheduler.sampling_params import SamplingParams


def refusal(**fields: Any) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        parse_generate(fields)
    assert status_of(caught.value) == 400
    return caught.value


def test_single_prompt_is_parsed() -> None:
    call = parse_generate({"text": "hi", "rid": "r", "sampling_params": {"temperature": 0}})
    (prompt,) = call.prompts
    assert (prompt.rid, prompt.group, prompt.text, prompt.input_ids) == ("r", "r", "hi", None)
    assert prompt.sampling == SamplingParams(temperature=0.0)
    assert (call.stream, call.is_list, call.rid) == (False, False, "r")


def test_missing_rids_are_generated() -> None:
    rids = {parse_generate({"text": "a"}).prompts[0].rid for _ in range(100)}
    assert len(rids) == 100
    assert parse_generate({"text": "a"}, rid="header").rid == "header"
    assert parse_generate({"text": "a", "rid": "body"}, rid="header").rid == "body"


def test_batch_of_prompts_is_parsed() -> None:
    call = parse_generate({"input_ids": [[1], [2, 3]], "rid": "b", "cache_salt": ["s", "t"], "extra_key": "k"})
    assert call.is_list
    assert [p.rid for p in call.prompts] == ["b_0", "b_1"]
    assert {p.group for p in call.prompts} == {"b"}
    assert [p.input_ids for p in call.prompts] == [[1], [2, 3]]
    assert len({p.spec.namespace for p in call.prompts}) == 2
    assert [p.rid for p in parse_generate({"text": ["a", "b"], "rid": ["x", "y"]}).prompts] == ["x", "y"]


def test_namespaces() -> None:
    def namespace(**fields: Any) -> str:
        return parse_generate({"text": "a", **fields}).prompts[0].spec.namespace

    assert namespace() == namespace(cache_salt="", extra_key=None) == ""
    assert namespace(cache_salt="s") == namespace(cache_salt="s") != namespace(cache_salt="t")
    assert len({namespace(cache_salt="k"), namespace(extra_key="k"), namespace(cache_salt="k", extra_key="k"), ""}) == 4


def test_null_is_the_default() -> None:
    nulls = dict.fromkeys([*PROPERTIES, *FOREIGN_OF["generate"]])
    call = parse_generate({**nulls, "text": "a"})
    assert call.prompts[0].sampling == SamplingParams() and not call.stream
    params = dict.fromkeys([*SamplingParams.__struct_fields__, *FOREIGN_OF["sampling_params"], "sampling_seed"])
    del params["max_new_tokens"]
    assert parse_sampling_params(params) == SamplingParams()
    assert parse_sampling_params({"max_new_tokens": None}) == SamplingParams(max_new_tokens=None)


def test_neutral_fields_of_sglang_clients_are_accepted() -> None:
    nulls = {"id": None, "rid": None, "offset": None, "replace": None}
    (prompt,) = parse_generate({"text": "a", "session_params": nulls, "logprob_start_len": 0}).prompts
    assert prompt.spec.logprobs is None
    assert parse_generate({"text": "a", "stream": True, "stream_options": {"include_usage": True}}).stream
    assert not parse_generate({"text": "a", "stream_options": {"include_usage": True}}).stream, "there anyway"


def test_top_k_of_zero_means_unlimited() -> None:
    assert parse_sampling_params({"top_k": 0}) == SamplingParams()
    assert parse_sampling_params({"top_k": 0, "beam_width": 2}) == SamplingParams(beam_width=2)
    error = refusal(text="a", sampling_params={"top_k": False})
    assert "expected int, got bool" in error.message and error.param == "sampling_params.top_k"


def test_vllm_and_llama_cpp_number_conventions_are_accepted() -> None:
    """A seed of -1 is none, other negative seeds are seeds, and a bias beyond the limit counts as the limit."""
    assert parse_sampling_params({"seed": -1}) == SamplingParams()
    assert parse_sampling_params({"seed": -1, "beam_width": 2}) == SamplingParams(beam_width=2)
    assert parse_sampling_params({"seed": -2}) == SamplingParams(seed=-2)
    assert parse_sampling_params({"repetition_penalty": 5}) == SamplingParams(repetition_penalty=5.0)
    biases = {"1": -1e9, "2": 10**400, "3": 100, "4": 99.5}
    assert parse_sampling_params({"logit_bias": biases}).logit_bias == {1: -100, 2: 100, 3: 100, 4: 99.5}
    error = refusal(text="a", sampling_params={"logit_bias": {"1": float("nan")}})
    assert error.param == "sampling_params.logit_bias"
    error = refusal(text="a", sampling_params={"logit_bias": {"1": True}})
    assert error.param == "sampling_params.logit_bias"


def test_unknown_field_error_suggests_the_nearest() -> None:
    assert "did you mean input_ids?" in refusal(inputids=[1]).message
    assert "known fields: text, input_ids" in refusal(qqq=1).message
    assert "top_p is not supported; use sampling_params.top_p" in refusal(text="a", top_p=0.5).message
    assert "prompt is not supported; use text" in refusal(prompt="a").message
    error = refusal(text="a", sampling_params={"top_P": 0.5})
    assert error.message == "unknown field sampling_params.top_P; did you mean sampling_params.top_p?"


def test_sglang_sampling_param_names_are_read() -> None:
    params = parse_sampling_params(
        {"stop": "x", "sampling_seed": 5, "stop_token_ids": [1, 2], "logit_bias": {"7": 1}, "top_p": 1, "n": 2}
    )
    assert params == SamplingParams(stop=("x",), seed=5, stop_token_ids=(1, 2), logit_bias={7: 1.0}, top_p=1.0, n=2)


@pytest.mark.parametrize(
    ("given", "message", "param"),
    [
        ({"temperature": "1"}, "sampling_params.temperature: expected float, got str", "temperature"),
        (
            {"temperature": -1},
            "sampling_params.temperature is -1.0; use 0 (greedy) to 1e+30",
            "temperature",
        ),
        ({"top_k": 2.5}, "sampling_params.top_k: expected int, got float", "top_k"),
        ({"n": True}, "sampling_params.n: expected int, got bool", "n"),
        ({"stop": [1]}, "sampling_params.stop: expected str, got int", "stop"),
        ({"stop": ""}, "an empty stop string", "stop"),
        ({"stop_regex": [""]}, "an empty expression", "stop_regex"),
        ({"stop_regex": 5}, "sampling_params.stop_regex: expected array, got int", "stop_regex"),
        ({"stop_regex": "a(?=b)"}, "sampling_params.stop_regex holds 'a(?=b)': look-arounds", "stop_regex"),
        ({"stop_token_ids": 5}, "sampling_params.stop_token_ids: expected array, got int", "stop_token_ids"),
        ({"logit_bias": {"a": 1}}, "its keys must be token ids", "logit_bias"),
        ({"logit_bias": {"1": "a"}}, "sampling_params.logit_bias: expected float, got str", "logit_bias"),
        ({"logit_bias": [1]}, "sampling_params.logit_bias: expected object", "logit_bias"),
        ({"min_new_tokens": 9, "max_new_tokens": 5}, "exceeds max_new_tokens (5)", "min_new_tokens"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1; use 1 or more", "max_new_tokens"),
    ],
)
def test_invalid_sampling_params_are_refused(given: dict, message: str, param: str) -> None:
    error = refusal(text="a", sampling_params=given)
    assert message in error.message and error.param == f"sampling_params.{param}"


def test_beam_search_parameters_are_read() -> None:
    given = {"beam_width": 4, "n": 3, "length_penalty": 0, "early_stopping": "never", "item_trie": "t"}
    call = parse_generate({"text": "a", "sampling_params": {**given, "temperature": 0}})
    assert call.is_list and call.prompts[0].sampling == SamplingParams(
        beam_width=4, n=3, length_penalty=0.0, early_stopping="never", item_trie="t", temperature=0.0
    )
    one = parse_generate({"text": "a", "sampling_params": {"beam_width": 4, "early_stopping": True}})
    assert not one.is_list and one.prompts[0].sampling == SamplingParams(beam_width=4, early_stopping=True)
    for none in (None, 0):
        assert parse_sampling_params({"beam_width": none, "temperature": 0.5}) == SamplingParams(temperature=0.5)
    neutral = {"length_penalty": 1, "early_stopping": False, "use_beam_search": False}
    assert parse_sampling_params(neutral) == SamplingParams()


@pytest.mark.parametrize(
    ("given", "message", "param"),
    [
        ({"use_beam_search": True}, "use_beam_search is not supported; use beam_width, the number of beams", None),
        ({"beam_width": 4.0}, "sampling_params.beam_width: expected int, got float", None),
        ({"beam_width": "4"}, "sampling_params.beam_width: expected int, got str", None),
        ({"beam_width": True}, "sampling_params.beam_width: expected int, got bool", None),
        ({"beam_width": False}, "sampling_params.beam_width: expected int, got bool", None),
        ({"beam_width": -1}, "beam_width is -1; use 1 to 512", None),
        ({"beam_width": 513}, "beam_width is 513; use 1 to 512", None),
        ({"beam_width": 4, "n": 5}, "n is 5; a beam search returns at most beam_width (4)", "n"),
        ({"beam_width": 4, "length_penalty": "1.0"}, "length_penalty: expected float, got str", "length_penalty"),
        ({"beam_width": 4, "length_penalty": True}, "length_penalty: expected float, got bool", "length_penalty"),
        ({"beam_width": 4, "length_penalty": 11}, "length_penalty is 11.0; use a value in", "length_penalty"),
        ({"length_penalty": 2}, "length_penalty is 2.0; it needs a beam_width", "length_penalty"),
        ({"early_stopping": True}, "early_stopping is True; it needs a beam_width", "early_stopping"),
        ({"beam_width": 4, "early_stopping": 1}, 'is 1; it takes true, false or "never"', "early_stopping"),
        ({"beam_width": 4, "early_stopping": 0.0}, "is 0.0; it takes true, false", "early_stopping"),
        ({"beam_width": 4, "early_stopping": "True"}, 'is "True"; it takes true, false', "early_stopping"),
        ({"beam_width": 4, "early_stopping": []}, "is []; it takes true, false", "early_stopping"),
        ({"beam_width": 4, "temperature": 0.5}, "temperature is 0.5; a beam search does not sample", "temperature"),
        ({"beam_width": 4, "top_k": 5}, "top_k is 5; a beam search does not sample", "top_k"),
        ({"beam_width": 4, "seed": 5}, "seed is 5; a beam search draws nothing", "seed"),
        ({"beam_width": 4, "presence_penalty": 1}, "a beam search compares log-prob", "presence_penalty"),
        ({"item_trie": 5}, "sampling_params.item_trie: expected str, got int", "item_trie"),
        ({"item_trie": ""}, "name a loaded trie", "item_trie"),
    ],
)
def test_invalid_beam_search_parameters_are_refused(given: dict, message: str, param: str | None) -> None:
    error = refusal(text="a", sampling_params=given)
    assert message in error.message and error.param == f"sampling_params.{param or next(iter(given))}"


def test_invalid_sampling_params_name_the_prompt() -> None:
    error = refusal(text=["a", "b"], sampling_params=[{}, {"top_p": 2}])
    assert error.param == "sampling_params[1].top_p"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": ["a", "b"], "rid": ["x"]}, "rid"),
        ({"text": "a", "rid": 7}, "rid"),
        ({"text": "a", "rid": "x" * 513}, "rid"),
        ({"text": ["a", "b"], "return_logprob": [True]}, "return_logprob"),
        ({"text": "a", "return_logprob": [True]}, "return_logprob"),
        ({"text": "a", "cache_salt": 5}, "cache_salt"),
        ({"text": "a", "top_logprobs_num": 2}, "top_logprobs_num"),
        ({"text": "a", "logprob_start_len": -2}, "logprob_start_len"),
        ({"text": "a", "stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
        ({"text": "a", "session_params": {"id": None, "rid": "x"}}, "session_params"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num"),
        ({"text": ["a", 1]}, "text"),
        ({"input_ids": [[1], 2]}, "input_ids"),
        ({"input_ids": [True]}, "input_ids"),
        ({"input_ids": "abc"}, "input_ids"),
    ],
)
def test_invalid_fields_are_refused_by_name(fields: dict, param: str) -> None:
    assert refusal(**fields).param == param


def test_priorities() -> None:
    assert parse_generate({"text": "a"}).prompts[0].spec.priority == 0
    batch = parse_generate({"text": ["a", "b", "c"], "priority": [5, None, -2]})
    assert [prompt.spec.priority for prompt in batch.prompts] == [5, 0, -2]
    for wrong in (1.5, "high", True, 10**9):
        assert refusal(text="a", priority=wrong).param == "priority"


def test_no_reuse_from_is_read_per_prompt() -> None:
    assert parse_generate({"text": "a"}).prompts[0].spec.no_reuse_from is None
    batch = parse_generate({"text": ["a", "b", "c"], "no_reuse_from": [5, None, 0]})
    assert [prompt.spec.no_reuse_from for prompt in batch.prompts] == [5, None, 0]
    for wrong in (1.5, "all", True, -1):
        assert refusal(text="a", no_reuse_from=wrong).param == "no_reuse_from"


def test_jobs() -> None:
    spec = parse_generate({"text": "a"}).prompts[0].spec
    assert (spec.job_id, spec.is_last_step) == (None, False)
    spec = parse_generate({"text": "a", "job_id": "j", "is_last_step": True}).prompts[0].spec
    assert (spec.job_id, spec.is_last_step) == ("j", True)
    batch = parse_generate({"text": ["a", "b"], "job_id": ["j", None]})
    assert [prompt.spec.job_id for prompt in batch.prompts] == ["j", None]
    assert parse_generate({"text": "a", "job_id": None, "is_last_step": None}).prompts[0].spec.job_id is None
    for wrong in (1, "", "j" * 513, ["j"]):
        assert refusal(text="a", job_id=wrong).param == "job_id"
    assert refusal(text="a", job_id="j", is_last_step=1).param == "is_last_step"
    assert "add job_id" in refusal(text="a", is_last_step=True).message
    spec = parse_generate({"text": "a", "job_id": "j", "parent_job_id": "p"}).prompts[0].spec
    assert (spec.job_id, spec.parent_job_id) == ("j", "p")
    assert refusal(text="a", job_id="j", parent_job_id="").param == "parent_job_id"
    assert refusal(text="a", parent_job_id="p").message.startswith("parent_job_id is set without job_id")


def test_excess_prompts_are_refused() -> None:
    assert len(parse_generate({"text": ["a", "b"]}, max_prompts=2).prompts) == 2
    with pytest.raises(RequestRefused, match="text holds 3 prompts; send at most 2") as refused:
        parse_generate({"text": ["a"] * 3}, max_prompts=2)
    assert refused.value.param == "text"
    with pytest.raises(RequestRefused, match="continuation_of holds 3 prompts"):
        parse_generate({"continuation_of": ["a", "b", "c"], "continuation_suffix": "x"}, max_prompts=2)
