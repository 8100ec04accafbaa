"""Expressions are plain data, and what cannot be served is refused where it is written."""

from __future__ import annotations

import re
from typing import Any

import pytest
from pydantic import BaseModel

from baton.entrypoints.lang import (
    Anthropic,
    LiteLLM,
    OpenAI,
    assistant,
    beam,
    gen,
    gen_int,
    gen_string,
    greedy_token_selection,
    image,
    role_message,
    select,
    separate_reasoning,
    user,
    video,
)
from baton.entrypoints.lang.ir import Beam, Gen, RoleBegin, RoleEnd, Select, steps_of


def test_expressions_are_concatenated() -> None:
    expr = "a" + gen("x") + "b" + (user("c") + assistant(gen("y") + "d"))
    assert list(steps_of(expr)) == [
        "a",
        Gen("x"),
        "b",
        RoleBegin("user"),
        "c",
        RoleEnd("user"),
        RoleBegin("assistant"),
        Gen("y"),
        "d",
        RoleEnd("assistant"),
    ]
    assert list(steps_of(role_message("tool"))) == [RoleBegin("tool"), "", RoleEnd("tool")]
    with pytest.raises(TypeError, match="unsupported operand"):
        gen("x") + 1  # type: ignore[operator]
    with pytest.raises(TypeError, match="int cannot be appended to a state"):
        list(steps_of(5))  # type: ignore[arg-type]


def test_gen_takes_sampling_parameters() -> None:
    expr = gen(
        "x", max_tokens=3, min_tokens=1, n=2, stop=("a", "b"), stop_token_ids=(5,), temperature=0.0, top_k=4,
        logit_bias={7: 1.5}, return_logprob=True, top_logprobs_num=2, regex=None,
    )  # fmt: skip
    assert expr == Gen(
        "x",
        {
            "max_new_tokens": 3,
            "min_new_tokens": 1,
            "n": 2,
            "stop": ["a", "b"],
            "stop_token_ids": [5],
            "temperature": 0.0,
            "top_k": 4,
            "logit_bias": {"7": 1.5},
        },
        {"return_logprob": True, "top_logprobs_num": 2},
    )
    assert gen() == Gen(None)


class Town(BaseModel):
    name: str


def test_gen_takes_the_form_of_its_text() -> None:
    schema = Town.model_json_schema()
    assert gen("x", regex="a+") == Gen("x", {"regex": "a+"}) and gen(ebnf="x") == Gen(None, {"ebnf": "x"})
    assert gen("x", json_schema="{}") == Gen("x", {"json_schema": "{}"})
    assert gen("x", json_schema=Town) == gen("x", dtype=Town) == Gen("x", {"json_schema": schema})


@pytest.mark.parametrize(
    ("dtype", "right", "wrong"),
    [
        (int, ["0", "-12", "9" * 18], ["01", "1.0", "", "+1", "9" * 30]),
        ("float", ["0.5", "-3", "12.25"], [".5", "1.", "1e5"]),
        (bool, ["True", "False"], ["true", ""]),
        (str, ['"a b"', '""'], ['"a', "a", '"a\nb"', '"a"b"']),
    ],
)
def test_types_of_a_gen_are_regular_expressions(dtype: type | str, right: list[str], wrong: list[str]) -> None:
    (step,) = steps_of(gen("x", dtype=dtype, max_tokens=9))
    assert isinstance(step, Gen) and step.sampling["max_new_tokens"] == 9
    pattern = re.compile(step.sampling["regex"])
    assert all(pattern.fullmatch(each) for each in right) and not any(pattern.fullmatch(each) for each in wrong)


def test_gen_int_and_gen_string_are_gens_of_a_type() -> None:
    assert gen_int("x", 4, temperature=0.5) == gen("x", 4, dtype=int, temperature=0.5)
    assert gen_string("x") == gen("x", dtype=str)


def test_beam_takes_search_parameters() -> None:
    assert beam("x", 4) == Beam("x", {"beam_width": 4, "n": 4})
    expr = beam(
        "x", width=8, max_tokens=3, item_trie="items", n=2, length_penalty=0.0, early_stopping="never", stop=("a",),
        stop_token_ids=(5,), logit_bias={7: 1.5}, ignore_eos=True, return_logprob=True, top_logprobs_num=2,
    )  # fmt: skip
    assert expr == Beam(
        "x",
        {
            "beam_width": 8,
            "n": 2,
            "max_new_tokens": 3,
            "item_trie": "items",
            "length_penalty": 0.0,
            "early_stopping": "never",
            "stop": ["a"],
            "stop_token_ids": [5],
            "logit_bias": {"7": 1.5},
            "ignore_eos": True,
        },
        {"return_logprob": True, "top_logprobs_num": 2},
    )
    assert list(steps_of("a" + beam(None, 2) + "b")) == ["a", Beam(None, {"beam_width": 2, "n": 2}), "b"]
    assert gen("x", item_trie="items") == Gen("x", {"item_trie": "items"})


def test_choices() -> None:
    assert select("x", choices=["a", "b"]) == Select("x", ("a", "b")) == gen("x", choices=["a", "b"], temperature=0)
    greedy = Select("x", ("a", "b"), greedy_token_selection)
    assert select("x", ["a", "b"], 0.0, greedy_token_selection) == greedy
    held = Gen("x", {"choice": ["a", "né"], "max_new_tokens": 4, "temperature": 0.5})
    assert (
        select("x", ["a", "né"], 0.5, "grammar")
        == held
        == gen("x", choices=["a", "né"], temperature=0.5, choices_method="grammar")
    )
    assert gen("x", choices=("a", "b"), choices_method="greedy_token_selection") == greedy


def test_gen_positional_parameters_match_sglang() -> None:
    expr = gen("x", 3, 1, 2, "a", [5], "b+", 0.5, 0.9, 4, 0.1, 0.2, 0.3, True, True, 7, 2, True)
    assert isinstance(expr, Gen) and expr.options == {
        "return_logprob": True,
        "logprob_start_len": 7,
        "top_logprobs_num": 2,
        "return_text_in_logprobs": True,
    }
    assert list(expr.sampling.values()) == [3, 1, 2, "a", [5], "b+", 0.5, 0.9, 4, 0.1, 0.2, 0.3, True]
    assert list(expr.sampling)[-3:] == ["frequency_penalty", "presence_penalty", "ignore_eos"]


def test_separate_reasoning_applies_to_gens_only() -> None:
    expr = separate_reasoning("a" + gen("x", max_tokens=3) + select("y", ["b"]), model_type="qwen3")
    assert list(steps_of(expr)) == ["a", Gen("x", {"max_new_tokens": 3}, {}, "qwen3"), Select("y", ("b",))]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: gen("x", regex="[0-9]", dtype=int), ValueError, "regex and dtype both say what the text looks like"),
        (lambda: gen("x", json_schema="{}", ebnf="x"), ValueError, "json_schema and ebnf both say"),
        (lambda: gen("x", dtype=list), ValueError, "dtype is <class 'list'>; use int, float, bool, str"),
        (lambda: gen("x", choices_method="greedy_token_selection"), ValueError, "choices_method .* give choices, too"),
        (lambda: gen("x", choices=[]), ValueError, "at least one non-empty string"),
        (
            lambda: gen("x", max_token=3),
            TypeError,
            r"gen\(\) has no parameter 'max_token'; did you mean 'max_tokens'\?",
        ),
        (lambda: gen("x", max_new_tokens=3), TypeError, "did you mean 'max_tokens'"),
        (lambda: gen("x", zzz=3), TypeError, r"no parameter 'zzz'$"),
        (lambda: select("x", choice=["a"]), TypeError, r"select\(\) has no parameter 'choice'; did you mean 'choices'"),
        (lambda: beam("x", 2, lenght_penalty=0.5), TypeError, "did you mean 'length_penalty'"),
        (lambda: gen(""), ValueError, "name of a variable is ''"),
        (lambda: beam("", 2), ValueError, "name of a variable is ''"),
        (lambda: beam("x", 2, temperature=0.5), TypeError, "temperature"),  # type: ignore[call-arg]
        (lambda: beam("x"), TypeError, "width"),  # type: ignore[call-arg]
        (lambda: select("x"), ValueError, "at least one non-empty string"),
        (lambda: select("x", choices="ab"), ValueError, "choices is 'ab'"),
        (lambda: select("x", choices=["a", ""]), ValueError, "non-empty"),
        (lambda: select("x", ["a"], temperature=1.0), ValueError, "temperature is 1.0"),
        (
            lambda: select("x", ["a"], choices_method="greedy"),
            ValueError,
            "choices_method is 'greedy'; use one of token_",
        ),
        (lambda: select("x", ["a"], choices_method=7), ValueError, "choices_method is 7"),  # type: ignore[arg-type]
        (lambda: separate_reasoning(gen("x")), ValueError, "model_type is None"),
        (lambda: separate_reasoning(gen("x"), "quen3"), ValueError, "no reasoning parser 'quen3'"),
        (lambda: separate_reasoning(gen(), "qwen3"), ValueError, "a gen has no name"),
        (lambda: gen_int("x", regex="a"), ValueError, "regex and dtype both say"),
        (lambda: gen_string("x", max_token=3), TypeError, "did you mean 'max_tokens'"),
        (lambda: image("cat.jpeg"), NotImplementedError, "image is not supported: the server has no vision models"),
        (lambda: video("cat.mp4", 8), NotImplementedError, "video is not supported"),
        (lambda: OpenAI("gpt-4o"), NotImplementedError, "OpenAI is not supported: programs run on Baton's own server"),
        (lambda: Anthropic("claude"), NotImplementedError, "Anthropic is not supported"),
        (lambda: LiteLLM("x"), NotImplementedError, "LiteLLM is not supported"),
    ],
)
def test_unsupported_expressions_are_refused(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
