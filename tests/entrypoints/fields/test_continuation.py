"""The fields of a continuation: which prompt gets what, and what contradicts itself."""

from __future__ import annotations

from typing import Any

import pytest

from baton.entrypoints.fields.prompts import PromptBatch
from baton.entrypoints.http_statuses import status_of
from baton.entrypoints.native.generate import parse_generate
from baton.scheduler.outcome import RequestRefused
from baton.scheduler.request_spec import ContinuationSpec


def parents(call: PromptBatch) -> list[str | None]:
    return [None if p.continuation is None else p.continuation.parent_rid for p in call.prompts]


def refusal(**fields: Any) -> RequestRefused:
    with pytest.raises(RequestRefused) as caught:
        parse_generate(fields)
    assert status_of(caught.value) == 400
    return caught.value


def test_continuation_needs_no_prompt() -> None:
    call = parse_generate({"continuation_of": "p", "rid": "c"})
    (prompt,) = call.prompts
    assert (prompt.rid, prompt.text, prompt.input_ids, prompt.spec.retain_ttl) == ("c", None, None, None)
    assert prompt.continuation == ContinuationSpec(parent_rid="p")
    assert not call.is_list


def test_every_continuation_field_is_read() -> None:
    fields = {
        "continuation_at": "now",
        "continuation_index": 2,
        "keep_parent": True,
        "retain_ttl": 5,
        "retain_n": 2,
        "retain_states": 3,
    }
    (prompt,) = parse_generate({"continuation_of": "p", "continuation_suffix": "x", **fields}).prompts
    assert prompt.continuation == ContinuationSpec(parent_rid="p", index=2, at="now", keep_parent=True, suffix_text="x")
    assert prompt.spec.retain_ttl == 5.0 and prompt.spec.retain_n == 2 and prompt.spec.retain_states == 3
    (prompt,) = parse_generate({"continuation_of": "p", "continuation_ids": [1, 2], "text": "whole"}).prompts
    assert prompt.continuation is not None and prompt.suffix_ids == [1, 2]
    assert prompt.text == "whole"
    (prompt,) = parse_generate({"text": "a", "retain_ttl": 0}).prompts
    assert prompt.continuation is None and prompt.spec.retain_ttl == 0.0


def test_response_id_is_accepted_as_rid() -> None:
    assert parents(parse_generate({"continuation_of": "cmpl-p"})) == ["p"]
    assert parse_generate({"text": "a", "rid": "cmpl-p"}).rid == "p"
    assert parse_generate({"text": "a"}, rid="cmpl-p").rid == "p"


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({"continuation_of": ["p", "q"]}, ["p", "q"]),
        ({"continuation_of": "p", "continuation_suffix": ["x", "y"]}, ["p", "p"]),
        ({"continuation_of": "p", "continuation_ids": [[1], [2, 3], []]}, ["p", "p", "p"]),
        ({"continuation_of": ["p"], "continuation_suffix": "x"}, ["p"]),
        ({"continuation_of": ["p", None], "text": ["a", "b"]}, ["p", None]),
        ({"continuation_of": "p", "input_ids": [[1], [2]], "continuation_suffix": "x"}, ["p", "p"]),
    ],
)
def test_any_list_field_makes_a_batch(fields: dict, want: list) -> None:
    call = parse_generate({**fields, "rid": "b"})
    assert call.is_list and parents(call) == want
    assert [p.rid for p in call.prompts] == [f"b_{i}" for i in range(len(want))]


def test_list_fields_are_spread_over_the_batch() -> None:
    call = parse_generate(
        {
            "continuation_of": ["p", "q", None],
            "text": ["a", "b", "c"],
            "continuation_suffix": ["x", None, None],
            "continuation_ids": [None, [7], None],
            "continuation_index": [1, None, None],
            "continuation_at": [None, "now", None],
            "keep_parent": [True, False, None],
            "retain_ttl": [None, 1, 2.5],
            "no_stop_trim": [True, None, False],
        }
    )
    assert [p.continuation for p in call.prompts] == [
        ContinuationSpec(parent_rid="p", index=1, keep_parent=True, suffix_text="x"),
        ContinuationSpec(parent_rid="q", at="now"),
        None,
    ]
    assert [p.suffix_ids for p in call.prompts] == [None, [7], None]
    assert [p.spec.retain_ttl for p in call.prompts] == [None, 1.0, 2.5]
    assert [p.sampling.no_stop_trim for p in call.prompts] == [True, False, False]


def test_single_suffix_ids_apply_to_the_whole_batch() -> None:
    call = parse_generate({"continuation_of": ["p", "q"], "continuation_ids": [1, 2]})
    assert [p.suffix_ids for p in call.prompts if p.continuation] == [[1, 2], [1, 2]]


def test_contradicting_no_stop_trim_is_refused() -> None:
    def trim(**fields: Any) -> bool:
        return parse_generate({"text": "a", **fields}).prompts[0].sampling.no_stop_trim

    assert trim(no_stop_trim=True) and not trim(no_stop_trim=False)
    assert trim(no_stop_trim=True, sampling_params={"no_stop_trim": True, "n": 2})
    assert trim(no_stop_trim=True, sampling_params={"no_stop_trim": None})
    error = refusal(text="a", no_stop_trim=True, sampling_params={"no_stop_trim": False})
    assert error.param == "no_stop_trim" and "contradict" in error.message
    error = refusal(text=["a", "b"], no_stop_trim=[True, False], sampling_params={"no_stop_trim": True})
    assert error.param == "no_stop_trim"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("continuation_suffix", "x"),
        ("continuation_suffix", ""),
        ("continuation_ids", [1]),
        ("continuation_ids", []),
        ("continuation_at", "now"),
        ("continuation_index", 1),
        ("keep_parent", True),
    ],
)
@pytest.mark.parametrize("prompt", [{}, {"text": "a"}])
def test_continuation_fields_without_a_parent_are_refused(name: str, value: Any, prompt: dict) -> None:
    error = refusal(**prompt, **{name: value})
    assert error.param == name and "add continuation_of" in error.message


def test_default_continuation_values_need_no_parent() -> None:
    (prompt,) = parse_generate(
        {"text": "a", "continuation_at": "finish", "continuation_index": 0, "keep_parent": False}
    ).prompts
    assert prompt.continuation is None


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"continuation_suffix": "x", "continuation_ids": [1]}, "continuation_suffix", "both given"),
        ({"continuation_suffix": 5}, "continuation_suffix", "a string"),
        ({"continuation_suffix": []}, "continuation_suffix", "empty list"),
        ({"continuation_ids": "x"}, "continuation_ids", "list of token ids"),
        ({"continuation_ids": [1.5]}, "continuation_ids", "list of token ids"),
        ({"continuation_ids": [True]}, "continuation_ids", "list of token ids"),
        ({"continuation_ids": [[1], 2]}, "continuation_ids", "list of token ids"),
        ({"continuation_at": "later"}, "continuation_at", "finish or now"),
        ({"continuation_at": 1}, "continuation_at", "finish or now"),
        ({"continuation_index": -1}, "continuation_index", "from 0"),
        ({"continuation_index": True}, "continuation_index", "whole number"),
        ({"keep_parent": 1}, "keep_parent", "true or false"),
        ({"retain_ttl": -1}, "retain_ttl", "0 to 86400"),
        ({"retain_n": 0}, "retain_n", "1 to n"),
        ({"retain_states": 0}, "retain_states", "use 1"),
        ({"retain_states": [True]}, "retain_states", "retain_states"),
        ({"retain_ttl": 1e9}, "retain_ttl", "0 to 86400"),
        ({"retain_ttl": float("nan")}, "retain_ttl", "0 to 86400"),
        ({"retain_ttl": "5"}, "retain_ttl", "a number"),
        ({"retain_ttl": True}, "retain_ttl", "a number"),
        ({"continuation_of": 5}, "continuation_of", "string"),
        ({"continuation_of": ""}, "continuation_of", "1 to 512"),
        ({"continuation_of": "cmpl-"}, "continuation_of", "1 to 512"),
        ({"continuation_of": []}, "continuation_of", "empty list"),
        ({"continuation_of": ["p", "q"], "continuation_suffix": ["x"]}, "continuation_suffix", "lists 1"),
        ({"continuation_of": ["p", "q"], "text": "a"}, "text", "list 2 prompts and text holds 1"),
        ({"continuation_of": ["p", "q"], "input_ids": [[1]]}, "input_ids", "holds 1"),
        ({"continuation_suffix": ["x", "y"], "text": "a"}, "text", "list 2 prompts"),
        ({"keep_parent": [True]}, "keep_parent", "single prompt"),
        ({"text": ""}, "text", "leave it out"),
        ({"input_ids": []}, "input_ids", "leave it out"),
        ({"text": "a", "input_ids": [1]}, "text", "both are given"),
        ({"continuation_off": 1}, "continuation_off", "did you mean continuation_of?"),
    ],
)
def test_invalid_fields_are_refused_by_name(fields: dict, param: str, words: str) -> None:
    error = refusal(**{"continuation_of": "p", **fields})
    assert error.param == param and words in error.message
